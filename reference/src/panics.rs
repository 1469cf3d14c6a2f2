//! Panics as errors, so that one case cannot take the verdicts on others with it.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::{Mutex, Once, PoisonError};

use crate::Error;

/// A panic that the hook has seen.
struct Seen {
    message: String,
    location: String,
}

/// The last panics of all threads: one in a rayon worker is caught in the thread that waits for it.
static SEEN: Mutex<VecDeque<Seen>> = Mutex::new(VecDeque::new());
/// How many panics are remembered.
const REMEMBERED: usize = 64;

thread_local! {
    /// How many calls of [`catch`] this thread is in.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Runs `f`; a panic inside becomes [`Error::Internal`] with its message and place.
///
/// The first call installs a panic hook. It prints nothing for a panic that is caught here, unless
/// `RUST_BACKTRACE` is set, and passes all others on to the hook before it. Aborts (stack
/// overflow, a failed allocation) cannot be caught: [`crate::case::Limits`] is against those.
///
/// # Errors
/// Those of `f`, and [`Error::Internal`].
pub fn catch<T, E: From<Error>>(f: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    static HOOK: Once = Once::new();
    HOOK.call_once(install);
    DEPTH.set(DEPTH.get() + 1);
    // What a panic leaves half done is dropped with `f`: callers pass only what they read.
    let caught = panic::catch_unwind(AssertUnwindSafe(f));
    DEPTH.set(DEPTH.get() - 1);
    caught.unwrap_or_else(|payload| {
        let message = message_of(&*payload);
        let location = location_of(&message);
        Err(Error::Internal { message, location }.into())
    })
}

fn install() {
    let previous = panic::take_hook();
    panic::set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
        let location = info.location().map(|l| format!("{}:{}", l.file(), l.line()));
        let seen =
            Seen { message: message_of(info.payload()), location: location.unwrap_or_default() };
        let mut all = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
        all.push_back(seen);
        if all.len() > REMEMBERED {
            all.pop_front();
        }
        drop(all);
        if DEPTH.get() == 0 || std::env::var_os("RUST_BACKTRACE").is_some_and(|v| v != "0") {
            previous(info);
        }
    }));
}

fn message_of(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

/// Where the latest panic with this message was raised.
fn location_of(message: &str) -> String {
    let all = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    let seen = all.iter().rev().find(|seen| seen.message == message);
    seen.map_or_else(|| "an unknown place".to_owned(), |seen| seen.location.clone())
}

#[cfg(test)]
mod tests {
    use rayon::prelude::*;

    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_place() {
        let past_end = std::hint::black_box(3);
        let caught = catch(|| -> crate::Result<i32> { Ok([1, 2, 3][past_end]) });
        let Err(Error::Internal { message, location }) = caught else { panic!("{caught:?}") };
        assert_eq!(message, "index out of bounds: the len is 3 but the index is 3");
        assert!(location.starts_with(file!()), "{location}");
        assert_eq!(catch(|| crate::Result::<i32>::Ok(7)), Ok(7));
    }

    #[test]
    fn panics_of_workers_keep_their_places() {
        let caught: Vec<_> = (0..64)
            .into_par_iter()
            .map(|i| {
                catch(|| -> crate::Result<usize> {
                    let inner = (0..8usize).into_par_iter().map(|j| match (i % 2, j) {
                        (1, 5) => panic!("case {i} cannot go on"),
                        _ => i,
                    });
                    Ok(inner.sum())
                })
            })
            .collect();
        for (i, result) in caught.into_iter().enumerate() {
            match result {
                Ok(sum) => assert_eq!((i % 2, sum), (0, 8 * i)),
                Err(Error::Internal { message, location }) => {
                    assert_eq!(message, format!("case {i} cannot go on"));
                    assert!(location.starts_with(file!()), "{location}");
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
}
