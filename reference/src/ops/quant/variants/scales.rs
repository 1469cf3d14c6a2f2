//! Wrong scales.

use super::{Context, candidate, inverse_order};
use crate::formats;
use crate::formats::mistake::MistakeName;
use crate::judge::compare::{Candidate, Elements};
use crate::layouts::marlin::{
    InputDtype, Options, ScaleLayout, ScalePermutation, half_codec, prepare, to_dtype,
};
use crate::num::scalar::ScalarType;
use crate::weight::Table;
/// The scales before the permutation of columns and the reordering in fours.
fn unpermuted(c: &Context<'_>) -> Option<Vec<Table>> {
    let groups = c.prepared.groups();
    let layout = scale_layout(c);
    (0..c.prepared.experts)
        .map(|e| {
            layout.unpack(&c.prepared.scales.slice_rows(e * groups..(e + 1) * groups).ok()?).ok()
        })
        .collect()
}

/// The layout of the scales, including the reordering in fours.
pub(in crate::ops::quant) fn scale_layout(c: &Context<'_>) -> ScaleLayout {
    match c.prepared.scales.ty().storage_bits() {
        8 => c.prepared.scale_layout.of_bytes(c.options.input_dtype.activations()),
        _ => c.prepared.scale_layout,
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
pub(in crate::ops) fn scales<'c>(c: &Context<'c>) -> Vec<Candidate<'c>> {
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
            crate::num::dims::LogicalK(k),
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
        // Both permutations are involutions (transpositions of index bits). Only with the
        // reordering in fours do applying twice and the inverse differ.
        "the scale columns were not permuted (or permuted twice)".to_owned(),
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
    for (id, text, from) in super::column_mistakes(&c) {
        let text = format!("of the scales: {text}");
        add(
            id,
            text,
            Box::new(move || each(unpermuted(&c), |t| layout.pack(&columns_from(t, from)).ok())),
        );
    }
    for offset in strides(&c) {
        add(
            "group-size-as-stride",
            format!(
                "column n has the scale of column n + {offset}, as where a group size of -1 is used as \
                 a stride or divisor"
            ),
            Box::new(move || {
                each(unpermuted(&c), |t| {
                    let order: Vec<usize> =
                        (0..t.cols()).map(|n| (n + offset) % t.cols()).collect();
                    layout.pack(&t.permute_columns(&order).ok()?).ok()
                })
            }),
        );
    }
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

/// The table with column n taken from column `from(n, half of N)`.
fn columns_from(t: &Table, from: fn(usize, usize) -> usize) -> Table {
    let (mut i, half) = (0, t.cols() / 2);
    t.map(t.ty(), |_| {
        let (row, col) = (i / t.cols(), i % t.cols());
        i += 1;
        t.bits(row, from(col, half).min(t.cols() - 1))
    })
}

/// Offsets into channel-wise scales that follow from a group size of -1.
fn strides(c: &Context<'_>) -> Vec<usize> {
    let (shape, rows) = (c.weights[0].shape(), c.weights[0].scales.rows());
    let size_n = shape.size_n.max(1);
    let mut offsets = vec![size_n - 1, 1, shape.size_k % size_n, size_n - shape.size_k % size_n];
    offsets.sort_unstable();
    offsets.dedup();
    offsets.retain(|&o| rows == 1 && o % size_n != 0);
    offsets
}

/// Wrong scale values: a processing step that is missing or different.
fn scale_values<'c>(
    c: &Context<'c>,
    add: &mut impl FnMut(&'static str, String, Box<dyn Fn() -> Option<Elements> + 'c>),
) {
    let c = *c;
    // The checkpoint's scales in kernel order.
    let plain = move |c: Context<'c>| {
        let mut out = Vec::new();
        for weight in c.weights {
            let table = to_dtype("scales", &weight.scales, c.options.dtype);
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
    let format = formats::block_format(c.weights[0].ty, c.weights[0].groups.group_size());
    let mistake = format.and_then(|format| format.scales_not_raised);
    if let Some(MistakeName { id, text }) = mistake.filter(|_| c.prepared.scale_factor != 1.0) {
        add(
            id,
            text.to_owned(),
            Box::new(move || {
                let options = Options { scale_factor: Some(1.0), ..c.options };
                Some(prepare(c.weights, options).ok()?.scales.iter_bits().collect())
            }),
        );
    }
}

/// The integer scales with another last rounding.
fn int8_scales(c: &Context<'_>, round: fn(f32) -> f32) -> Option<Elements> {
    let (to, from) = half_codec(c.options.dtype)?;
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
