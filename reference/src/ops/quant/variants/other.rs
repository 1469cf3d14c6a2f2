//! Wrong zero points, biases, global scales and sorts.

use super::{Context, candidate, inverse_order, reorder_in_words};
use crate::act_order;
use crate::formats;
use crate::formats::integers::Interleave;
use crate::formats::mistake::MistakeName;
use crate::judge::compare::{Candidate, Elements};
use crate::layouts::marlin::{GROUPED, SINGLE, evens_first, kernel_global_scale, to_dtype};
use crate::num::scalar::ScalarType;
use crate::weight::{Groups, Table};
/// Wrong zero points.
pub(in crate::ops) fn zeros<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
    let c = *c;
    let Some((layout, words)) = &c.prepared.zeros else { return Vec::new() };
    let bits = c.prepared.weight_layout.tile_map().bits();
    let max = (1u32 << bits) - 1;
    let tables =
        move || -> Option<Vec<Table>> { c.weights.iter().map(|w| w.zeros.clone()).collect() };
    let pack = move |change: &dyn Fn(&Table) -> Option<Table>| {
        let mut out = Vec::new();
        for table in tables()? {
            out.extend(layout.pack(&change(&table)?).ok()?);
        }
        Some(out)
    };
    let offset = move |by: u32| pack(&|t| Some(t.map(t.ty(), |z| z.wrapping_add(by) & max)));
    let columns = move |order: Vec<usize>| pack(&|t| t.permute_columns(&order).ok());
    let grouped = GROUPED.to_vec();
    let undo = inverse_order(&grouped);
    let order = evens_first(bits);
    let single: Vec<usize> = (0..64).map(|p| p / 32 * 32 + SINGLE[p % 32]).collect();
    // The columns before the right permutation is applied.
    let before = |wanted: &[usize]| undo.iter().map(|&p| wanted[p]).collect::<Vec<_>>();
    let (inverse, single) = (before(&undo), before(&single));
    let not_permuted = undo.clone();
    let plain = inverse_order(order);
    let forward = move |interleave: &'static Interleave| {
        let (order, MistakeName { id, text }) = ((interleave.order)(bits), interleave.forward);
        let from = |n: usize| n / order.len() * order.len() + order[order[n % order.len()]];
        candidate(id, text, move || columns((0..64).map(from).collect()))
    };
    let mut list = vec![
        candidate("zeros-plus-one", "each zero point is one too large: v2 zeros read as v1", {
            move || offset(1)
        }),
        candidate("zeros-minus-one", "each zero point is one too small: v1 zeros read as v2", {
            move || offset(max)
        }),
        candidate("zeros-not-permuted", "the zero-point columns were not permuted", {
            move || columns(not_permuted.clone())
        }),
        candidate("zeros-permuted-twice", "the zero-point permutation was applied twice", {
            move || columns(grouped.clone())
        }),
        candidate("zeros-inverse-permutation", "the inverse permutation was applied", {
            move || columns(inverse.clone())
        }),
        candidate(
            "zeros-single-permutation",
            "the single (32 columns) permutation was applied; zero points always take the grouped one",
            move || columns(single.clone()),
        ),
    ];
    list.extend(formats::interleaves().map(forward));
    list.extend([
        candidate("word-order-plain", "the zero points in each word are not interleaved", {
            move || Some(reorder_in_words(words, bits, &plain))
        }),
        candidate(
            "word-order-extra",
            "the zero points in each word are interleaved once too often (none belongs with 8-bit \
             activations)",
            move || Some(reorder_in_words(words, bits, order)),
        ),
    ]);
    list
}

/// Wrong biases.
pub(in crate::ops) fn bias<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
    let c = *c;
    let columns = move |order: Vec<usize>| {
        let mut out = Vec::new();
        for weight in c.weights {
            let bias = to_dtype("bias", weight.bias.as_ref()?, c.options.dtype);
            out.extend(bias.ok()?.permute_columns(&order).ok()?.iter_bits());
        }
        Some(out)
    };
    let twice: Vec<usize> = SINGLE.iter().map(|&p| SINGLE[p]).collect();
    vec![
        candidate("bias-not-permuted", "the bias was not permuted", move || columns(vec![0])),
        candidate(
            "bias-grouped-permutation",
            "the grouped (64 columns) permutation was applied; a bias always takes the single one",
            move || columns(GROUPED.to_vec()),
        ),
        candidate("bias-permuted-twice", "the bias permutation was applied twice", move || {
            columns(twice.clone())
        }),
        candidate("bias-inverse-permutation", "the inverse permutation was applied", move || {
            columns(inverse_order(&SINGLE))
        }),
    ]
}

