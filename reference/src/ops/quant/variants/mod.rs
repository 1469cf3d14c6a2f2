//! Known mistakes in preparing a layer, each with the output that it gives.
//!
//! A wrong output that equals one of these has that mistake as its cause.

mod other;
mod ranks;
mod scales;
mod weight;

pub(super) use other::{bias, global_scale, input_global_scale, sort_indices, sorted_g_idx, zeros};
pub(super) use ranks::scales_of_a_rank;
pub(super) use scales::{scale_layout, scales};
pub(super) use weight::qweight;

use crate::judge::compare::{Candidate, Elements};
use crate::layouts::marlin::{Options, Prepared};
use crate::weight::Weight;

/// The inputs of a variant.
#[derive(Clone, Copy)]
pub(super) struct Context<'c> {
    pub(super) weights: &'c [Weight<'c>],
    pub(super) options: Options<'c>,
    pub(super) prepared: &'c Prepared,
    /// Intermediate size of the rank, for w13 of a MoE layer.
    pub(super) intermediate_size: Option<usize>,
    pub(super) is_w13: bool,
    /// Whether this is a MoE's w13 without an up projection.
    pub(super) is_one_shard: bool,
    /// The permutations that the case states, valid or not.
    pub(super) stated: Option<&'c [Vec<u32>]>,
}

fn candidate<'c>(
    id: &'static str,
    text: impl Into<String>,
    make: impl Fn() -> Option<Elements> + 'c,
) -> Candidate<'c> {
    Candidate::of(id, text, make)
}

/// Known mistakes with columns of w13: id, text, and a map from column n to its source.
type ColumnMistake = (&'static str, &'static str, fn(usize, usize) -> usize);

/// The mistakes that apply to a matrix of N columns, in halves or interleaved.
fn column_mistakes(c: &Context<'_>) -> Vec<ColumnMistake> {
    let pairs: ColumnMistake =
        ("gate-up-swapped", "gate and up, in interleaved columns, are swapped", |n, _| n ^ 1);
    match (c.is_w13, c.is_one_shard) {
        (true, _) => vec![pairs],
        (_, true) => vec![
            (
                "two-shards-not-gated",
                "w13 was loaded as two shards, though the activation has no gate: the first half \
                 stands in both",
                |n, half| n % half,
            ),
            (
                "two-shards-not-gated",
                "w13 was loaded as two shards, though the activation has no gate: the second half \
                 stands in both",
                |n, half| half + n % half,
            ),
        ],
        _ => Vec::new(),
    }
}

/// Reorders the values in each packed word: position p takes position `order[p]`.
fn reorder_in_words(words: &[u32], bits: u32, order: &[usize]) -> Elements {
    let mask = u32::MAX >> (32 - bits);
    words
        .iter()
        .map(|w| {
            order
                .iter()
                .enumerate()
                .map(|(p, &q)| (w >> (q as u32 * bits) & mask) << (p as u32 * bits))
                .sum()
        })
        .collect()
}

fn inverse_order(order: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; order.len()];
    for (p, &q) in order.iter().enumerate() {
        inverse[q] = p;
    }
    inverse
}
