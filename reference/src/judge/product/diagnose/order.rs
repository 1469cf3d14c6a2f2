//! Known mistakes with act-order. A right kernel walks k in sorted order and gathers rows of the
//! matrix, activations and groups of scales to match.

use std::borrow::Cow;

use super::Suspect;
use super::scene::{Scene, Setup};
use crate::act_order;
use crate::weight::Groups;

/// How vLLM 0.21.0's kernel reads the group scales of an act-ordered rank's slice of K.
pub(super) const UPSTREAM_K_SLICE: &str = "upstream-k-slice-scales";

/// The row of the matrix, of the activations or of g_idx that is used at a position of the product.
#[derive(Clone, Copy, PartialEq)]
enum Walk {
    Sorted,
    Stored,
    Inverse,
}

/// Suspects: id, what happened, and how weights, activations and groups are walked.
const WALKS: [(&str, &str, Walk, Walk, Walk); 9] = [
    (
        "act-order-activations-not-permuted",
        "the act-order permutation was applied to the weights but not to the activations",
        Walk::Sorted,
        Walk::Stored,
        Walk::Sorted,
    ),
    (
        "act-order-weights-not-permuted",
        "the act-order permutation was applied to the activations but not to the weights",
        Walk::Stored,
        Walk::Sorted,
        Walk::Sorted,
    ),
    (
        "act-order-weights-not-permuted",
        "the act-order permutation was applied to the activations but not to weights and their scales",
        Walk::Stored,
        Walk::Sorted,
        Walk::Stored,
    ),
    (
        "act-order-weights-inverted",
        "the inverse of the act-order permutation was applied to the weights and their scales",
        Walk::Inverse,
        Walk::Sorted,
        Walk::Inverse,
    ),
    (
        "act-order-activations-inverted",
        "the inverse of the act-order permutation was applied to the activations",
        Walk::Sorted,
        Walk::Inverse,
        Walk::Sorted,
    ),
    (
        "act-order-weights-inverted",
        "the inverse of the act-order permutation was applied to the weights",
        Walk::Inverse,
        Walk::Sorted,
        Walk::Sorted,
    ),
    (
        "act-order-inverted",
        "the inverse of the act-order permutation was applied to weights and activations, and \
         group scales are read in sorted order",
        Walk::Inverse,
        Walk::Inverse,
        Walk::Sorted,
    ),
    (
        "act-order-scales-stored",
        "group scales are read in the stored order of g_idx, though weights and activations are \
         in sorted order",
        Walk::Sorted,
        Walk::Sorted,
        Walk::Stored,
    ),
    (
        "act-order-scales-sorted",
        "group scales are read in sorted order, though weights and activations are not permuted",
        Walk::Stored,
        Walk::Stored,
        Walk::Sorted,
    ),
];

/// Every suspect of a product with act-order.
pub(super) fn suspects<'s>(scene: &'s Scene<'s>) -> Vec<Suspect<'s>> {
    if scene.orders.iter().all(Option::is_none) {
        return Vec::new();
    }
    let g_idx = move |part: usize| -> Option<(&'s [u32], &'s [u32])> {
        let order = scene.orders[part].as_deref()?;
        match &scene.stage.parts[part].weight.groups {
            Groups::Indexed { g_idx, .. } => Some((g_idx.as_slice(), order)),
            Groups::Uniform(_) => None,
        }
    };
    let mut all = vec![Suspect::new(
        UPSTREAM_K_SLICE,
        "a fault of vLLM 0.21.0's kernel with a rank's slice of K (gptq_marlin_gemm, is_k_full \
         false): of each second 16 rows in sorted order, row 16 + j was given the group scale of \
         row j + 1",
        move |part| {
            let (g_idx, order) = g_idx(part)?;
            let read = |p: usize| if p / 16 % 2 == 1 { p - 15 } else { p };
            let groups: Vec<u32> =
                (0..order.len()).map(|p| g_idx[order[read(p)] as usize]).collect();
            let differs = groups.iter().zip(order).any(|(&g, &k)| g != g_idx[k as usize]);
            differs.then(|| Setup { groups: Some(groups), ..scene.right(part) })
        },
    )];
    let rank = scene.stage.hints.tensor_parallel.map_or(0, |tp| tp.rank);
    let (id, text) = match rank {
        0 => {
            ("act-order-ignored", "g_idx was ignored: row k got the scale of group k / group_size")
        }
        // The first groups of the table belong to rank 0.
        _ => (
            "scales-not-sharded",
            "row k of this rank got the scale of group k / group_size of the whole matrix: neither was \
             g_idx followed, nor did the rank begin at its own first group",
        ),
    };
    all.push(Suspect::new(id, text, move |part| {
        let (g_idx, _) = g_idx(part)?;
        let weight = scene.stage.parts[part].weight;
        let rows = weight.scales.rows();
        let size = weight.groups.group_size().rows(weight.shape().k());
        let groups = (0..g_idx.len()).map(|k| (k / size).min(rows - 1) as u32).collect();
        Some(Setup { order: None, gather: None, groups: Some(groups), ..scene.right(part) })
    }));
    for (id, text, weights, activations, groups) in WALKS {
        all.push(Suspect::new(id, text, move |part| {
            let (g_idx, order) = g_idx(part)?;
            let walk = |walk: Walk| -> Option<Cow<'s, [u32]>> {
                Some(match walk {
                    Walk::Sorted => Cow::Borrowed(order),
                    Walk::Stored => Cow::Owned((0..order.len() as u32).collect()),
                    Walk::Inverse => Cow::Owned(act_order::inverse(order).ok()?),
                })
            };
            let groups = walk(groups)?.iter().map(|&k| g_idx[k as usize]).collect();
            Some(Setup {
                order: Some(walk(weights)?),
                gather: Some(walk(activations)?),
                groups: Some(groups),
                ..scene.right(part)
            })
        }));
    }
    all
}
