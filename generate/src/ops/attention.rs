//! Causal attention of query heads that share their keys, at one position.

use std::array;

use marlinspike::moe::math::exp;
use marlinspike::w4a8::wide::{Loop, wide};

use super::{LANES, sum, tree};

/// Queries that are computed together: each key and value is loaded once for all of them.
const QUERIES: usize = 4;
/// Keys whose partial sums are kept before their lanes are added. In one loop with the products, the
/// additions would make the compiler use vectors of four.
const KEYS: usize = 32;

/// The query heads of one key head, and the keys and values that they see, oldest first.
#[derive(Debug)]
pub struct Heads<'a> {
    /// `[heads, head_dim]`.
    pub queries: &'a [f32],
    /// `[n, head_dim]`.
    pub keys: &'a [f32],
    /// `[n, value_dim]`. Of longer rows, as latents with their rotated keys, the first values count.
    pub values: &'a [f32],
    /// Elements of a query and a key.
    pub head_dim: usize,
    /// Elements of an output.
    pub value_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// One more score of each head, without a value: a part of the maximum and of Σ pⱼ.
    pub sinks: Option<&'a [f32]>,
    /// Memory for the scores.
    pub scores: &'a mut Vec<f32>,
    /// `[heads, value_dim]`.
    pub out: &'a mut [f32],
}

impl Heads<'_> {
    /// For each query, out = Σ pⱼ·vⱼ / Σ pⱼ with pⱼ = e^(sⱼ − max s) and sⱼ = (q · kⱼ) · scale.
    ///
    /// Σ pⱼ·vⱼ is added from the oldest key on by fused multiply-adds and divided at the end. The
    /// bits do not depend on how many queries are given together. A sink counts for max s and adds
    /// e^(sink − max s) to Σ pⱼ, after the scores.
    pub fn attend(self) {
        wide(self);
    }
}

impl Loop for Heads<'_> {
    #[inline(always)]
    fn run(mut self) {
        let heads = self.queries.len() / self.head_dim;
        let whole = heads / QUERIES * QUERIES;
        for first in (0..whole).step_by(QUERIES) {
            self.group::<QUERIES>(first);
        }
        for first in whole..heads {
            self.group::<1>(first);
        }
    }
}

impl Heads<'_> {
    /// Queries `first` to `first + Q`.
    #[inline(always)]
    fn group<const Q: usize>(&mut self, first: usize) {
        let (dim, n) = (self.head_dim, self.keys.len() / self.head_dim);
        self.scores.clear();
        self.scores.resize(Q * n, 0.0);
        let queries: [&[f32]; Q] = array::from_fn(|i| &self.queries[(first + i) * dim..][..dim]);
        for (block, keys) in self.keys.chunks(KEYS * dim).enumerate() {
            scores(queries, keys, self.scale, &mut self.scores[block * KEYS..], n);
        }
        let sink = |i: usize| self.sinks.map(|sinks| sinks[first + i]);
        let mut sunk = [0.0; Q];
        for (i, scores) in self.scores.chunks_exact_mut(n).enumerate() {
            let mut max = sink(i).unwrap_or(f32::NEG_INFINITY);
            for &score in &*scores {
                max = if score > max { score } else { max };
            }
            for score in scores.iter_mut() {
                *score = exp(*score - max);
            }
            sunk[i] = sink(i).map_or(0.0, |sink| exp(sink - max));
        }
        let (dim, stride) = (self.value_dim, self.values.len() / n);
        let out = &mut self.out[first * dim..][..Q * dim];
        let pairs = dim / (2 * LANES) * 2 * LANES;
        for d in (0..pairs).step_by(2 * LANES) {
            values::<Q, 2>(self.scores, (self.values, stride), (d, dim), out);
        }
        let whole = dim / LANES * LANES;
        if pairs < whole {
            values::<Q, 1>(self.scores, (self.values, stride), (pairs, dim), out);
        }
        for d in whole..dim {
            for (scores, out) in self.scores.chunks_exact(n).zip(out.chunks_exact_mut(dim)) {
                let terms = scores.iter().zip(self.values.chunks_exact(stride));
                out[d] = terms.fold(0.0, |sum, (p, value)| p.mul_add(value[d], sum));
            }
        }
        let heads = self.scores.chunks_exact(n).zip(out.chunks_exact_mut(dim));
        for ((scores, out), sunk) in heads.zip(sunk) {
            let total = sum(scores) + sunk;
            for out in out {
                *out /= total;
            }
        }
    }
}

