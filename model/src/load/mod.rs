//! Loads tensors of the files into the hub's [`Weight`]: slices them, concatenates gate and up, and
//! unpacks.

pub mod preparation;
pub mod slice;
#[cfg(test)]
mod upstream;

use std::ops::Range;

use marlinspike::config::{FloatContainer, ScaleStrategy, Scheme};
use marlinspike::formats::blocks::BlockTensors;
use marlinspike::formats::fp8::{Fp8Scales, Fp8Tensors};
use marlinspike::formats::global_scale::{
    GlobalStorage, Shards, W13Scale, W13Scales, w13_global_scales,
};
use marlinspike::formats::int8::Int8Tensors;
use marlinspike::formats::integers::{IntStorage, IntTensors};
use marlinspike::formats::{compressed_tensors, expect_finite, float_type};
use marlinspike::num::array::rows_mut;
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::{ScalarType, e8m0_to_f32};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::prepare::requantize::{Fp8Type, Requantize, merge_shards};
use marlinspike::prepare::w4a8_fp8;
use marlinspike::weight::{Groups, Weight};
use marlinspike::{Error, Result};

use crate::model::Model;
use crate::model::bind::{Axis, Bound, Found, Part};
use crate::model::values::{floats, line};
use preparation::Preparation;
use slice::{concat, slice};

/// Parameters for reading the matrices of a stack.
#[derive(Debug, Clone, Copy)]
pub struct Reading<'r> {
    /// Their storage format.
    pub scheme: &'r Scheme,
    /// Columns to read of each matrix of an expert.
    pub n: &'r [Range<usize>],
    /// k per scale.
    pub group_size: GroupSize,
    /// Whether rows are ordered by their groups.
    pub act_order: bool,
    /// Changes to the values while loading.
    pub preparation: Preparation,
}

/// Reads rows `k` and columns `n` of the tensor of `found`.
fn read<'m>(
    model: &Model<'m>,
    found: &Found,
    k: &Range<usize>,
    n: &Range<usize>,
) -> Result<Tensor<'m>> {
    let tensor =
        model.tensor(&found.name).map_err(|e| Error::missing(&found.name, e.to_string()))?;
    let tensor = squeezed(tensor, found)?;
    let ranges = ranges(found, tensor.shape(), k, n)?;
    let part = slice(tensor, &ranges)?;
    if expect_numbers(&part, found.binding.part).is_err() {
        // The message names the element of the file, not that of the part.
        let whole =
            model.tensor(&found.name).map_err(|e| Error::missing(&found.name, e.to_string()))?;
        expect_numbers(&whole, found.binding.part)?;
    }
    if found.index.is_none() {
        return Ok(part);
    }
    let shape = part.shape()[1..].to_vec();
    let (name, dtype) = (part.name().to_owned(), part.dtype());
    Tensor::new(name, dtype, shape, part.into_bytes())
}

/// The tensor without the unit axes that [`Bound::find`] dropped.
fn squeezed<'m>(tensor: Tensor<'m>, found: &Found) -> Result<Tensor<'m>> {
    if found.index.is_some() || tensor.shape().len() == found.shape.len() {
        return Ok(tensor);
    }
    let (name, dtype) = (tensor.name().to_owned(), tensor.dtype());
    Tensor::new(name, dtype, found.shape.clone(), tensor.into_bytes())
}

/// Returns [`Error::Value`] for a scale that is not finite, or an FP8 code that is NaN: the whole column
/// of a product with it would be NaN.
fn expect_numbers(tensor: &Tensor<'_>, part: Part) -> Result<()> {
    let coded = matches!(tensor.dtype(), DType::F8E4M3);
    let ty = match part {
        Part::Scale | Part::Global | Part::InputScale => float_type(tensor.dtype()),
        // The two codes of NaN; nearly always there are none, which needs no table.
        Part::Weight if coded && tensor.bytes().iter().any(|b| b & 0x7f == 0x7f) => {
            Some(ScalarType::FLOAT8_E4M3FN)
        }
        _ => None,
    };
    ty.map_or(Ok(()), |ty| expect_finite(tensor, ty))
}

