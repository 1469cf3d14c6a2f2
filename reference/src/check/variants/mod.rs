//! Wrong ways to prepare a layer that are known to happen, each with the output it would give.
//!
//! When a kernel's output differs from the reference, being equal to one of these says why.

mod other;
mod scales;
mod weight;

pub(super) use other::{bias, global_scale, input_global_scale, sort_indices, sorted_g_idx, zeros};
pub(super) use scales::scales;
pub(super) use weight::qweight;

use super::compare::{Candidate, Elements};
use crate::layout::marlin::{Options, Prepared};
use crate::weight::Weight;

/// What a variant may look at.
#[derive(Clone, Copy)]
pub(super) struct Context<'c> {
    pub(super) weights: &'c [Weight<'c>],
    pub(super) options: Options<'c>,
    pub(super) prepared: &'c Prepared,
    /// Of a MoE's w13: the rank's intermediate size.
    pub(super) intermediate_size: Option<usize>,
    pub(super) is_w13: bool,
    /// The permutations that the case states, valid or not.
    pub(super) stated: Option<&'c [Vec<u32>]>,
}

fn candidate<'c>(
    id: &'static str,
    text: impl Into<String>,
    make: impl Fn() -> Option<Elements> + 'c,
) -> Candidate<'c> {
    Candidate { id, text: text.into(), make: Box::new(make) }
}

/// Each packed word with its values in another order: position p takes position `order[p]`.
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