/// A vector of one element for each lane.
#[derive(Clone, Copy)]
struct Vector([f32; LANES]);

impl Vector {
    const ZERO: Self = Self([0.0; LANES]);

    /// self + a·b, rounded once.
    #[inline(always)]
    fn add_product(mut self, a: Self, b: Self) -> Self {
        for lane in 0..LANES {
            self.0[lane] = a.0[lane].mul_add(b.0[lane], self.0[lane]);
        }
        self
    }
}

/// The scores of Q queries and up to [`KEYS`] keys; those of query i start at `out[i * n]`. Each is
/// the sum that [`dot`](super::dot) defines, times `scale`.
#[inline(always)]
fn scores<const Q: usize>(
    queries: [&[f32]; Q],
    keys: &[f32],
    scale: f32,
    out: &mut [f32],
    n: usize,
) {
    let dim = queries[0].len();
    let mut sums = [[Vector::ZERO; Q]; KEYS];
    let chunks: [&[[f32; LANES]]; Q] = array::from_fn(|i| queries[i].as_chunks().0);
    for (key, sums) in keys.chunks_exact(dim).zip(&mut sums) {
        let mut lanes = [Vector::ZERO; Q];
        for (c, key) in key.as_chunks().0.iter().enumerate() {
            for i in 0..Q {
                lanes[i] = lanes[i].add_product(Vector(chunks[i][c]), Vector(*key));
            }
        }
        *sums = lanes;
    }
    let whole = dim / LANES * LANES;
    for (j, (key, sums)) in keys.chunks_exact(dim).zip(&mut sums).enumerate() {
        for i in 0..Q {
            let lanes = &mut sums[i].0;
            for (lane, (a, b)) in
                lanes.iter_mut().zip(queries[i][whole..].iter().zip(&key[whole..]))
            {
                *lane = a.mul_add(*b, *lane);
            }
            out[i * n + j] = tree(*lanes) * scale;
        }
    }
}

