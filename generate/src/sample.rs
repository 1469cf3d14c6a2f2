//! The next token from logits.

use crate::error::{GenerateError, Result};
use crate::ops::LANES;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Sampling {
    /// The largest logit; among equal ones the lowest id.
    #[default]
    Greedy,
    /// A draw from the softmax of logits / temperature.
    Random {
        /// Divisor of the logits, above 0.
        temperature: f64,
        /// Candidates: this many of the largest logits.
        top_k: Option<usize>,
        /// Candidates: as few of the largest probabilities as sum to this share, from above 0 to 1.
        top_p: Option<f64>,
        /// Seed of the draws.
        seed: u64,
    },
}

/// Chooses one token after the other.
///
/// Candidates are sorted by falling logit, equal ones by id. Their probabilities e^((l − max) / T) are
/// computed in f64. `top_k` cuts the list first; `top_p` keeps the shortest beginning whose share of the
/// sum reaches it. With a draw u in [0, 1), the token is the first whose cumulative probability exceeds
/// u times the candidates' sum.
///
/// Draw i is the upper 53 bits of SplitMix64's output i for the seed, over 2^53: it depends on nothing
/// but seed and i.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    state: u64,
}

impl Sampler {
    /// A sampler before its first draw.
    ///
    /// # Errors
    /// [`GenerateError::Sampling`] for a number out of range.
    pub fn new(sampling: Sampling) -> Result<Self> {
        let mut state = 0;
        if let Sampling::Random { temperature, top_k, top_p, seed } = sampling {
            let wrong =
                |name, found: f64, expected| Err(GenerateError::Sampling { name, found, expected });
            if !(temperature.is_finite() && temperature > 0.0) {
                return wrong("temperature", temperature, "a number above 0");
            }
            if top_k == Some(0) {
                return wrong("top_k", 0.0, "1 or more");
            }
            if let Some(p) = top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
                return wrong("top_p", p, "a number above 0, at most 1");
            }
            state = seed;
        }
        Ok(Self { sampling, state })
    }

    /// The next token of finite logits, 1 or more.
    pub fn next(&mut self, logits: &[f32]) -> u32 {
        let Sampling::Random { temperature, top_k, top_p, .. } = self.sampling else {
            return greedy(logits);
        };
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let order = |a: &u32, b: &u32| {
            let (left, right) = (logits[*a as usize], logits[*b as usize]);
            right.total_cmp(&left).then(a.cmp(b))
        };
        if let Some(k) = top_k.filter(|&k| k < ids.len()) {
            ids.select_nth_unstable_by(k - 1, order);
            ids.truncate(k);
        }
        ids.sort_unstable_by(order);
        let max = f64::from(logits[ids[0] as usize]);
        let power = |&id: &u32| libm::exp((f64::from(logits[id as usize]) - max) / temperature);
        let powers: Vec<f64> = ids.iter().map(power).collect();
        let mut total: f64 = powers.iter().sum();
        let mut count = powers.len();
        if let Some(p) = top_p {
            let mut sum = 0.0;
            let reaches = |x: &f64| {
                sum += x;
                sum >= p * total
            };
            count = powers.iter().position(reaches).map_or(count, |i| i + 1);
            total = powers[..count].iter().sum();
        }
        let target = self.draw() * total;
        let mut sum = 0.0;
        let exceeds = |x: &f64| {
            sum += x;
            sum > target
        };
        ids[powers[..count].iter().position(exceeds).unwrap_or(count - 1)]
    }

    /// SplitMix64, as a number in [0, 1).
    fn draw(&mut self) -> f64 {
        (split_mix(&mut self.state) >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The first of the largest logits.
fn greedy(logits: &[f32]) -> u32 {
    // One maximum for each lane of a vector, then the place of the largest.
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in logits.chunks(lanes.len()) {
        for (max, &logit) in lanes.iter_mut().zip(chunk) {
            *max = if logit > *max { logit } else { *max };
        }
    }
    let max = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|&logit| logit == max).unwrap_or(0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(top_k: Option<usize>, top_p: Option<f64>, seed: u64) -> Sampling {
        Sampling::Random { temperature: 0.5, top_k, top_p, seed }
    }

    #[test]
    fn split_mix_gives_the_published_numbers() {
        let mut state = 1_234_567;
        let expected: [u64; 5] = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!(expected.map(|_| split_mix(&mut state)), expected);
    }

    #[test]
    fn greedy_takes_the_first_of_equal_logits() {
        let mut sampler = Sampler::new(Sampling::Greedy).unwrap();
        assert_eq!(sampler.next(&[-3.0, 2.0, 2.0, 1.0]), 1);
        assert_eq!(sampler.next(&[-3.0]), 0);
        // Every place of a vector and of the rest after it, zeros of both signs, equal ones after it.
        for first in 0..37 {
            let mut logits = [-1.0f32; 37];
            logits[first..].fill(0.0);
            logits[first] = -0.0;
            assert_eq!(sampler.next(&logits), first as u32);
        }
    }

    /// Frequencies of 20,000 draws.
    fn frequencies(sampling: Sampling, logits: &[f32]) -> Vec<f64> {
        let mut sampler = Sampler::new(sampling).unwrap();
        let mut counts = vec![0.0; logits.len()];
        for _ in 0..20_000 {
            counts[sampler.next(logits) as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    #[test]
    fn frequencies_are_the_probabilities_of_the_candidates() {
        let logits = [0.0, 1.0, 0.5, -1.0, 0.5];
        let powers: Vec<f64> = logits.iter().map(|&l| (f64::from(l) * 2.0).exp()).collect();
        // By falling logit: 1 (share 0.499), 2 and 4 (0.184 each), 0 (0.068), 3 (0.009).
        for (top_k, top_p, kept) in [
            (None, None, &[0, 1, 2, 3, 4][..]),
            (Some(2), None, &[1, 2]),
            (None, Some(0.6), &[1, 2]),
            (Some(4), Some(0.9), &[1, 2, 4]),
            (None, Some(1e-9), &[1]),
            (Some(9), Some(1.0), &[0, 1, 2, 3, 4]),
        ] {
            let total: f64 = kept.iter().map(|&i| powers[i]).sum();
            let found = frequencies(random(top_k, top_p, 3), &logits);
            for (i, &share) in found.iter().enumerate() {
                let expected = if kept.contains(&i) { powers[i] / total } else { 0.0 };
                // Five standard deviations of 20,000 draws.
                assert!((share - expected).abs() < 0.018, "{top_k:?} {top_p:?}: {i} {share}");
                assert_eq!(share > 0.0, kept.contains(&i));
            }
        }
    }

    #[test]
    fn a_seed_gives_the_same_tokens_and_another_seed_others() {
        let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32 / 3.0).collect();
        let draw = |seed| -> Vec<u32> {
            let mut sampler = Sampler::new(random(None, Some(0.95), seed)).unwrap();
            (0..20).map(|_| sampler.next(&logits)).collect()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn numbers_out_of_range_are_refused_by_name() {
        let base = |temperature, top_k, top_p| {
            Sampler::new(Sampling::Random { temperature, top_k, top_p, seed: 0 })
        };
        for (found, name) in [
            (base(0.0, None, None), "temperature"),
            (base(f64::NAN, None, None), "temperature"),
            (base(1.0, Some(0), None), "top_k"),
            (base(1.0, None, Some(0.0)), "top_p"),
            (base(1.0, None, Some(1.1)), "top_p"),
        ] {
            assert!(found.unwrap_err().to_string().contains(name));
        }
    }
}