/// The part of a tensor of shape `full` that holds rows `k` and columns `n` of its matrix.
fn ranges(
    found: &Found,
    full: &[usize],
    k: &Range<usize>,
    n: &Range<usize>,
) -> Result<Vec<Range<usize>>> {
    let skip = usize::from(found.index.is_some());
    let mut ranges: Vec<_> = full.iter().map(|&d| 0..d).collect();
    if let Some(i) = found.index {
        ranges[0] = i..i + 1;
    }
    for (axis, range, start) in [(found.binding.k, k, 0), (found.binding.n, n, found.n_start)] {
        let Some(Axis { dim, unit }) = axis else { continue };
        let size = found.shape.get(dim).copied();
        let Some(slot) = ranges.get_mut(dim + skip) else {
            let expected = format!("{} dimensions or more", dim + skip + 1);
            return Err(Error::shape(&found.name, full, expected));
        };
        let end = range.end.div_ceil(unit);
        // Only the last element of a dimension may cover fewer rows or columns.
        if !range.start.is_multiple_of(unit)
            || (!range.end.is_multiple_of(unit) && size != Some(end))
        {
            let what = format!("{}: a slice of dimension {dim}", found.name);
            return Err(Error::size(what, format!("{range:?}"), format!("multiples of {unit}")));
        }
        *slot = start + range.start / unit..start + end;
    }
    Ok(ranges)
}

/// Maps `columns` of the rank's merged matrix to columns of each matrix of the stack; `n` are the
/// columns of each matrix that the rank holds.
fn columns_of_each(n: &[Range<usize>], columns: &Range<usize>) -> Vec<Range<usize>> {
    let mut before = 0;
    let part = |n: &Range<usize>| {
        let inside = |column: usize| n.start + column.saturating_sub(before).min(n.len());
        let part = inside(columns.start)..inside(columns.end);
        before += n.len();
        part
    };
    n.iter().map(part).collect()
}

/// `part` of one expert with its matrices concatenated along N: rows `k` and columns `n` of each.
pub fn merged<'m>(
    model: &Model<'m>,
    matrices: &[Bound],
    part: Part,
    k: &Range<usize>,
    n: &[Range<usize>],
) -> Result<Option<Tensor<'m>>> {
    let mut tensors = Vec::with_capacity(matrices.len());
    for (bound, n) in matrices.iter().zip(n) {
        match bound.get(part) {
            Some(found) => tensors.push(read(model, found, k, n)?),
            None if tensors.is_empty() => {}
            None => return Err(Error::missing(&bound.name, format!("its {part:?} like the gate"))),
        }
    }
    if tensors.is_empty() {
        return Ok(None);
    }
    if tensors.len() < matrices.len() {
        return Err(Error::missing(&matrices[0].name, format!("its {part:?} like the others")));
    }
    if part == Part::GIdx {
        // One product can apply only one permutation of the activations.
        if let Some(other) = tensors.iter().find(|t| t.bytes() != tensors[0].bytes()) {
            let expected = format!("the rows in the groups of `{}`", tensors[0].name());
            return Err(Error::value(other.name(), &[], "other groups", expected));
        }
        tensors.truncate(1);
    }
    let dim = matrices[0].get(part).and_then(|f| f.binding.n).map_or(0, |a| a.dim);
    let tensors = tensors.into_iter().map(line).collect::<Result<_>>()?;
    concat(tensors, dim).map(Some)
}

fn need<'m>(tensor: Option<Tensor<'m>>, name: &str, what: &str) -> Result<Tensor<'m>> {
    tensor.ok_or_else(|| Error::missing(format!("{name}.{what}"), "the scheme"))
}

