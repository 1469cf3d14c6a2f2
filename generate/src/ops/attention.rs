//! Causal attention of query heads that share their keys, at one position.
// Index loops with fixed bounds unroll, so that arrays become registers. Iterators and
// `copy_from_slice` may stay calls, which spill all vectors.
#![allow(clippy::needless_range_loop, clippy::manual_memcpy)]

mod keys;

use marlinspike::moe::math::exp;
use marlinspike::w4a8::wide::{Loop, wide};

use super::vector::Vector;
use super::{LANES, resize, sum};
use keys::Scores;
pub use keys::{BLOCK, Keys, pack};

/// Queries that are computed together: each key and value is loaded once for all of them.
pub(crate) const QUERIES: usize = 4;
/// The same, where there are fewer.
pub(crate) const FEW_QUERIES: usize = 2;
/// Vectors of values that are added together.
const VECTORS: usize = 4;

/// The query heads of one key head, and the keys and values that they see, oldest first.
#[derive(Debug)]
pub struct Heads<'a> {
    /// `[heads, head_dim]`.
    pub queries: &'a [f32],
    /// n keys.
    pub keys: Keys<'a>,
    /// `[n, value_dim]`. Of longer rows, as latents with their rotated keys, the first values count.
    pub values: &'a [f32],
    /// n.
    pub count: usize,
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
    /// bits depend neither on how many queries are given together nor on how keys are stored. A sink
    /// counts for max s and adds e^(sink − max s) to Σ pⱼ, after the scores.
    pub fn attend(self) {
        wide(self);
    }
}

/// Calls `$object.$function::<QUERIES>` for groups of heads, then `::<FEW_QUERIES>` and `::<1>` for the rest, with
/// the first head.
macro_rules! for_heads {
    ($heads:expr, |$head:ident| $call:ident::<_>$arguments:tt) => {
        for_heads!(@ $heads, $head,
            [$call::<QUERIES>$arguments], [$call::<FEW_QUERIES>$arguments], [$call::<1>$arguments])
    };
    (@ $heads:expr, $head:ident, [$many:expr], [$few:expr], [$one:expr]) => {{
        let mut $head = 0;
        while $head + QUERIES <= $heads {
            $many;
            $head += QUERIES;
        }
        while $head + FEW_QUERIES <= $heads {
            $few;
            $head += FEW_QUERIES;
        }
        while $head < $heads {
            $one;
            $head += 1;
        }
    }};
}

impl Loop for Heads<'_> {
    #[inline(always)]
    fn run(mut self) {
        let skipped = match self.keys {
            Keys::Rows(_) => 0,
            Keys::Packed { skipped, .. } => skipped,
        };
        let heads = self.queries.len() / self.head_dim;
        let stride = (skipped + self.count).next_multiple_of(BLOCK);
        // The totals of the heads follow their scores.
        resize(self.scores, heads * (stride + 1));
        for first in (0..stride).step_by(BLOCK) {
            for_heads!(heads, |head| scores::<_>(&mut self, head, first, stride));
        }
        let (scores, totals) = self.scores.split_at_mut(heads * stride);
        for head in 0..heads {
            let scores = &mut scores[head * stride + skipped..][..self.count];
            totals[head] = exponentials(scores, self.sinks.map(|sinks| sinks[head]));
        }
        let (scores, dim) = (&scores[skipped..], self.value_dim);
        let out = &mut self.out[..heads * dim];
        out.fill(0.0);
        let width = self.values.len() / self.count;
        for (block, values) in self.values.chunks(BLOCK * width).enumerate() {
            let terms = Terms { scores: &scores[block * BLOCK..], stride, values, width, dim };
            for_heads!(heads, |head| add_terms::<_>(terms, head, out));
        }
        for head in 0..heads {
            for out in &mut out[head * dim..][..dim] {
                *out /= totals[head];
            }
        }
    }
}

/// The scores of Q heads and a block of keys.
#[inline(always)]
fn scores<const Q: usize>(of: &mut Heads<'_>, head: usize, first: usize, stride: usize) {
    let dim = of.head_dim;
    let queries = &of.queries[head * dim..][..Q * dim];
    let scores = &mut of.scores[head * stride + first..];
    let mut scores = Scores { scores, stride, scale: of.scale };
    match of.keys {
        Keys::Rows(keys) => {
            let last = of.count.min(first + BLOCK);
            scores.of_rows::<Q>(queries, &keys[first * dim..last * dim], dim);
        }
        Keys::Packed { blocks, .. } => {
            scores.of_block::<Q>(queries, &blocks[first * dim..][..BLOCK * dim], dim);
        }
    }
}

/// Scores to e^(s − max); returns their sum, with the sink's share.
#[inline(always)]
fn exponentials(scores: &mut [f32], sink: Option<f32>) -> f32 {
    // A maximum for each lane: one for all would be a chain of comparisons.
    let mut lanes = [sink.unwrap_or(f32::NEG_INFINITY); LANES];
    let (chunks, rest) = scores.as_chunks::<LANES>();
    for chunk in chunks {
        for j in 0..LANES {
            lanes[j] = if chunk[j] > lanes[j] { chunk[j] } else { lanes[j] };
        }
    }
    let mut max = f32::NEG_INFINITY;
    for &x in lanes.iter().chain(rest) {
        max = if x > max { x } else { max };
    }
    for score in &mut *scores {
        *score = exp(*score - max);
    }
    sum(scores) + sink.map_or(0.0, |sink| exp(sink - max))
}

