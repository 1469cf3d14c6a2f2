//! Wrong ways to prepare a layer that are known to happen, each with the output it would give.
//!
//! When a kernel's output differs from the reference, being equal to one of these says why.

use super::compare::{Candidate, Elements};
use crate::act_order;
use crate::dims::Shape;
use crate::layout::marlin::{
    Activations, GROUPED, InputDtype, Options, Prepared, SINGLE, ScaleLayout, ScalePermutation,
    WeightLayout, prepare,
};
use crate::scalar::{self, ScalarType};
use crate::weight::{Codes, Groups, Table, Weight};

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

/// The codes that are packed: int4 under fp8 activations is rewritten first.
fn kernel_codes(c: &Context<'_>, weight: &Weight<'_>) -> Codes<'static> {
    if c.options.input_dtype != InputDtype::Fp8 || weight.ty == ScalarType::FLOAT4_E2M1F {
        return weight.codes.clone().into_owned();
    }
    crate::layout::marlin::kernel_codes(weight, InputDtype::Fp8)
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

/// The order of values in a word that dequantization undoes.
fn interleave(bits: u32) -> &'static [usize] {
    if bits == 4 { &[0, 2, 4, 6, 1, 3, 5, 7] } else { &[0, 2, 1, 3] }
}

/// Wrong packed weights.
pub(super) fn qweight<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
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
        add(
            "awq-interleave",
            "the words still hold AWQ's order 0, 2, 4, 6, 1, 3, 5, 7",
            Box::new(move || {
                let order = inverse_order(interleave(4));
                let undo = |x: u32| reorder_in_words(&[x], 4, &order)[0];
                repack(&c, activations, |w| map_words(&codes(w)?, undo), sorted)
            }),
        );
        if c.weights[0].zeros.is_some() {
            add(
                "awq-interleave-forward",
                "AWQ's column order was undone with the permutation instead of its inverse",
                Box::new(move || {
                    let order = interleave(4);
                    // Applying the permutation twice where once and its inverse belong.
                    let from = move |n: usize| n / 8 * 8 + order[order[n % 8]];
                    repack(&c, activations, |w| map_columns(&codes(w)?, from), sorted)
                }),
            );
            add(
                "awq-interleave-kept",
                "AWQ's column order was not undone",
                Box::new(move || {
                    let order = interleave(4);
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
        (Activations::Bits16, _) => interleave(bits).to_vec(),
        (Activations::Bits8, 4) => vec![0, 4, 1, 5, 2, 6, 3, 7],
        (Activations::Bits8, _) => vec![0, 1, 2, 3],
    };
    let plain = inverse_order(&order);
    let twice: Vec<usize> = plain.iter().map(|&p| plain[p]).collect();
    for (id, text, order) in [
        ("word-order-plain", "the values inside each packed word are not interleaved", plain),
        (
            "word-order-inverse",
            "the values inside each packed word are interleaved by the inverse order",
            twice,
        ),
        ("word-order-twice", "the interleave inside each packed word was applied twice", order),
    ] {
        add(id, text, Box::new(move || Some(reorder_in_words(&c.prepared.qweight, bits, &order))));
    }
    list
}

/// The scales after everything but the permutation of columns (and the reordering in fours).
fn unpermuted(c: &Context<'_>) -> Option<Vec<Table>> {
    let groups = c.prepared.groups();
    let layout = scale_layout(c);
    (0..c.prepared.experts)
        .map(|e| {
            layout.unpack(&c.prepared.scales.slice_rows(e * groups..(e + 1) * groups).ok()?).ok()
        })
        .collect()
}

/// The layout of the scales, the reordering in fours included.
fn scale_layout(c: &Context<'_>) -> ScaleLayout {
    let byte = c.prepared.scales.ty().storage_bits() == 8;
    if byte && c.options.input_dtype != InputDtype::Fp8 {
        c.prepared.scale_layout.with_quads()
    } else {
        c.prepared.scale_layout
    }
}

/// All experts' tables after `f`, as elements.
fn each(tables: Option<Vec<Table>>, f: impl Fn(&Table) -> Option<Table>) -> Option<Elements> {
    let mut out = Vec::new();
    for table in tables? {
        out.extend(f(&table)?.iter_bits());
    }
    Some(out)
}

/// Wrong scales.
pub(super) fn scales<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
    let c = *c;
    let layout = scale_layout(&c);
    let right = layout.permutation();
    let columns = layout.columns();
    let mut list = Vec::new();
    let mut add = |id, text: String, make: Box<dyn Fn() -> Option<Elements> + 'c>| {
        list.push(candidate(id, text, make));
    };
    let name = |p| match p {
        ScalePermutation::Grouped => "grouped (64 columns)",
        ScalePermutation::Single => "single (32 columns)",
    };
    let other = move || {
        let options = Options { scale_permutation: Some(right.other()), ..c.options };
        Some(prepare(c.weights, options).ok()?.scales.iter_bits().collect::<Elements>())
    };
    let group_size = c.weights[0].groups.group_size();
    let shape = c.weights[0].shape();
    let picks = |k: usize| {
        ScalePermutation::choose(
            group_size,
            crate::dims::LogicalK(k),
            c.options.input_dtype.activations(),
        )
    };
    let pack = 32 / c.prepared.weight_layout.tile_map().bits() as usize;
    let cause = match c.intermediate_size {
        Some(i) if picks(i) != right => {
            format!(
                "; w13's permutation was chosen with the intermediate size {i} as K instead of {}",
                shape.size_k
            )
        }
        _ if picks(shape.size_k / pack) != right => {
            format!(
                "; it was chosen with the packed K {} instead of {}",
                shape.size_k / pack,
                shape.size_k
            )
        }
        _ => String::new(),
    };
    add(
        "scales-other-permutation",
        format!(
            "the {} permutation was applied where the {} one belongs{cause}",
            name(right.other()),
            name(right)
        ),
        Box::new(other),
    );
    add(
        "scales-not-permuted",
        "the scale columns were not permuted".to_owned(),
        Box::new(move || each(unpermuted(&c), |t| Some(t.clone()))),
    );
    let twice = columns.clone();
    add(
        "scales-permuted-twice",
        "the scale permutation was applied twice".to_owned(),
        Box::new(move || {
            each(unpermuted(&c), |t| t.permute_columns(&twice).ok()?.permute_columns(&twice).ok())
        }),
    );
    let inverse = inverse_order(&columns);
    add(
        "scales-inverse-permutation",
        "the inverse of the scale permutation was applied".to_owned(),
        Box::new(move || each(unpermuted(&c), |t| t.permute_columns(&inverse).ok())),
    );
    if c.prepared.scales.ty().storage_bits() == 8 {
        add(
            "scales-quads",
            "the reordering 0, 2, 1, 3 of each four columns is missing".to_owned(),
            Box::new(move || each(unpermuted(&c), |t| t.permute_columns(right.columns()).ok())),
        );
    }
    add(
        if c.is_w13 { "gate-up-swapped" } else { "halves-swapped" },
        if c.is_w13 { "gate and up scales are swapped" } else { "the halves of N are swapped" }
            .to_owned(),
        Box::new(move || {
            each(unpermuted(&c), |t| {
                let half = t.cols() / 2;
                let order: Vec<usize> = (0..t.cols()).map(|n| (n + half) % (2 * half)).collect();
                layout.pack(&t.permute_columns(&order).ok()?).ok()
            })
        }),
    );
    add(
        "scales-transposed",
        "the scales are read as [N, groups] where they are [groups, N]".to_owned(),
        Box::new(move || {
            each(unpermuted(&c), |t| {
                let (rows, cols) = (t.rows(), t.cols());
                let t = t.transposed();
                layout.pack(&Table::new(t.ty(), rows, cols, t.data().clone()).ok()?).ok()
            })
        }),
    );
    scale_values(&c, &mut add);
    list
}

