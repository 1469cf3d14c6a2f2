//! Prepares all tensors of a Marlin kernel with one call for a linear layer (one matrix) or for w13
//! or w2 of a MoE layer (a matrix per expert).
//!
//! Source: vLLM 0.21.0 `process_weights_after_loading` of the linear and MoE methods,
//! `prepare_fp8_*_for_marlin`, `prepare_mxfp8_*_for_marlin`, `prepare_*_fp4_layer_for_marlin`.

use std::borrow::Cow;

use ndarray::Array3;

use super::options::{InputDtype, Options, check_types};
use super::{
    Activations, ScaleLayout, ScalePermutation, WeightLayout, ZeroPointLayout, e4m3_scale_factor,
    e4m3_scales, e8m0_scales, fp8_exponent_bias, int4_to_fp8_scales, kernel_global_scale,
    process_int8_scales_with,
};
use crate::act_order::{self, Sorted};
use crate::layouts::Layout;
use crate::num::array::row_major;
use crate::num::dims::Shape;
use crate::num::scalar::{self, ScalarType};
use crate::weight::{Codes, Groups, Table, TableData, Weight};
use crate::{Error, Result};

/// The kernel-format tensors of a stack of matrices of one shape, experts first.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// Number of matrices.
    pub experts: usize,
    /// Layout of each packed weight.
    pub weight_layout: WeightLayout,
    /// `[experts, K / 16, N · 16 / pack]`.
    pub qweight: Array3<u32>,
    /// Layout of each matrix's scales, before any reordering in fours.
    pub scale_layout: ScaleLayout,
    /// `[experts · groups, N]`.
    pub scales: Table,
    /// Layout of each matrix's zero points and `[experts, groups, N / pack]` words.
    pub zeros: Option<(ZeroPointLayout, Array3<u32>)>,
    /// `[experts, N]`.
    pub bias: Option<Table>,
    /// NVFP4: `[experts]`.
    pub global_scale: Option<Vec<f32>>,
    /// NVFP4: the factor that went from the global scale into the block scales.
    pub scale_factor: f32,
    /// int8 activations with more than one group: factor of the activation scales.
    pub input_global_scale: Option<f32>,
    /// act-order: the sort of each matrix.
    pub sorted: Option<Vec<Sorted>>,
}

impl Prepared {
    /// The words of `qweight` in row-major order; borrowed as [`prepare`] makes them.
    pub fn qweight_words(&self) -> Cow<'_, [u32]> {
        row_major(self.qweight.view())
    }

    /// The words of the zero points in row-major order; borrowed as [`prepare`] makes them.
    pub fn zero_words(&self) -> Option<Cow<'_, [u32]>> {
        self.zeros.as_ref().map(|(_, words)| row_major(words.view()))
    }

    /// Scale groups of each matrix.
    pub fn groups(&self) -> usize {
        self.scales.rows() / self.experts
    }
}

/// Bits of one packed code.
fn code_bits(ty: ScalarType) -> u32 {
    if ty.size_bits() <= 4 { 4 } else { 8 }
}

/// Rounds every element once to f16 or bf16, through f32, which represents each 16-bit type
/// exactly.
fn convert(table: &Table, dtype: ScalarType) -> Result<Table> {
    let from = table.ty();
    // Large tables of scales pass through here, so the common types have specialized loops.
    let converted: Vec<u16> = match (from, dtype, table.data()) {
        (ScalarType::FLOAT16, ScalarType::BFLOAT16, TableData::B16(v)) => {
            v.iter().map(|&b| scalar::f32_to_bf16_rne(scalar::f16_to_f32(b))).collect()
        }
        (ScalarType::BFLOAT16, ScalarType::FLOAT16, TableData::B16(v)) => {
            v.iter().map(|&b| scalar::f32_to_f16_rne(scalar::bf16_to_f32(b))).collect()
        }
        (ScalarType::FLOAT32, ScalarType::FLOAT16, TableData::B32(v)) => {
            v.iter().map(|&b| scalar::f32_to_f16_rne(f32::from_bits(b))).collect()
        }
        (ScalarType::FLOAT32, ScalarType::BFLOAT16, TableData::B32(v)) => {
            v.iter().map(|&b| scalar::f32_to_bf16_rne(f32::from_bits(b))).collect()
        }
        _ => return Ok(table.map(dtype, |b| dtype.encode_rne(from.to_f64(b)))),
    };
    Table::new(dtype, table.rows(), table.cols(), TableData::B16(converted))
}