/// Wrong global scales.
pub(in crate::ops) fn global_scale<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
    let c = *c;
    let with = move |f: &dyn Fn(f32) -> f32| {
        c.weights.iter().map(|w| Some(f(w.global_scale?).to_bits())).collect::<Option<Elements>>()
    };
    let scale = move |dtype, factor: f32| move |g: f32| kernel_global_scale(g, dtype, factor);
    let (dtype, factor) = (c.options.dtype, c.prepared.scale_factor);
    let other = match dtype {
        ScalarType::FLOAT16 => ScalarType::BFLOAT16,
        _ => ScalarType::FLOAT16,
    };
    vec![
        candidate(
            "global-scale-inverted",
            "the global scale multiplies where the format divides",
            move || with(&|g| scale(dtype, factor)(1.0 / g)),
        ),
        candidate("global-scale-raw", "the exponent bias of e2m1 is missing", move || {
            with(&|g| g / factor)
        }),
        candidate("global-scale-unprocessed", "the global scale was not processed", move || {
            with(&|g| g)
        }),
        candidate(
            "global-scale-factor",
            "the factor that went into the block scales was not divided out",
            move || with(&scale(dtype, 1.0)),
        ),
        candidate(
            "global-scale-dtype",
            format!("the exponent bias is that of {other}"),
            move || with(&scale(other, factor)),
        ),
    ]
}

/// Wrong factors of int8 activation scales.
pub(in crate::ops) fn input_global_scale<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
    let Some(scale) = c.prepared.input_global_scale else { return Vec::new() };
    let n = if c.intermediate_size.is_some() || c.prepared.experts > 1 { None } else { Some(1) };
    let all = move |x: f32| vec![x.to_bits(); n.unwrap_or(1)];
    vec![
        candidate("input-global-scale-max", "the division by 4096 is missing", move || {
            Some(all(scale * 4096.0))
        }),
        candidate("input-global-scale-inverted", "the factor is inverted", move || {
            Some(all(1.0 / scale))
        }),
    ]
}

fn lists<'c>(c: &Context<'c>, f: impl Fn(&[u32], &[u32]) -> Option<Elements>) -> Option<Elements> {
    let mut out = Vec::new();
    for (weight, sorted) in c.weights.iter().zip(c.prepared.sorted.as_ref()?) {
        let Groups::Indexed { g_idx, .. } = &weight.groups else { return None };
        out.extend(f(g_idx, &sorted.perm)?);
    }
    Some(out)
}

/// Orders that do not sort.
pub(in crate::ops) fn sort_indices<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
    let c = *c;
    vec![
        candidate(
            "sort-inverse",
            "these are the ranks of the rows (the inverse of the permutation that sorts g_idx)",
            move || lists(&c, |_, perm| act_order::inverse(perm).ok()),
        ),
        candidate("sort-identity", "the rows are not reordered at all", move || {
            lists(&c, |g_idx, _| Some((0..g_idx.len() as u32).collect()))
        }),
        candidate("sort-descending", "g_idx is sorted in descending order", move || {
            lists(&c, |g_idx, _| {
                let mut perm: Vec<u32> = (0..g_idx.len() as u32).collect();
                perm.sort_by_key(|&k| std::cmp::Reverse(g_idx[k as usize]));
                Some(perm)
            })
        }),
        candidate("sort-g-idx", "g_idx itself stands where its sort belongs", move || {
            lists(&c, |g_idx, _| Some(g_idx.to_vec()))
        }),
    ]
}

/// Wrong sorted g_idx.
pub(in crate::ops) fn sorted_g_idx<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
    let c = *c;
    vec![
        candidate("g-idx-unsorted", "g_idx is not sorted", move || {
            lists(&c, |g_idx, _| Some(g_idx.to_vec()))
        }),
        candidate("g-idx-inverse", "g_idx was gathered by the inverse permutation", move || {
            lists(&c, |g_idx, perm| Some(act_order::gather(g_idx, &act_order::inverse(perm).ok()?)))
        }),
    ]
}