/// Loads rows `k` of the file's matrices and `columns` of the rank's merged matrix of one expert.
///
/// # Errors
/// Errors of the format, naming the tensor.
pub fn load<'m>(
    model: &Model<'m>,
    reading: Reading<'_>,
    matrices: &[Bound],
    k: &Range<usize>,
    columns: &Range<usize>,
) -> Result<Weight<'m>> {
    let n = columns_of_each(reading.n, columns);
    let name = &matrices[0].name;
    let part = |part| merged(model, matrices, part, k, &n);
    let weight = need(part(Part::Weight)?, name, "weight")?;
    let scale = need(part(Part::Scale)?, name, "scale")?;
    let bias = part(Part::Bias)?;
    for bound in matrices {
        check_declared_shape(model, bound)?;
    }
    let mut weight = match reading.scheme {
        Scheme::Wna16(w) => {
            let storage = IntStorage {
                bits: w.bits(),
                group_size: w.group_size,
                symmetric: w.symmetric(),
                act_order: w.desc_act,
            };
            let (zeros, g_idx) = (part(Part::Zeros)?, part(Part::GIdx)?);
            let tensors = IntTensors { weight, scales: scale, zeros, g_idx, bias };
            (w.checkpoint_format.unpack)(tensors, name, &storage)?
        }
        Scheme::Fp8(f) => fp8(name, f.strategy, [weight, scale], bias, &n, reading.preparation)?,
        Scheme::Block { format, container, .. } => {
            let global = match format.has_global_scale() {
                true => {
                    let shards = match reading.preparation.w13_scale {
                        W13Scale::First => Shards::First,
                        W13Scale::Own => Shards::Equal,
                    };
                    let global = container.global_scale();
                    let tensor = need(part(Part::Global)?, name, "weight_global_scale")?;
                    Some((tensor, GlobalStorage { global, shards }))
                }
                false => None,
            };
            let in_blocks = container.stacks_experts();
            let tensors = BlockTensors { weight, weight_scale: scale, global, bias, in_blocks };
            (format.unpack)(tensors, name)?
        }
        Scheme::W4A8Int8 { group_size, checkpoint_format } => {
            let group_size = *group_size;
            let storage = IntStorage { bits: 4, group_size, symmetric: true, act_order: false };
            let tensors = IntTensors { weight, scales: scale, zeros: None, g_idx: None, bias };
            (checkpoint_format.unpack)(tensors, name, &storage)?
        }
        Scheme::W4A8Fp8 { group_size } => {
            let group_size = *group_size;
            let storage = IntStorage { bits: 4, group_size, symmetric: true, act_order: false };
            let tensors = IntTensors { weight, scales: scale, zeros: None, g_idx: None, bias };
            w4a8_fp8::to_e4m3(&(compressed_tensors::PACKED.unpack)(tensors, name, &storage)?)?
        }
        Scheme::W8A8Int8 { strategy, .. } => {
            let scales = match strategy {
                ScaleStrategy::Tensor => {
                    Fp8Scales::Tensor { widths: n.iter().map(Range::len).collect() }
                }
                _ => Fp8Scales::Channel,
            };
            Int8Tensors(Fp8Tensors { weight, weight_scale: scale, bias }).unpack(name, &scales)?
        }
        other => return Err(Error::unsupported(other.label(), "no kernel format takes it")),
    };
    if reading.act_order && matches!(weight.groups, Groups::Uniform(_)) {
        // With act-order in the config the kernel expects a permutation, even an identity.
        let g_idx = (0..weight.shape().size_k).map(|i| weight.groups.group_of(i) as u32).collect();
        weight.groups = Groups::Indexed { g_idx, group_size: reading.group_size };
    }
    Ok(weight)
}

/// An FP8 weight of several matrices with `n` columns each; `weight` and `scale` are their
/// concatenated tensors.
fn fp8<'m>(
    name: &str,
    strategy: ScaleStrategy,
    [weight, scale]: [Tensor<'m>; 2],
    bias: Option<Tensor<'m>>,
    n: &[Range<usize>],
    preparation: Preparation,
) -> Result<Weight<'m>> {
    let widths: Vec<usize> = n.iter().map(Range::len).collect();
    let (weight, weight_scale, widths) = match (strategy, preparation.requantize) {
        (ScaleStrategy::Tensor, Some(rule)) if widths.len() > 1 => {
            let (weight, scale) = one_scale(weight, &scale, &widths, rule)?;
            (weight, scale, vec![widths.iter().sum()])
        }
        _ => (weight, scale, widths),
    };
    let scheme = match strategy {
        ScaleStrategy::Tensor => Fp8Scales::Tensor { widths },
        ScaleStrategy::Channel => Fp8Scales::Channel,
        ScaleStrategy::Block { block_n, block_k } => Fp8Scales::Block { block_n, block_k },
    };
    let mut weight = Fp8Tensors { weight, weight_scale, bias }.unpack(name, &scheme)?;
    if weight.scales.ty() == ScalarType::FLOAT8_E8M0FNU {
        // Power-of-two scales are real numbers here, not MX block scales.
        let real = |b: u32| e8m0_to_f32(b as u8).to_bits();
        weight.scales = weight.scales.map(ScalarType::FLOAT32, real);
    }
    Ok(weight)
}

