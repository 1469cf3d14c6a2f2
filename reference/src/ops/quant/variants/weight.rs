//! Wrong packed weights.

use super::{Context, candidate, inverse_order, reorder_in_words};
use crate::act_order;
use crate::formats;
use crate::formats::mistake::MistakeName;
use crate::judge::compare::{Candidate, Elements};
use crate::layouts::marlin::{
    Activations, InputDtype, WeightLayout, evens_first, kernel_codes as fp8_codes,
};
use crate::num::dims::Shape;
use crate::num::scalar::ScalarType;
use crate::weight::{Codes, Groups, Weight};
/// Packs every matrix's codes after `change`, in the order `perm` gives.
fn repack<'c>(
    c: &Context<'c>,
    activations: Activations,
    change: impl Fn(&Weight<'_>) -> Option<Codes<'static>>,
    perm: impl Fn(usize) -> Option<Vec<u32>>,
) -> Option<Elements> {
    let shape = c.prepared.weight_layout.shape();
    let bits = c.prepared.weight_layout.tile_map().bits();
    let layout = WeightLayout::new(shape, bits, activations).ok()?;
    let mut out = Vec::new();
    for (e, weight) in c.weights.iter().enumerate() {
        out.extend(layout.pack(&change(weight)?, perm(e).as_deref()).ok()?);
    }
    Some(out)
}

/// The codes that are packed; int4 codes for fp8 activations are rewritten first.
fn kernel_codes(c: &Context<'_>, weight: &Weight<'_>) -> Codes<'static> {
    if c.options.input_dtype != InputDtype::Fp8 || weight.ty == ScalarType::FLOAT4_E2M1F {
        return weight.codes.clone().into_owned();
    }
    fp8_codes(weight, InputDtype::Fp8)
        .map_or_else(|_| weight.codes.clone().into_owned(), Codes::into_owned)
}