/// Wrong scale values: a processing step left out or done otherwise.
fn scale_values<'c>(
    c: &Context<'c>,
    add: &mut impl FnMut(&'static str, String, Box<dyn Fn() -> Option<Elements> + 'c>),
) {
    let c = *c;
    // Scales as they come from the checkpoint, in kernel order.
    let plain = move |c: Context<'c>| {
        let mut out = Vec::new();
        for weight in c.weights {
            let table = crate::layout::marlin::to_dtype("scales", &weight.scales, c.options.dtype);
            out.extend(c.prepared.scale_layout.pack(&table.ok()?).ok()?.iter_bits());
        }
        Some(out)
    };
    let ty = c.weights[0].ty;
    let sixteen = c.weights[0].scales.ty().storage_bits() >= 16;
    if ty == ScalarType::FLOAT8_E4M3FN && sixteen {
        add(
            "fp8-exponent-bias-missing",
            "the exponent bias of e4m3 was not moved into the scales".to_owned(),
            Box::new(move || plain(c)),
        );
    }
    match c.options.input_dtype {
        InputDtype::Fp8 if sixteen => add(
            "fp8-factor-missing",
            "the factor 512 for int4 weights under fp8 activations is missing".to_owned(),
            Box::new(move || plain(c)),
        ),
        InputDtype::Int8 if c.prepared.input_global_scale.is_some() => {
            add(
                "int8-scales-unprocessed",
                "the scales were not turned into integers for int8 activations".to_owned(),
                Box::new(move || plain(c)),
            );
            add(
                "int8-scales-half-away",
                "the integer scales were rounded half away from zero instead of to even".to_owned(),
                Box::new(move || int8_scales(&c, f32::round)),
            );
            add(
                "int8-scales-truncated",
                "the integer scales were truncated instead of rounded".to_owned(),
                Box::new(move || int8_scales(&c, f32::trunc)),
            );
        }
        _ => {}
    }
    if c.weights[0].scales.ty() == ScalarType::FLOAT8_E4M3FN && c.prepared.scale_factor != 1.0 {
        add(
            "nvfp4-factor-missing",
            "the block scales were not brought to the top of their range".to_owned(),
            Box::new(move || {
                let options = Options { scale_factor: Some(1.0), ..c.options };
                Some(prepare(c.weights, options).ok()?.scales.iter_bits().collect())
            }),
        );
    }
}

