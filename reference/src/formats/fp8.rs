//! FP8: e4m3fn weights with real scales per tensor, shard, channel or block.
//!
//! Source: vLLM 0.21.0 `fp8.py`, `marlin_utils_fp8.py`. All forms are expanded to one scale per
//! group and column, the table that the kernel expects.

use crate::formats::parts::{
    FLOATS, bias_table, bias_tensor, expect_type, float_tensor, full, sizes,
};
use crate::formats::values::expect_finite;
use crate::formats::words::{codes_from_columns, columns_from_codes, words};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::{ScalarType, float_type, stored_type};
use crate::num::tensor::{DType, Tensor};
use crate::weight::{Groups, Table, TableData, Weight};
use crate::{Error, Result};

/// The part of the matrix that one scale of the file covers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fp8Scales {
    /// The whole matrix, or each shard of a fused one: `widths` are the shards' columns, in order
    /// (one entry: the whole matrix). Scales `[]`, `[1]`, `[shards]`, with or without unit axes.
    Tensor {
        /// Columns of each shard.
        widths: Vec<usize>,
    },
    /// One output channel. Scales `[size_n]`, `[size_n, 1]` or `[1, size_n]`.
    Channel,
    /// A block of `[n, k]` codes (`weight_block_size`). Scales `[ceil(N / n), ceil(K / k)]`.
    Block {
        /// Columns of a block.
        block_n: usize,
        /// Rows of a block.
        block_k: usize,
    },
}

/// The tensors of one matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8Tensors<'a> {
    /// `[size_n, size_k]` float8_e4m3fn.
    pub weight: Tensor<'a>,
    /// `weight_scale`, or `weight_scale_inv` of block-wise files: either way a multiplier. f16,
    /// bf16, f32, or e8m0 powers of two.
    pub weight_scale: Tensor<'a>,
    /// `[size_n]`.
    pub bias: Option<Tensor<'a>>,
}

impl Fp8Tensors<'_> {
    /// The weight, its scales expanded to `[groups, size_n]` in their own type.
    ///
    /// NaN codes are kept; their treatment depends on the kernel.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Dtype`]; [`Error::Value`] for scales that are not finite;
    /// [`Error::Size`] if K does not fill whole words or blocks, or the widths do not sum to N.
    pub fn unpack(self, name: &str, scheme: &Fp8Scales) -> Result<Weight<'static>> {
        self.unpack_as(ScalarType::FLOAT8_E4M3FN, name, scheme)
    }

    /// [`Self::unpack`] of codes of another 8-bit type `ty`.
    pub(super) fn unpack_as(
        self,
        ty: ScalarType,
        name: &str,
        scheme: &Fp8Scales,
    ) -> Result<Weight<'static>> {
        let stored = if ty == ScalarType::INT8 { DType::I8 } else { DType::F8E4M3 };
        self.weight.expect_dtype(&[stored])?;
        let [size_n, size_k] = sizes(&self.weight)?;
        let shape = Shape::new(size_k, size_n);
        shape.k().packed(8)?;
        let (scales, group_size) = expand(name, &self.weight_scale, scheme, shape)?;
        let weight = Weight {
            name: name.to_owned(),
            ty,
            bias: bias_table(self.bias.as_ref(), size_n)?,
            codes: codes_from_columns(8, shape, &words(self.weight.into_bytes()))?,
            scales,
            zeros: None,
            groups: Groups::Uniform(group_size),
            global_scale: None,
        };
        weight.validate()?;
        Ok(weight)
    }

    /// The tensors of `weight`, its scales gathered to one for each shard, channel or block.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for other types, [`Error::Value`] if columns that must share a scale
    /// differ, [`Error::Size`] if the blocks differ from the weight's groups.
    pub fn pack(weight: &Weight<'_>, scheme: &Fp8Scales) -> Result<Fp8Tensors<'static>> {
        let name = &weight.name;
        expect_type("FP8", name, weight.ty, &[ScalarType::FLOAT8_E4M3FN])?;
        weight.validate()?;
        let shape = weight.shape();
        let (runs, group_size, suffix) = match scheme {
            Fp8Scales::Tensor { widths } => {
                check_widths(name, widths, shape.size_n)?;
                (widths.clone(), GroupSize::Channel, "weight_scale")
            }
            Fp8Scales::Channel => (vec![1; shape.size_n], GroupSize::Channel, "weight_scale"),
            Fp8Scales::Block { block_n, block_k } => {
                let group_size = block_group(name, *block_n, *block_k, shape)?;
                (block_widths(shape.size_n, *block_n), group_size, "weight_scale_inv")
            }
        };
        if weight.groups != Groups::Uniform(group_size) {
            let found = weight.groups.group_size();
            let expected = format!("{group_size}, not indexed");
            return Err(Error::size(format!("{name}: group_size"), found, expected));
        }
        let scale = gather(name, suffix, &weight.scales, &runs)?;
        let scale = match scheme {
            Fp8Scales::Tensor { .. } => {
                let shape = vec![runs.len()];
                Tensor::new(scale.name(), scale.dtype(), shape, scale.bytes().to_vec())?
            }
            _ => scale,
        };
        let columns = columns_from_codes(&weight.codes);
        let dims = vec![shape.size_n, shape.size_k];
        Ok(Fp8Tensors {
            weight: Tensor::from_vec(full(name, "weight"), DType::F8E4M3, dims, columns)?,
            weight_scale: scale,
            bias: bias_tensor(name, weight.bias.as_ref())?,
        })
    }
}