/// A note on the experts whose w1 and w3 were requantized; `None` if there are none.
pub fn requantized(
    module: &str,
    changed: usize,
    experts: usize,
    rule: Requantize,
) -> Option<String> {
    let name = match rule {
        Requantize::Exact => "exact",
        Requantize::UpstreamCuda => "upstream-cuda",
        Requantize::UpstreamCpu => "upstream-cpu",
    };
    (changed > 0).then(|| {
        format!(
            "{module}: w1 and w3 of {changed} of {experts} experts requantized to the larger scale \
             ({name})"
        )
    })
}

/// The global scales of gate and up of every expert.
///
/// # Errors
/// See [`w13_global_scales`].
pub fn w13_scales(
    model: &Model<'_>,
    module: &str,
    experts: &[Vec<Bound>],
    container: FloatContainer,
    policy: W13Scale,
) -> Result<W13Scales> {
    let mut values = Vec::with_capacity(2 * experts.len());
    for matrices in experts {
        for bound in matrices {
            let tensor = merged(
                model,
                std::slice::from_ref(bound),
                Part::Global,
                &(0..bound.shape.size_k),
                std::slice::from_ref(&(0..bound.shape.size_n)),
            )?;
            let tensor = tensor.ok_or_else(|| Error::missing(&bound.name, "a global scale"))?;
            tensor.expect_dtype(&[DType::F32])?;
            values.extend(floats(&tensor)?);
        }
    }
    let name = format!("{module}.w13_weight_global_scale");
    let tensor = Tensor::from_vec(name, DType::F32, vec![experts.len(), 2], values)?;
    w13_global_scales(&tensor, container.global_scale(), policy)
}

/// Codes `[sum of widths, K]`, requantized to the largest scale of the shards, and that scale.
fn one_scale<'m>(
    weight: Tensor<'m>,
    scale: &Tensor<'_>,
    widths: &[usize],
    rule: Requantize,
) -> Result<(Tensor<'m>, Tensor<'m>)> {
    let [_, size_k] = weight.expect_dtype(&[DType::F8E4M3])?.dims2()?;
    let (name, shape) = (weight.name().to_owned(), weight.shape().to_vec());
    let mut codes = weight.into_bytes().into_owned();
    let rule = (rule, Fp8Type::E4m3fn);
    let rows = rows_mut(&name, &mut codes, size_k)?;
    let largest = merge_shards(scale.name(), rows, widths, &floats(scale)?, rule)?;
    let weight = Tensor::from_vec(name, DType::F8E4M3, shape, codes)?;
    Ok((weight, Tensor::from_vec(scale.name(), DType::F32, vec![1], vec![largest])?))
}

/// Checks `weight_shape`, if present, against `weight_packed`. Otherwise a K that does not fill
/// whole words would be read with its padding.
fn check_declared_shape(model: &Model<'_>, bound: &Bound) -> Result<()> {
    let Some(module) = bound.tensors.first().and_then(|f| f.name.strip_suffix("weight_packed"))
    else {
        return Ok(());
    };
    let Ok(declared) = model.tensor(&format!("{module}weight_shape")) else { return Ok(()) };
    declared.expect_dtype(&[DType::I64, DType::I32])?.expect_shape(&[2])?;
    let found: Vec<i64> = match declared.dtype() {
        DType::I64 => declared.elements::<i64>().to_vec(),
        _ => declared.elements::<i32>().iter().map(|&v| v.into()).collect(),
    };
    let expected = [bound.shape.size_n as i64, bound.shape.size_k as i64];
    if found == expected {
        return Ok(());
    }
    let expected = format!("{expected:?}, as `weight_packed` holds");
    Err(Error::value(declared.name(), &[], format!("{found:?}"), expected))
}
