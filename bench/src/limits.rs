//! The machine's measured limits.

use std::time::Duration;

use marlinspike::w4a8::limits::{CHAINS, Instruction, read};
use rayon::ThreadPool;
use serde::Serialize;

use crate::{machine, threads};

/// A rate per second: the best of many passes, and their median.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rate {
    /// Of the fastest pass.
    pub best: f64,
    /// Of the median pass.
    pub median: f64,
}

impl Rate {
    fn new(amount: f64, times: &[Duration]) -> Self {
        let mut rates: Vec<f64> = times.iter().map(|t| amount / t.as_secs_f64()).collect();
        rates.sort_by(f64::total_cmp);
        let (best, median) = (rates[rates.len() - 1], rates[(rates.len() - 1) / 2]);
        Self { best, median }
    }

    /// The better of two measurements.
    fn better(self, other: Self) -> Self {
        if self.best >= other.best { self } else { other }
    }
}

/// Limits with one number of threads.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Limits {
    /// Threads, each pinned if the pool's are.
    pub threads: usize,
    /// 10^9 bytes read from memory per second.
    pub read_gb_s: Rate,
    /// 10^9 multiply-accumulates per second of the kernel's instruction on registers; absent for a
    /// kernel that has no such instruction.
    pub gmac_s: Option<Rate>,
}

/// How much to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Bytes to read in a pass, by all threads together.
    pub read_bytes: usize,
    /// Additions to each accumulator in a pass.
    pub rounds: u64,
    /// Passes.
    pub passes: usize,
}

impl Effort {
    /// Takes some tenths of a second: a buffer of 256 MiB, or four times the last-level cache.
    pub fn full() -> Self {
        let read_bytes = (4 * machine::last_level_cache()).max(256 << 20);
        Self { read_bytes, rounds: 2_000_000, passes: 15 }
    }

    /// The same buffer, fewer passes.
    pub fn quick() -> Self {
        Self { passes: 5, rounds: 500_000, ..Self::full() }
    }
}

impl Limits {
    /// Measures the pool's threads together.
    pub fn measure(pool: &ThreadPool, instruction: Option<Instruction>, effort: Effort) -> Self {
        let threads = pool.current_num_threads();
        let words = (effort.read_bytes / 8).div_ceil(threads).max(1);
        // Zeroed pages from the allocator would all map to one physical page.
        let buffer: Vec<Vec<u64>> = pool.broadcast(|_| (0..words as u64).collect());
        let times = threads::together(pool, effort.passes, |thread| {
            std::hint::black_box(read(&buffer[thread]));
        });
        let read_gb_s = Rate::new((words * threads * 8) as f64 / 1e9, &times);
        let gmac_s = instruction.map(|instruction| {
            let times = threads::together(pool, effort.passes, |_| {
                std::hint::black_box(instruction.run(effort.rounds));
            });
            let macs = instruction.macs() * effort.rounds * (CHAINS * threads) as u64;
            Rate::new(macs as f64 / 1e9, &times)
        });
        Self { threads, read_gb_s, gmac_s }
    }

    /// The better of two measurements with the same number of threads, since no machine is ever
    /// entirely idle.
    #[must_use]
    pub fn better(self, other: Self) -> Self {
        let gmac_s = match (self.gmac_s, other.gmac_s) {
            (Some(a), Some(b)) => Some(a.better(b)),
            (a, b) => a.or(b),
        };
        Self { read_gb_s: self.read_gb_s.better(other.read_gb_s), gmac_s, ..self }
    }

    /// The least time in seconds for a call that reads `bytes` and does `macs`, by the best rates,
    /// and which of the two determines it.
    pub fn floor(&self, bytes: f64, macs: f64) -> (f64, Bound) {
        let read = bytes / 1e9 / self.read_gb_s.best;
        let multiply = self.gmac_s.map_or(0.0, |rate| macs / 1e9 / rate.best);
        if multiply > read { (multiply, Bound::Multiply) } else { (read, Bound::Read) }
    }
}

/// What determines a call's least time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Reading its weights.
    Read,
    /// Its multiply-accumulates.
    Multiply,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(best: f64) -> Rate {
        Rate { best, median: best / 2.0 }
    }

    #[test]
    fn the_slower_of_reading_and_multiplying_is_the_floor() {
        let limits = Limits { threads: 1, read_gb_s: rate(10.0), gmac_s: Some(rate(100.0)) };
        assert_eq!(limits.floor(20e9, 100e9), (2.0, Bound::Read));
        assert_eq!(limits.floor(10e9, 300e9), (3.0, Bound::Multiply));
        assert_eq!(Limits { gmac_s: None, ..limits }.floor(10e9, 1e15), (1.0, Bound::Read));
    }

    #[test]
    fn rates_of_passes() {
        let times = [4, 1, 2].map(Duration::from_secs);
        assert_eq!(Rate::new(8.0, &times), Rate { best: 8.0, median: 4.0 });
    }

    #[test]
    fn of_two_measurements_the_better_counts() {
        let first = Limits { threads: 1, read_gb_s: rate(3.0), gmac_s: Some(rate(1.0)) };
        let second = Limits { threads: 1, read_gb_s: rate(2.0), gmac_s: Some(rate(9.0)) };
        let both = Limits { threads: 1, read_gb_s: rate(3.0), gmac_s: Some(rate(9.0)) };
        assert_eq!(first.better(second), both);
        assert_eq!(second.better(first), both);
    }

    #[test]
    fn something_is_read_and_multiplied() {
        let pool = threads::pool(1, &[]).unwrap();
        let effort = Effort { read_bytes: 1 << 20, rounds: 1000, passes: 2 };
        let instruction = Instruction::ALL.into_iter().find(|i| i.run(0).is_some());
        let limits = Limits::measure(&pool, instruction, effort);
        let sane = |rate: Rate| rate.median > 0.0 && rate.best >= rate.median && rate.best < 1e9;
        assert!(sane(limits.read_gb_s), "{limits:?}");
        assert_eq!(limits.gmac_s.is_some_and(sane), instruction.is_some(), "{limits:?}");
    }
}