/// Converts scales or a bias to the model's type; a finite value that overflows is an error.
pub(crate) fn to_dtype(name: &str, table: &Table, dtype: ScalarType) -> Result<Table> {
    if table.ty() == dtype {
        return Ok(table.clone());
    }
    let converted = convert(table, dtype)?;
    let exponent = if dtype == ScalarType::FLOAT16 { 0x7c00 } else { 0x7f80 };
    let finite = match converted.data() {
        TableData::B16(v) => v.iter().all(|b| b & exponent != exponent),
        _ => false,
    };
    if finite {
        return Ok(converted);
    }
    for row in 0..table.rows() {
        for col in 0..table.cols() {
            if table.value(row, col).is_finite() && !converted.value(row, col).is_finite() {
                return Err(Error::value(
                    name,
                    &[row, col],
                    table.value(row, col),
                    format!("a value in the range of {dtype}"),
                ));
            }
        }
    }
    Ok(converted)
}

/// The words of every expert as one array.
fn stacked(experts: usize, [rows, cols]: [usize; 2], words: Vec<u32>) -> Array3<u32> {
    Array3::from_shape_vec((experts, rows, cols), words).expect("every expert's words")
}

/// Stacks tables of one width on top of each other.
fn stack(mut tables: Vec<Table>) -> Result<Table> {
    if let [_] = tables[..] {
        return Ok(tables.remove(0));
    }
    let Some(first) = tables.first() else {
        return Err(Error::size("experts", 0, "at least one"));
    };
    let rows = tables.iter().map(Table::rows).sum();
    let bits = tables.iter().flat_map(Table::iter_bits);
    let data = match first.data() {
        TableData::B8(_) => TableData::B8(bits.map(|b| b as u8).collect()),
        TableData::B16(_) => TableData::B16(bits.map(|b| b as u16).collect()),
        TableData::B32(_) => TableData::B32(bits.collect()),
    };
    Table::new(first.ty(), rows, first.cols(), data)
}

/// Scales of one matrix in the type that packing starts from.
fn source_scales(weight: &Weight<'_>, dtype: ScalarType) -> Result<Table> {
    match weight.scales.ty() {
        // Block scales of MX and NV formats keep their 8 bits.
        ScalarType::FLOAT8_E8M0FNU | ScalarType::FLOAT8_E4M3FN => Ok(weight.scales.clone()),
        _ => to_dtype(&format!("{}: scales", weight.name), &weight.scales, dtype),
    }
}

