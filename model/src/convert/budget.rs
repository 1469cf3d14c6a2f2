//! A bound on the memory of work in progress.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A limit on the bytes in use at once, granted in the order of the requests.
#[derive(Debug)]
pub struct Budget {
    total: u64,
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Debug)]
struct State {
    used: u64,
    peak: u64,
    /// The request to serve next: small requests must not overtake a large one forever.
    serving: u64,
    next: u64,
}

/// A part of the budget, returned when dropped.
#[derive(Debug)]
pub struct Share<'b> {
    budget: &'b Budget,
    bytes: u64,
}

impl Budget {
    /// A budget of `total` bytes.
    pub fn new(total: u64) -> Self {
        let state = State { used: 0, peak: 0, serving: 0, next: 0 };
        Self { total, state: Mutex::new(state), freed: Condvar::new() }
    }

    /// The limit, in bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The largest number of bytes that were in use at once so far.
    pub fn peak(&self) -> u64 {
        self.lock().peak
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is valid after every statement, so a poisoned lock is usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for `bytes`. A request above the limit waits for the whole budget.
    pub fn take(&self, bytes: u64) -> Share<'_> {
        let bytes = bytes.min(self.total);
        let mut state = self.lock();
        let turn = state.next;
        state.next += 1;
        while state.serving != turn || state.used + bytes > self.total {
            state = self.freed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.used += bytes;
        state.peak = state.peak.max(state.used);
        state.serving += 1;
        drop(state);
        self.freed.notify_all();
        Share { budget: self, bytes }
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.budget.lock().used -= self.bytes;
        self.budget.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn never_more_than_the_total() {
        let budget = Budget::new(100);
        let (used, most) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|s| {
            for i in 0..8u64 {
                let (budget, used, most) = (&budget, &used, &most);
                s.spawn(move || {
                    for j in 0..50 {
                        let bytes = (i * 37 + j * 13) % 70 + 1;
                        let share = budget.take(bytes);
                        let now = used.fetch_add(bytes, Ordering::SeqCst) + bytes;
                        most.fetch_max(now, Ordering::SeqCst);
                        std::thread::yield_now();
                        used.fetch_sub(bytes, Ordering::SeqCst);
                        drop(share);
                    }
                });
            }
        });
        let most = most.into_inner();
        assert!(most <= budget.peak() && budget.peak() <= 100, "{most} {}", budget.peak());
        drop(budget.take(1000));
    }
}