/// What a block of keys adds to the outputs.
#[derive(Clone, Copy)]
struct Terms<'a> {
    /// Those of head i begin with `scores[i * stride]`.
    scores: &'a [f32],
    stride: usize,
    /// `[keys, width]`, of which the first `dim` values count.
    values: &'a [f32],
    width: usize,
    dim: usize,
}

/// Adds pⱼ·vⱼ of a block of keys to the outputs of Q heads.
#[inline(always)]
fn add_terms<const Q: usize>(of: Terms<'_>, head: usize, out: &mut [f32]) {
    let Terms { scores, stride, values, width, dim } = of;
    let (scores, out) = (&scores[head * stride..], &mut out[head * dim..][..Q * dim]);
    let mut d = 0;
    while d + VECTORS * LANES <= dim {
        add_vectors::<Q, VECTORS>(of, scores, d, out);
        d += VECTORS * LANES;
    }
    while d + LANES <= dim {
        add_vectors::<Q, 1>(of, scores, d, out);
        d += LANES;
    }
    for d in d..dim {
        for i in 0..Q {
            for j in 0..values.len() / width {
                let sum = &mut out[i * dim + d];
                *sum = scores[i * stride + j].mul_add(values[j * width + d], *sum);
            }
        }
    }
}

/// [`add_terms`] of V vectors from element `d` on.
#[inline(always)]
fn add_vectors<const Q: usize, const V: usize>(
    Terms { stride, values, width, dim, .. }: Terms<'_>,
    scores: &[f32],
    d: usize,
    out: &mut [f32],
) {
    let mut sums = [[Vector::ZERO; V]; Q];
    for i in 0..Q {
        for v in 0..V {
            sums[i][v] = Vector::load(out, i * dim + d + v * LANES);
        }
    }
    for j in 0..values.len() / width {
        let values = &values[j * width + d..][..V * LANES];
        let mut value = [Vector::ZERO; V];
        for v in 0..V {
            value[v] = Vector::load(values, v * LANES);
        }
        for i in 0..Q {
            let p = Vector([scores[i * stride + j]; LANES]);
            for v in 0..V {
                sums[i][v] = sums[i][v].add_product(p, value[v]);
            }
        }
    }
    for i in 0..Q {
        for v in 0..V {
            sums[i][v].store(out, i * dim + d + v * LANES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::dot;

    const SCALE: f32 = 0.5;

    fn value(i: usize) -> f32 {
        ((i * 7919) % 101) as f32 / 50.0 - 1.0
    }

    /// Outputs of keys as rows.
    fn attended(queries: &[f32], (keys, values): (&[f32], &[f32]), head_dim: usize) -> Vec<f32> {
        attend(queries, Keys::Rows(keys), values, head_dim)
    }

    fn attend(queries: &[f32], keys: Keys<'_>, values: &[f32], head_dim: usize) -> Vec<f32> {
        let (mut scores, mut out) = (vec![f32::NAN; 3], vec![9.0; queries.len()]);
        let (sinks, value_dim, count) = (None, head_dim, values.len() / head_dim);
        let (scores, to, scale) = (&mut scores, &mut out[..], SCALE);
        Heads { queries, keys, values, count, head_dim, value_dim, scale, sinks, scores, out: to }
            .attend();
        out
    }

    /// The keys in blocks, after `skipped` keys of NaN; NaN fills the last block.
    fn packed(keys: &[f32], dim: usize, skipped: usize) -> Vec<f32> {
        let rows = [&vec![f32::NAN; skipped * dim], keys].concat();
        let mut blocks = vec![f32::NAN; (rows.len() / dim).next_multiple_of(BLOCK) * dim];
        let pairs = rows.chunks(BLOCK * dim).zip(blocks.chunks_exact_mut(BLOCK * dim));
        pairs.for_each(|(rows, block)| pack(rows, dim, block));
        blocks
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
        for dim in [4, 16, 24, 26, 64, 80, 128] {
            for n in [1, 2, 31, 40, 65] {
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
                    for skipped in [0, 1, 17, BLOCK - 1] {
                        let blocks = packed(&keys, dim, skipped);
                        let keys = Keys::Packed { blocks: &blocks, skipped };
                        let out = attend(&queries, keys, &values, dim);
                        assert_eq!(out, expected, "dim {dim}, {n} keys, {skipped} skipped");
                    }
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
        let (queries, keys, values, to) = (&queries, Keys::Rows(&keys), &values, &mut out);
        let count = 2;
        Heads { queries, keys, values, count, head_dim, value_dim, scale, sinks, scores, out: to }
            .attend();
        for (found, expected) in out.iter().zip([4.0, 6.0, 8.0, 12.0]) {
            assert!((found - expected).abs() < 1e-5, "{out:?}");
        }
    }
}