/// `weight` with its scales and bias rounded to `dtype`, as [`prepare`] packs them for activations of
/// that type. Block scales of 8 bits stay as they are.
///
/// # Errors
/// [`Error::Value`] for a finite value out of the range of `dtype`.
pub fn in_dtype(weight: Weight<'_>, dtype: ScalarType) -> Result<Weight<'_>> {
    let scales = source_scales(&weight, dtype)?;
    let name = format!("{}: bias", weight.name);
    let bias = weight.bias.as_ref().map(|b| to_dtype(&name, b, dtype)).transpose()?;
    Ok(Weight { scales, bias, ..weight })
}

/// Checks that every matrix has a supported type, and the shape, type and groups of `first`.
fn expect_alike(weights: &[Weight<'_>], first: &Weight<'_>, options: &Options<'_>) -> Result<()> {
    let (shape, ty) = (first.shape(), first.ty);
    let group_size = first.groups.group_size();
    let groups = first.scales.rows();
    for weight in weights {
        check_types(weight, options)?;
        weight.validate()?;
        if (weight.shape(), weight.ty, weight.groups.group_size(), weight.scales.rows())
            != (shape, ty, group_size, groups)
        {
            return Err(Error::size(
                format!("{}: matrix", weight.name),
                format!(
                    "{} {} group_size {}",
                    weight.ty,
                    weight.shape(),
                    weight.groups.group_size()
                ),
                format!("{ty} {shape} group_size {group_size} as {}", first.name),
            ));
        }
    }
    Ok(())
}

/// Packs a stack of matrices of one shape, type and group size for Marlin.
///
/// Returns an error for combinations that upstream refuses, for matrices that differ in shape, type
/// or group size, for sizes that do not fill tiles, and for a permutation that does not sort its
/// `g_idx`.
pub fn prepare(weights: &[Weight<'_>], options: Options<'_>) -> Result<Prepared> {
    let Some(first) = weights.first() else {
        return Err(Error::size("experts", 0, "at least one"));
    };
    let (shape, ty) = (first.shape(), first.ty);
    let group_size = first.groups.group_size();
    let groups = first.scales.rows();
    expect_alike(weights, first, &options)?;
    let activations = options.input_dtype.activations();
    let weight_layout = WeightLayout::new(shape, code_bits(ty), activations)?;
    let permutation = options
        .scale_permutation
        .unwrap_or_else(|| ScalePermutation::choose(group_size, shape.k(), activations));

    let sorted = sort_all(weights, &options)?;
    let mut qweight = vec![0; weight_layout.packed_len() * weights.len()];
    for (e, (weight, out)) in
        weights.iter().zip(qweight.chunks_exact_mut(weight_layout.packed_len())).enumerate()
    {
        let perm = sorted.as_ref().map(|s| s[e].perm.as_slice());
        let codes = kernel_codes(weight, options.input_dtype)?;
        weight_layout.pack_words(&codes, perm, out)?;
    }

    let scale_layout = ScaleLayout::new(groups, shape.size_n, permutation, options.dtype)?;
    let source =
        weights.iter().map(|w| source_scales(w, options.dtype)).collect::<Result<Vec<_>>>()?;
    let scale_factor = match (source[0].ty(), options.scale_factor) {
        (ScalarType::FLOAT8_E4M3FN, None) => {
            let all = source.iter().flat_map(Table::iter_bits).map(|b| b as u8);
            e4m3_scale_factor(all, options.dtype)
        }
        (_, factor) => factor.unwrap_or(1.0),
    };
    let packed = source
        .iter()
        .map(|s| pack_scales(s, ty, &options, scale_layout, scale_factor))
        .collect::<Result<Vec<_>>>()?;
    let mut scales = stack(packed)?;
    let mut input_global_scale = None;
    let several = groups > 1 || options.int8_scale_max.is_some();
    if options.input_dtype == InputDtype::Int8 && several {
        let max = options.int8_scale_max.unwrap_or(f32::NEG_INFINITY);
        let processed = process_int8_scales_with(&scales, max)?;
        scales = processed.scales;
        input_global_scale = Some(processed.input_global_scale);
    }

    Ok(Prepared {
        experts: weights.len(),
        weight_layout,
        qweight: stacked(weights.len(), weight_layout.packed_shape(), qweight),
        scale_layout,
        scales,
        zeros: pack_zeros(weights, groups, shape, activations)?,
        bias: pack_bias(weights, shape, options.dtype)?,
        global_scale: all_or_none(weights, "global_scale", |w| {
            w.global_scale.map(|g| kernel_global_scale(g, options.dtype, scale_factor))
        })?,
        scale_factor,
        input_global_scale,
        sorted,
    })
}

/// The codes for the kernel; int4 codes for fp8 activations are rewritten.
pub(crate) fn kernel_codes<'a>(weight: &'a Weight<'_>, input: InputDtype) -> Result<Codes<'a>> {
    if input != InputDtype::Fp8 || weight.ty == ScalarType::FLOAT4_E2M1F {
        return Codes::from_words(weight.codes.bits(), weight.shape(), weight.codes.words());
    }
    match &weight.zeros {
        None => {
            Codes::from_words(4, weight.shape(), super::int4_to_fp8_symmetric(weight.codes.words()))
        }
        Some(zeros) => Codes::from_fn(4, weight.shape(), |k, n| {
            let zero = zeros.bits(weight.groups.group_of(k), n) as u8;
            let code = weight.codes.get(k, n);
            if code >= zero { code - zero } else { 15 - code }
        }),
    }
}

fn pack_scales(
    scales: &Table,
    weight_type: ScalarType,
    options: &Options<'_>,
    layout: ScaleLayout,
    scale_factor: f32,
) -> Result<Table> {
    let fp8_input = options.input_dtype == InputDtype::Fp8;
    match scales.ty() {
        ScalarType::FLOAT8_E8M0FNU => e8m0_scales(scales, options.dtype, layout, fp8_input),
        ScalarType::FLOAT8_E4M3FN => e4m3_scales(scales, layout, scale_factor),
        _ if weight_type == ScalarType::FLOAT8_E4M3FN => fp8_exponent_bias(&layout.pack(scales)?),
        _ if fp8_input => layout.pack(&int4_to_fp8_scales(scales)?),
        _ => layout.pack(scales),
    }
}

fn sort_all(weights: &[Weight<'_>], options: &Options<'_>) -> Result<Option<Vec<Sorted>>> {
    let g_idx = all_or_none(weights, "g_idx", |w| match &w.groups {
        Groups::Indexed { g_idx, .. } => Some(g_idx),
        Groups::Uniform(_) => None,
    })?;
    let Some(g_idx) = g_idx else { return Ok(None) };
    if let Some(perms) = options.perms
        && perms.len() != weights.len()
    {
        return Err(Error::shape("perm", &[perms.len()], format!("{} matrices", weights.len())));
    }
    let sort = |(e, g_idx): (usize, &Vec<u32>)| match options.perms {
        None => Ok(act_order::sort(g_idx)),
        Some(perms) => {
            act_order::expect_sorting(g_idx, &perms[e])?;
            let perm = perms[e].clone();
            Ok(Sorted { g_idx: act_order::gather(g_idx, &perm), perm })
        }
    };
    g_idx.into_iter().enumerate().map(sort).collect::<Result<_>>().map(Some)
}

fn pack_zeros(
    weights: &[Weight<'_>],
    groups: usize,
    shape: Shape,
    activations: Activations,
) -> Result<Option<(ZeroPointLayout, Array3<u32>)>> {
    let Some(zeros) = all_or_none(weights, "zeros", |w| w.zeros.as_ref())? else {
        return Ok(None);
    };
    let layout = ZeroPointLayout::new(groups, shape.size_n, code_bits(weights[0].ty), activations)?;
    let mut words = Vec::with_capacity(layout.packed_len() * weights.len());
    for zeros in zeros {
        words.extend(layout.pack(zeros)?);
    }
    Ok(Some((layout, stacked(weights.len(), layout.packed_shape(), words))))
}

fn pack_bias(weights: &[Weight<'_>], shape: Shape, dtype: ScalarType) -> Result<Option<Table>> {
    let Some(biases) = all_or_none(weights, "bias", |w| w.bias.as_ref())? else {
        return Ok(None);
    };
    let layout = ScaleLayout::bias(shape.size_n, dtype)?;
    let packed = biases
        .into_iter()
        .map(|b| layout.pack(&to_dtype("bias", b, dtype)?))
        .collect::<Result<Vec<_>>>()?;
    stack(packed).map(Some)
}

/// A part that either every matrix or none has.
fn all_or_none<'w, T>(
    weights: &'w [Weight<'_>],
    part: &str,
    get: impl Fn(&'w Weight<'_>) -> Option<T>,
) -> Result<Option<Vec<T>>> {
    let with: Vec<T> = weights.iter().filter_map(&get).collect();
    match with.len() {
        0 => Ok(None),
        n if n == weights.len() => Ok(Some(with)),
        n => Err(Error::missing(part, format!("all {} experts, {n} have it;", weights.len()))),
    }
}