/// Codes whose words went through `f`.
fn map_words(codes: &Codes<'_>, f: impl Fn(u32) -> u32) -> Option<Codes<'static>> {
    let words: Vec<u32> = codes.words().iter().map(|&w| f(w)).collect();
    Codes::from_words(codes.bits(), codes.shape(), words).ok()
}

/// Codes with column n taken from column `from(n)`.
fn map_columns(codes: &Codes<'_>, from: impl Fn(usize) -> usize) -> Option<Codes<'static>> {
    let Shape { size_n, .. } = codes.shape();
    let words: Vec<u32> = codes
        .words()
        .chunks(size_n)
        .flat_map(|row| (0..size_n).map(|n| row[from(n)]).collect::<Vec<_>>())
        .collect();
    Codes::from_words(codes.bits(), codes.shape(), words).ok()
}

/// Wrong packed weights.
pub(in crate::ops) fn qweight<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
    let c = *c;
    let bits = c.prepared.weight_layout.tile_map().bits();
    let activations = c.options.input_dtype.activations();
    let sorted = move |e: usize| c.prepared.sorted.as_ref().map(|s| s[e].perm.clone());
    let codes = move |w: &Weight<'_>| Some(kernel_codes(&c, w));
    let mut list = Vec::new();
    let mut add = |id, text: &str, make: Box<dyn Fn() -> Option<Elements> + 'c>| {
        list.push(candidate(id, text, make));
    };

    if c.prepared.sorted.is_some() {
        add(
            "act-order-ignored",
            "the rows were not gathered by the sort of g_idx",
            Box::new(move || repack(&c, activations, codes, |_| None)),
        );
        add(
            "act-order-inverse",
            "the rows were gathered by the inverse of the permutation that sorts g_idx",
            Box::new(move || {
                repack(&c, activations, codes, |e| act_order::inverse(&sorted(e)?).ok())
            }),
        );
        add(
            "act-order-twice",
            "the permutation that sorts g_idx was applied twice",
            Box::new(move || {
                repack(&c, activations, codes, |e| {
                    let perm = sorted(e)?;
                    Some(act_order::gather(&perm, &perm))
                })
            }),
        );
        add(
            "act-order-stable",
            "the rows were gathered by the stable sort of g_idx, not by the order that \
             g_idx_sort_indices states",
            Box::new(move || {
                repack(&c, activations, codes, |e| match &c.weights[e].groups {
                    Groups::Indexed { g_idx, .. } => Some(act_order::sort(g_idx).perm),
                    Groups::Uniform(_) => None,
                })
            }),
        );
        if let Some(stated) = c.stated {
            add(
                "act-order-stated",
                "the rows were gathered by the stated g_idx_sort_indices, which do not sort g_idx",
                Box::new(move || repack(&c, activations, codes, |e| stated.get(e).cloned())),
            );
        }
    }
    if bits == 4 {
        add(
            "nibble-order",
            "the nibbles of each byte are exchanged: even k in the high nibble",
            Box::new(move || {
                let swap = |x: u32| (x & 0x0f0f_0f0f) << 4 | x >> 4 & 0x0f0f_0f0f;
                repack(&c, activations, |w| map_words(&codes(w)?, swap), sorted)
            }),
        );
        for interleave in formats::interleaves() {
            let order = (interleave.order)(4);
            let MistakeName { id, text } = interleave.words_kept;
            add(
                id,
                text,
                Box::new(move || {
                    let order = inverse_order(order);
                    let undo = |x: u32| reorder_in_words(&[x], 4, &order)[0];
                    repack(&c, activations, |w| map_words(&codes(w)?, undo), sorted)
                }),
            );
            if c.weights[0].zeros.is_none() {
                continue;
            }
            let MistakeName { id, text } = interleave.forward;
            add(
                id,
                text,
                Box::new(move || {
                    // The permutation is applied twice instead of being undone.
                    let from = move |n: usize| n / 8 * 8 + order[order[n % 8]];
                    repack(&c, activations, |w| map_columns(&codes(w)?, from), sorted)
                }),
            );
            let MistakeName { id, text } = interleave.kept;
            add(
                id,
                text,
                Box::new(move || {
                    let from = move |n: usize| n / 8 * 8 + order[n % 8];
                    repack(&c, activations, |w| map_columns(&codes(w)?, from), sorted)
                }),
            );
        }
        if c.options.input_dtype == InputDtype::Fp8 {
            add(
                "preprocess-missing",
                "int4 codes were not rewritten for fp8 activations",
                Box::new(move || {
                    repack(&c, activations, |w| Some(w.codes.clone().into_owned()), sorted)
                }),
            );
        }
    }
    add(
        "sign-bit",
        "the codes are offset by half their range: signed values where biased ones belong",
        Box::new(move || {
            let flip = if bits == 4 { 0x8888_8888 } else { 0x8080_8080 };
            repack(&c, activations, |w| map_words(&codes(w)?, |x| x ^ flip), sorted)
        }),
    );
    add(
        "bytes-reversed",
        "the source words are in big-endian byte order",
        Box::new(move || {
            repack(&c, activations, |w| map_words(&codes(w)?, u32::swap_bytes), sorted)
        }),
    );
    add(
        if c.is_w13 { "gate-up-swapped" } else { "halves-swapped" },
        if c.is_w13 { "gate and up halves are swapped" } else { "the halves of N are swapped" },
        Box::new(move || {
            let half = c.prepared.weight_layout.shape().size_n / 2;
            let from = move |n: usize| (n + half) % (2 * half);
            repack(&c, activations, |w| map_columns(&codes(w)?, from), sorted)
        }),
    );
    for (id, text, from) in super::column_mistakes(&c) {
        add(
            id,
            text,
            Box::new(move || {
                let half = c.prepared.weight_layout.shape().size_n / 2;
                repack(&c, activations, |w| map_columns(&codes(w)?, |n| from(n, half)), sorted)
            }),
        );
    }
    let other = match activations {
        Activations::Bits16 => Activations::Bits8,
        Activations::Bits8 => Activations::Bits16,
    };
    add(
        "activation-width",
        match other {
            Activations::Bits8 => "packed for 8-bit activations, 16-bit ones are configured",
            Activations::Bits16 => "packed for 16-bit activations, 8-bit ones are configured",
        },
        Box::new(move || repack(&c, other, codes, sorted)),
    );
    // The order inside a word, from the right words.
    let order: Vec<usize> = match (activations, bits) {
        (Activations::Bits16, _) => evens_first(bits).to_vec(),
        (Activations::Bits8, 4) => vec![0, 4, 1, 5, 2, 6, 3, 7],
        (Activations::Bits8, _) => vec![0, 1, 2, 3],
    };
    let plain = inverse_order(&order);
    let inverse: Vec<usize> = plain.iter().map(|&p| plain[p]).collect();
    for (id, text, order) in [
        ("word-order-plain", "the values inside each packed word are not interleaved", plain),
        (
            "word-order-inverse",
            // Four bits: a perfect shuffle of eight has order three, so twice is the inverse.
            "the values inside each packed word are interleaved by the inverse order, or twice",
            inverse,
        ),
    ] {
        add(id, text, Box::new(move || Some(reorder_in_words(&c.prepared.qweight, bits, &order))));
    }
    list
}