/// The integer scales with another last rounding.
fn int8_scales(c: &Context<'_>, round: fn(f32) -> f32) -> Option<Elements> {
    let (to, from): (fn(u16) -> f32, fn(f32) -> u16) = match c.options.dtype {
        ScalarType::FLOAT16 => (scalar::f16_to_f32, scalar::f32_to_f16_rne),
        _ => (scalar::bf16_to_f32, scalar::f32_to_bf16_rne),
    };
    let max = c.prepared.input_global_scale? * 4096.0;
    let mut out = Vec::new();
    for weight in c.weights {
        let packed = c.prepared.scale_layout.pack(&weight.scales).ok()?;
        out.extend(packed.iter_bits().map(|bits| {
            let scaled = to(from(to(from(to(bits as u16) / max)) * 4096.0));
            u32::from((round(scaled) as i16).cast_unsigned())
        }));
    }
    Some(out)
}

/// Wrong zero points.
pub(super) fn zeros<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
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
    let order = interleave(bits);
    let single: Vec<usize> = (0..64).map(|p| p / 32 * 32 + SINGLE[p % 32]).collect();
    // What another order of columns looks like before the right one is applied to it.
    let before = |wanted: &[usize]| undo.iter().map(|&p| wanted[p]).collect::<Vec<_>>();
    let (inverse, single, forward) = (
        before(&undo),
        before(&single),
        (0..64)
            .map(|n| n / order.len() * order.len() + order[order[n % order.len()]])
            .collect::<Vec<_>>(),
    );
    let not_permuted = undo.clone();
    let plain = inverse_order(order);
    vec![
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
        candidate(
            "awq-interleave-forward",
            "AWQ's column order was undone with the permutation instead of its inverse",
            move || columns(forward.clone()),
        ),
        candidate("word-order-plain", "the zero points in each word are not interleaved", {
            move || Some(reorder_in_words(words, bits, &plain))
        }),
        candidate(
            "word-order-extra",
            "the zero points in each word are interleaved once too often (none belongs with 8-bit \
             activations)",
            move || Some(reorder_in_words(words, bits, order)),
        ),
    ]
}

/// Wrong biases.
pub(super) fn bias<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
    let c = *c;
    let columns = move |order: Vec<usize>| {
        let mut out = Vec::new();
        for weight in c.weights {
            let bias =
                crate::layout::marlin::to_dtype("bias", weight.bias.as_ref()?, c.options.dtype);
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

/// Wrong NVFP4 global scales.
pub(super) fn global_scale<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
    let c = *c;
    let with = move |f: &dyn Fn(f32) -> f32| {
        c.weights.iter().map(|w| Some(f(w.global_scale?).to_bits())).collect::<Option<Elements>>()
    };
    let scale = move |dtype, factor: f32| {
        move |g: f32| crate::layout::marlin::nvfp4_global_scale(g, dtype, factor)
    };
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
pub(super) fn input_global_scale<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
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
pub(super) fn sort_indices<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
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
pub(super) fn sorted_g_idx<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
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
