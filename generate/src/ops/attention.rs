//! Causal attention of one query head at one position.

use marlinspike::moe::math::exp;
use marlinspike::w4a8::wide::{Loop, wide};

use super::{dot, sum};

/// One query, and the keys and values that it sees, oldest first.
#[derive(Debug)]
pub struct Head<'a> {
    /// `[head_dim]`.
    pub query: &'a [f32],
    /// `[n, head_dim]`.
    pub keys: &'a [f32],
    /// `[n, head_dim]`.
    pub values: &'a [f32],
    /// Factor on the scores.
    pub scale: f32,
    /// Memory for the scores.
    pub scores: &'a mut Vec<f32>,
    /// `[head_dim]`.
    pub out: &'a mut [f32],
}

impl Head<'_> {
    /// out = Σ pⱼ·vⱼ / Σ pⱼ with pⱼ = e^(sⱼ − max s) and sⱼ = (q · kⱼ) · scale.
    ///
    /// Σ pⱼ·vⱼ is added from the oldest key on by fused multiply-adds and divided at the end.
    pub fn attend(self) {
        wide(self);
    }
}

impl Loop for Head<'_> {
    #[inline(always)]
    fn run(self) {
        let Self { query, keys, values, scale, scores, out } = self;
        let dim = query.len();
        scores.clear();
        let mut max = f32::NEG_INFINITY;
        for key in keys.chunks_exact(dim) {
            let score = dot(query, key) * scale;
            max = if score > max { score } else { max };
            scores.push(score);
        }
        for score in scores.iter_mut() {
            *score = exp(*score - max);
        }
        out.fill(0.0);
        for (&p, value) in scores.iter().zip(values.chunks_exact(dim)) {
            for (out, &v) in out.iter_mut().zip(value) {
                *out = p.mul_add(v, *out);
            }
        }
        let total = sum(scores);
        for out in out {
            *out /= total;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_a_softmax_in_f64() {
        let (dim, n) = (4, 21);
        let value = |i: usize| ((i * 7919) % 101) as f32 / 50.0 - 1.0;
        let query: Vec<f32> = (0..dim).map(|i| value(i + 3) * 3.0).collect();
        let keys: Vec<f32> = (0..n * dim).map(value).collect();
        let values: Vec<f32> = (0..n * dim).map(|i| value(i + 40)).collect();
        let (mut scores, mut out) = (Vec::new(), vec![9.0; dim]);
        let (q, o) = (&query, &mut out);
        Head { query: q, keys: &keys, values: &values, scale: 0.5, scores: &mut scores, out: o }
            .attend();
        let score = |key: &[f32]| -> f64 {
            query.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() * 0.5
        };
        let p: Vec<f64> = keys.chunks(dim).map(|k| score(k).exp()).collect();
        for d in 0..dim {
            let weighted: f64 = (0..n).map(|j| p[j] * f64::from(values[j * dim + d])).sum();
            let expected = weighted / p.iter().sum::<f64>();
            assert!((f64::from(out[d]) - expected).abs() < 1e-6, "{d}");
        }
    }
}
