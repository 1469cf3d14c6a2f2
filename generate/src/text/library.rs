//! Calls of libraries on untrusted data.

use marlinspike::{Error, panics};

/// Runs `call`, which is the work of the library `name` on untrusted data. A panic is bad input: no
/// library promises that it has none.
pub(super) fn library<T>(
    name: &str,
    call: impl FnOnce() -> Result<T, String>,
) -> Result<T, String> {
    struct Failed(String);
    impl From<Error> for Failed {
        fn from(error: Error) -> Self {
            Self(match error {
                Error::Internal { message, .. } => message,
                other => other.to_string(),
            })
        }
    }
    let mut own = None;
    let called = panics::catch(|| {
        call().map_err(|reason| {
            own = Some(reason);
            Failed(String::new())
        })
    });
    called.map_err(|Failed(panic)| {
        own.unwrap_or_else(|| {
            format!("found what the library {name} cannot process: it stops with `{panic}`")
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_a_library_is_bad_input() {
        let past_end = std::hint::black_box(3);
        let found = library("indices", || Ok([1, 2, 3][past_end])).unwrap_err();
        let expected = "found what the library indices cannot process: it stops with `index out of \
            bounds: the len is 3 but the index is 3`";
        assert_eq!(found, expected);
        assert_eq!(library::<()>("x", || Err("its own".to_owned())), Err("its own".to_owned()));
        assert_eq!(library("x", || Ok(7)), Ok(7));
    }
}