/// The file's scales as `[groups, size_n]`, and the size of a group.
fn expand(
    name: &str,
    scale: &Tensor<'_>,
    scheme: &Fp8Scales,
    shape: Shape,
) -> Result<(Table, GroupSize)> {
    scale.expect_dtype(&[FLOATS, &[DType::F8E8M0]].concat())?;
    let Some(ty) = float_type(scale.dtype()) else {
        return Err(Error::dtype(scale.name(), scale.dtype(), "a floating-point type"));
    };
    expect_finite(scale, ty)?;
    let size_n = shape.size_n;
    // Axes of length one are ignored; files differ in them.
    let axes: Vec<usize> = scale.shape().iter().copied().filter(|&d| d != 1).collect();
    let line = |len: usize, expected: String| {
        let fits = if len == 1 { axes.is_empty() } else { axes == [len] };
        if fits { Ok(()) } else { Err(Error::shape(scale.name(), scale.shape(), expected)) }
    };
    let flat = Table::from_tensor(scale, ty)?;
    let bits: Vec<u32> = flat.iter_bits().collect();
    match scheme {
        Fp8Scales::Tensor { widths } => {
            check_widths(name, widths, size_n)?;
            line(widths.len(), format!("[{}], one for each shard", widths.len()))?;
            let row = repeat(&bits, widths);
            Ok((table(ty, 1, size_n, row)?, GroupSize::Channel))
        }
        Fp8Scales::Channel => {
            line(size_n, format!("[{size_n}] or [{size_n}, 1]"))?;
            Ok((table(ty, 1, size_n, bits)?, GroupSize::Channel))
        }
        Fp8Scales::Block { block_n, block_k } => {
            let group_size = block_group(name, *block_n, *block_k, shape)?;
            let (blocks_n, groups) = (size_n.div_ceil(*block_n), shape.size_k.div_ceil(*block_k));
            scale.expect_shape(&[blocks_n, groups])?;
            let widths = block_widths(size_n, *block_n);
            let mut out = Vec::with_capacity(groups * size_n);
            for g in 0..groups {
                let row: Vec<u32> = (0..blocks_n).map(|b| bits[b * groups + g]).collect();
                out.extend(repeat(&row, &widths));
            }
            Ok((table(ty, groups, size_n, out)?, group_size))
        }
    }
}

/// Repeats each value by the width of its run.
fn repeat(values: &[u32], widths: &[usize]) -> Vec<u32> {
    values.iter().zip(widths).flat_map(|(&v, &w)| std::iter::repeat_n(v, w)).collect()
}

/// The width of each block; the last one may be shorter.
fn block_widths(size_n: usize, block_n: usize) -> Vec<usize> {
    (0..size_n).step_by(block_n.max(1)).map(|n| block_n.min(size_n - n)).collect()
}

/// The k of a block as a group size; a block as high as the matrix or higher is channel-wise.
fn block_group(name: &str, block_n: usize, block_k: usize, shape: Shape) -> Result<GroupSize> {
    if block_n == 0 || block_k == 0 {
        let found = format!("[{block_n}, {block_k}]");
        return Err(Error::size(format!("{name}: weight_block_size"), found, "positive sizes"));
    }
    if block_k > shape.size_k {
        return Ok(GroupSize::Channel);
    }
    let group_size = GroupSize::Of(block_k);
    group_size.groups(shape.k())?;
    Ok(group_size)
}

fn check_widths(name: &str, widths: &[usize], size_n: usize) -> Result<()> {
    let sum = widths.iter().try_fold(0usize, |a, &w| a.checked_add(w));
    if sum == Some(size_n) && !widths.contains(&0) {
        return Ok(());
    }
    let expected = format!("positive widths that sum to size_n {size_n}");
    Err(Error::size(format!("{name}: shard widths"), format!("{widths:?}"), expected))
}

fn table(ty: ScalarType, rows: usize, cols: usize, bits: Vec<u32>) -> Result<Table> {
    let data = match ty.storage_bits() {
        8 => TableData::B8(bits.into_iter().map(|b| b as u8).collect()),
        16 => TableData::B16(bits.into_iter().map(|b| b as u16).collect()),
        _ => TableData::B32(bits),
    };
    Table::new(ty, rows, cols, data)
}

/// `[groups, size_n]` scales as `[runs, groups]`; the columns of a run must agree.
fn gather(name: &str, suffix: &str, scales: &Table, runs: &[usize]) -> Result<Tensor<'static>> {
    let mut out = Vec::with_capacity(runs.len() * scales.rows());
    let mut first = 0;
    for &width in runs {
        for g in 0..scales.rows() {
            let bits = scales.bits(g, first);
            let other = (first..first + width).find(|&n| scales.bits(g, n) != bits);
            if let Some(n) = other {
                let (found, expected) = (scales.value(g, n), scales.value(g, first));
                let expected = format!("{expected}, as column {first} of the same block");
                return Err(Error::value(full(name, suffix), &[g, n], found, expected));
            }
            out.push(bits);
        }
        first += width;
    }
    if stored_type(scales.ty()).is_none() {
        let what = format!("{name}: scales of type {}", scales.ty());
        return Err(Error::unsupported(what, "FP8 scales are floating-point"));
    }
    float_tensor(name, suffix, &table(scales.ty(), runs.len(), scales.rows(), out)?)
}