/// Σ pⱼ·vⱼ of Q queries, for V vectors from element `d` of heads of `dim`; rows of values are `stride`
/// apart.
#[inline(always)]
fn values<const Q: usize, const V: usize>(
    scores: &[f32],
    (values, stride): (&[f32], usize),
    (d, dim): (usize, usize),
    out: &mut [f32],
) {
    let n = scores.len() / Q;
    let scores: [&[f32]; Q] = array::from_fn(|i| &scores[i * n..][..n]);
    let mut sums = [[Vector::ZERO; V]; Q];
    for (j, value) in values.chunks_exact(stride).take(n).enumerate() {
        let value: &[[f32; LANES]] = value[d..].as_chunks().0;
        let value: [Vector; V] = array::from_fn(|v| Vector(value[v]));
        for i in 0..Q {
            let p = Vector([scores[i][j]; LANES]);
            for v in 0..V {
                sums[i][v] = sums[i][v].add_product(p, value[v]);
            }
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        for (v, sum) in sums.iter().enumerate() {
            out[i * dim + d + v * LANES..][..LANES].copy_from_slice(&sum.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::dot;

    fn value(i: usize) -> f32 {
        ((i * 7919) % 101) as f32 / 50.0 - 1.0
    }

    fn attended(queries: &[f32], (keys, values): (&[f32], &[f32]), head_dim: usize) -> Vec<f32> {
        let (mut scores, mut out) = (Vec::new(), vec![9.0; queries.len()]);
        let (scale, sinks, value_dim) = (0.5, None, head_dim);
        let (scores, to) = (&mut scores, &mut out[..]);
        Heads { queries, keys, values, head_dim, value_dim, scale, sinks, scores, out: to }
            .attend();
        out
    }

    #[test]
    fn equals_a_softmax_in_f64() {
        let (dim, n) = (4, 21);
        let queries: Vec<f32> = (0..dim).map(|i| value(i + 3) * 3.0).collect();
        let keys: Vec<f32> = (0..n * dim).map(value).collect();
        let values: Vec<f32> = (0..n * dim).map(|i| value(i + 40)).collect();
        let out = attended(&queries, (&keys, &values), dim);
        let score = |key: &[f32]| -> f64 {
            queries.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() * 0.5
        };
        let p: Vec<f64> = keys.chunks(dim).map(|k| score(k).exp()).collect();
        for d in 0..dim {
            let weighted: f64 = (0..n).map(|j| p[j] * f64::from(values[j * dim + d])).sum();
            let expected = weighted / p.iter().sum::<f64>();
            assert!((f64::from(out[d]) - expected).abs() < 1e-6, "{d}");
        }
    }

    /// One head after the other and one key after the other, as `attend` defines them.
    fn one_by_one(query: &[f32], keys: &[f32], values: &[f32]) -> Vec<f32> {
        let dim = query.len();
        let scores: Vec<f32> = keys.chunks(dim).map(|key| dot(query, key) * 0.5).collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let p: Vec<f32> = scores.iter().map(|s| exp(s - max)).collect();
        let total = sum(&p);
        let element = |d: usize| {
            let terms = p.iter().zip(values.chunks(dim));
            terms.fold(0.0f32, |sum, (p, value)| p.mul_add(value[d], sum)) / total
        };
        (0..dim).map(element).collect()
    }

    #[test]
    fn groups_change_no_bit() {
        for dim in [16, 24, 64, 80, 128] {
            for n in [1, 2, 3, 40] {
                let keys: Vec<f32> = (0..n * dim).map(|i| value(i + 11)).collect();
                let values: Vec<f32> = (0..n * dim).map(|i| value(3 * i + 40)).collect();
                for heads in 1..10 {
                    let queries: Vec<f32> = (0..heads * dim).map(|i| value(5 * i + 7)).collect();
                    let out = attended(&queries, (&keys, &values), dim);
                    let expected: Vec<f32> = queries
                        .chunks(dim)
                        .flat_map(|query| one_by_one(query, &keys, &values))
                        .collect();
                    assert_eq!(out, expected, "dim {dim}, {n} keys, {heads} heads");
                }
            }
        }
    }

    #[test]
    fn a_sink_takes_its_share_and_longer_rows_count_by_their_first_values() {
        // Equal scores of 0 and sinks of ln 2 and −∞: shares of 1/4 and of 1/2 for two keys.
        let (queries, keys) = ([0.0f32; 8], [1.0f32; 8]);
        let values = [4.0f32, 8.0, 99.0, 12.0, 16.0, 99.0];
        let (scores, mut out) = (&mut Vec::new(), [0.0; 4]);
        let sinks = Some(&[std::f32::consts::LN_2, f32::NEG_INFINITY][..]);
        let (head_dim, value_dim, scale) = (4, 2, 1.0);
        let (queries, keys, values, to) = (&queries, &keys, &values, &mut out);
        Heads { queries, keys, values, head_dim, value_dim, scale, sinks, scores, out: to }
            .attend();
        for (found, expected) in out.iter().zip([4.0, 6.0, 8.0, 12.0]) {
            assert!((found - expected).abs() < 1e-5, "{out:?}");
        }
    }
}
