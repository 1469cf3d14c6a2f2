//! Interleaved bursts of calls.

use std::time::{Duration, Instant};

use serde::Serialize;

/// A contender: calls that are timed.
pub trait Contender {
    /// Makes `calls` calls in sequence and appends the seconds of each. The number of a call,
    /// `first` + i, selects the weights: consecutive calls read different weights.
    fn burst(&mut self, first: usize, calls: usize, seconds: &mut Vec<f64>);
}

/// Limits of a measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Budget {
    /// Calls of each contender after which it is done.
    pub calls: usize,
    /// Time for all contenders together after which no burst begins, once each has made
    /// [`Budget::LEAST`] calls.
    pub time: Duration,
}

impl Budget {
    /// The fewest calls of a contender that give a median.
    pub const LEAST: usize = 3;
    /// Length of a burst: long enough that waking threads, which slept while another contender ran,
    /// costs little.
    const BURST: Duration = Duration::from_millis(20);
    /// Pause between two contenders, in which the threads of the first stop polling for work.
    const PAUSE: Duration = Duration::from_millis(2);
}

/// Times of one contender's calls.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Seconds {
    /// Of the fastest call.
    pub best: f64,
    /// Of the median call.
    pub median: f64,
    /// Calls.
    pub calls: usize,
}

impl Seconds {
    /// Statistics of at least one time.
    fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let (best, median) = (times[0], times[times.len() / 2]);
        Self { best, median, calls: times.len() }
    }
}

/// Times the contenders alternately, a burst of each, so that other load on the machine affects all
/// of them. The first calls are not counted.
pub fn race(contenders: &mut [&mut dyn Contender], budget: Budget) -> Vec<Seconds> {
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); contenders.len()];
    let mut bursts = Vec::new();
    for contender in &mut *contenders {
        let mut first = Vec::new();
        contender.burst(0, 2, &mut first);
        let call = first.last().copied().unwrap_or(0.0).max(1e-7);
        let calls = (Budget::BURST.as_secs_f64() / call).ceil().min(budget.calls as f64);
        bursts.push((calls as usize).max(1));
    }
    let start = Instant::now();
    loop {
        for ((contender, times), &calls) in contenders.iter_mut().zip(&mut times).zip(&bursts) {
            if times.len() < budget.calls.max(Budget::LEAST) {
                std::thread::sleep(Budget::PAUSE);
                contender.burst(2 + times.len(), calls, times);
            }
        }
        let fewest = times.iter().map(Vec::len).min().unwrap_or(0);
        let enough = fewest >= budget.calls.max(Budget::LEAST);
        if enough || (fewest >= Budget::LEAST && start.elapsed() >= budget.time) {
            return times.into_iter().map(Seconds::of).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports a given time for each call, and records the call numbers.
    struct Clock {
        seconds: f64,
        numbers: Vec<usize>,
    }

    impl Contender for Clock {
        fn burst(&mut self, first: usize, calls: usize, seconds: &mut Vec<f64>) {
            for number in first..first + calls {
                self.numbers.push(number);
                seconds.push(self.seconds * number as f64);
            }
        }
    }

    #[test]
    fn calls_go_on_until_there_are_enough() {
        let mut quick = Clock { seconds: 0.001, numbers: Vec::new() };
        let mut slow = Clock { seconds: 1.0, numbers: Vec::new() };
        let budget = Budget { calls: 7, time: Duration::from_secs(60) };
        let found = race(&mut [&mut quick, &mut slow], budget);
        assert_eq!(found[0], Seconds { best: 0.002, median: 0.005, calls: 7 });
        // One call per burst, after two that are not counted; each burst continues the numbering.
        assert_eq!(slow.numbers, (0..9).collect::<Vec<_>>());
        assert_eq!(found[1], Seconds { best: 2.0, median: 5.0, calls: 7 });
    }

    #[test]
    fn time_ends_a_race_when_each_had_a_few_calls() {
        let mut slow = Clock { seconds: 1.0, numbers: Vec::new() };
        let found = race(&mut [&mut slow], Budget { calls: 1000, time: Duration::ZERO });
        assert_eq!(found[0].calls, Budget::LEAST);
    }
}
