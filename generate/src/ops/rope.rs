//! Rotary position embedding.

use marlinspike::w4a8::wide::{Loop, wide};

use crate::config::Yarn;

/// The frequencies of a model. Halves of a head are rotated against each other (element i with
/// i + `head_dim` / 2), as in Llama, Mixtral and Qwen checkpoints, or neighbours, as in DeepSeek's.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// θ^(−2i / `head_dim`), computed in f64 and rounded to f32, as models are trained with.
    inverse: Vec<f32>,
    /// Factor on cos and sin.
    factor: f64,
}

impl Rope {
    /// The frequencies of heads of `head_dim` values, which must be even.
    pub fn new(theta: f64, head_dim: usize) -> Self {
        let power = |i: usize| {
            let exponent = (2 * i) as f32 / head_dim as f32;
            (1.0 / libm::pow(theta, f64::from(exponent))) as f32
        };
        Self { inverse: (0..head_dim / 2).map(power).collect(), factor: 1.0 }
    }

    /// The frequencies scaled by YaRN: pair i divides its frequency by the factor for a share of
    /// (i − low) / (high − low), limited to 0 and 1. In f64, rounded once.
    pub fn yarn(theta: f64, head_dim: usize, yarn: &Yarn) -> Self {
        let [low, high] = yarn.range(theta, head_dim);
        let frequency = |i: usize| {
            let exponent = (2 * i) as f32 / head_dim as f32;
            let own = 1.0 / libm::pow(theta, f64::from(exponent));
            let share = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            (own / yarn.factor * share + own * (1.0 - share)) as f32
        };
        let inverse = (0..head_dim / 2).map(frequency).collect();
        Self { inverse, factor: yarn.attention_factor }
    }

    /// cos and sin of every frequency at `position` to `table` `[2][head_dim / 2]`.
    ///
    /// The angle is position · frequency in f32, as transformers and vLLM compute it. cos and sin are
    /// computed in f64, with YaRN's factor, and rounded once.
    pub fn angles(&self, position: usize, table: &mut [f32]) {
        let (cosines, sines) = table.split_at_mut(self.inverse.len());
        for ((cos, sin), &frequency) in cosines.iter_mut().zip(sines).zip(&self.inverse) {
            let angle = f64::from(position as f32 * frequency);
            *cos = (libm::cos(angle) * self.factor) as f32;
            *sin = (libm::sin(angle) * self.factor) as f32;
        }
    }

    /// Numbers that [`Rope::angles`] writes.
    pub fn table_len(&self) -> usize {
        2 * self.inverse.len()
    }
}

/// Rotates every head of a row by the angles of one position.
pub fn rotate(row: &mut [f32], table: &[f32]) {
    wide(Rotate { row, table });
}

struct Rotate<'a> {
    row: &'a mut [f32],
    table: &'a [f32],
}

impl Loop for Rotate<'_> {
    #[inline(always)]
    fn run(self) {
        let half = self.table.len() / 2;
        let (cos, sin) = self.table.split_at(half);
        for head in self.row.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}

/// As [`rotate`], for heads whose element 2i is rotated against 2i + 1.
pub fn rotate_pairs(row: &mut [f32], table: &[f32]) {
    let half = table.len() / 2;
    let (cos, sin) = table.split_at(half);
    for head in row.chunks_exact_mut(2 * half) {
        for (i, pair) in head.chunks_exact_mut(2).enumerate() {
            let (a, b) = (pair[0], pair[1]);
            pair[0] = a * cos[i] - b * sin[i];
            pair[1] = b * cos[i] + a * sin[i];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_zero_is_the_identity_and_lengths_are_kept() {
        let rope = Rope::new(10_000.0, 8);
        let row: Vec<f32> = (0..16).map(|i| i as f32 - 7.5).collect();
        let (mut table, mut rotated) = ([0.0; 8], row.clone());
        rope.angles(0, &mut table);
        rotate(&mut rotated, &table);
        assert_eq!(rotated, row);
        rope.angles(5, &mut table);
        rotate(&mut rotated, &table);
        for (a, b) in row.chunks(8).zip(rotated.chunks(8)) {
            let norm = |x: &[f32]| x.iter().map(|x| f64::from(x * x)).sum::<f64>();
            assert!((norm(a) - norm(b)).abs() < 1e-4 && a != b);
        }
        // The fastest frequency turns by one radian for each position.
        let expected = f64::from(row[0]) * 5f64.cos() - f64::from(row[4]) * 5f64.sin();
        assert!((f64::from(rotated[0]) - expected).abs() < 1e-5);
    }

    #[test]
    fn neighbours_turn_as_halves_do_in_the_other_order() {
        let rope = Rope::new(10_000.0, 8);
        let mut table = [0.0; 8];
        rope.angles(3, &mut table);
        let halves: Vec<f32> = (0..8).map(|i| i as f32 - 3.5).collect();
        let mut pairs: Vec<f32> = (0..8).map(|i| halves[i / 2 + i % 2 * 4]).collect();
        let mut rotated = halves.clone();
        rotate(&mut rotated, &table);
        rotate_pairs(&mut pairs, &table);
        for i in 0..4 {
            assert_eq!([pairs[2 * i], pairs[2 * i + 1]], [rotated[i], rotated[i + 4]]);
        }
    }

    #[test]
    fn yarn_keeps_fast_frequencies_and_divides_slow_ones() {
        let yarn = Yarn {
            factor: 32.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_positions: 4096,
            truncate: false,
            attention_factor: 1.5,
            score_factor: 1.0,
        };
        // gpt-oss: pairs 8.09 to 17.4 are blended.
        let (plain, scaled) = (Rope::new(150_000.0, 64), Rope::yarn(150_000.0, 64, &yarn));
        assert_eq!(plain.inverse[..9], scaled.inverse[..9]);
        for i in 18..32 {
            assert!((plain.inverse[i] / scaled.inverse[i] - 32.0).abs() < 1e-4, "{i}");
        }
        assert!((9..18).all(|i| {
            let ratio = plain.inverse[i] / scaled.inverse[i];
            ratio > 1.0 && ratio < 32.0
        }));
        let whole = Rope::yarn(150_000.0, 64, &Yarn { truncate: true, ..yarn });
        assert!(whole.inverse[9] < plain.inverse[9] && whole.inverse[9] != scaled.inverse[9]);
        let mut table = [0.0; 64];
        scaled.angles(0, &mut table);
        assert!(table[..32].iter().all(|&cos| cos == 1.5), "{table:?}");
    }
}
