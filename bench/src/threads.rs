//! Pools of pinned threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// The logical CPUs that this process may use (`taskset -c 0,2` restricts them), ascending; empty
/// where the system does not report them.
pub fn cpus() -> Vec<usize> {
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    let mut ids: Vec<usize> = cores.into_iter().map(|core| core.id).collect();
    ids.sort_unstable();
    ids
}

/// Number of threads that can run at once.
pub fn available() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Pins the calling thread to a logical CPU. Returns whether that succeeded.
pub fn pin(cpu: usize) -> bool {
    core_affinity::set_for_current(core_affinity::CoreId { id: cpu })
}

/// A pool of `count` threads, with thread i pinned to the i-th of `cpus` if there are enough. Call
/// [`cpus`] before pinning the calling thread, since it would then return that CPU only.
///
/// # Errors
/// When the system cannot create the threads.
pub fn pool(count: usize, cpus: &[usize]) -> Result<ThreadPool, ThreadPoolBuildError> {
    let cpus = cpus.to_vec();
    ThreadPoolBuilder::new()
        .num_threads(count)
        .start_handler(move |thread| {
            if cpus.len() >= count {
                pin(cpus[thread]);
            }
        })
        .build()
}

/// Runs `work(thread)` on every thread of the pool at once, `passes` times. Returns the time of each
/// pass, from the moment when all threads are ready until all are done.
pub(crate) fn together(
    pool: &ThreadPool,
    passes: usize,
    work: impl Fn(usize) + Sync,
) -> Vec<Duration> {
    let gate = Gate { waiting: AtomicUsize::new(0), size: pool.current_num_threads() };
    let times = pool.broadcast(|context| {
        let mut times = Vec::with_capacity(passes);
        for _ in 0..passes {
            gate.pass();
            let start = Instant::now();
            work(context.index());
            gate.pass();
            times.push(start.elapsed());
        }
        times
    });
    let slowest = |pass: usize| times.iter().map(|times| times[pass]).max().unwrap_or_default();
    (0..passes).map(slowest).collect()
}

/// A barrier that spins: waking a sleeping thread would take as long as the work that is timed.
struct Gate {
    waiting: AtomicUsize,
    size: usize,
}

impl Gate {
    fn pass(&self) {
        let arrived = self.waiting.fetch_add(1, Ordering::AcqRel) + 1;
        let full = arrived.next_multiple_of(self.size);
        let mut turns = 0u32;
        while self.waiting.load(Ordering::Acquire) < full {
            turns += 1;
            // Yield: there may be more threads than CPUs.
            if turns.is_multiple_of(1024) {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_works_in_every_pass() {
        let pool = pool(3, &cpus()).unwrap();
        let done: [AtomicUsize; 3] = Default::default();
        let times = together(&pool, 5, |thread| {
            done[thread].fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(times.len(), 5);
        assert_eq!(done.map(AtomicUsize::into_inner), [5; 3]);
    }
}
