//! NVFP4: e2m1 weights, an e4m3fn scale for each 16 k, and a float32 scale over all.
//!
//! Source: vLLM 0.21.0 `compressed_tensors_w4a16_nvfp4.py` (stores a divisor), `modelopt.py`
//! (stores a multiplier, `weight_scale_2`), `marlin_utils_fp4.py`.

use crate::formats::mxfp4::{nibble_shape, nibble_tensor};
use crate::formats::parts::{
    bias_table, bias_tensor, block_scales, byte_scales, expect_blocks, expect_type, full,
};
use crate::formats::values::find;
use crate::formats::words::{codes_from_columns, words};
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

/// k per scale.
pub const BLOCK: usize = 16;

/// Whether the file's global scale divides or multiplies a dequantized value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GlobalScale {
    /// Divides it (`weight_global_scale` of compressed-tensors): the weight's multiplier is 1/x.
    Divisor,
    /// Multiplies it (`weight_scale_2` of ModelOpt).
    Multiplier,
}

/// The choice of the global scale if the shards of a fused matrix differ, since a kernel takes only
/// one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shards {
    /// Return an error, since any choice makes the values of some shard wrong.
    Equal,
    /// The largest, as in upstream's linear layers.
    Largest,
    /// The first, as in upstream's w13 (gate and up).
    First,
}

/// How a matrix's global scale is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheme {
    /// Divisor or multiplier.
    pub global: GlobalScale,
    /// Choice among several.
    pub shards: Shards,
}

/// The tensors of one matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Nvfp4Tensors<'a> {
    /// `[size_n, size_k / 2]` uint8, even k in the low nibble (`weight`, `weight_packed`).
    pub weight: Tensor<'a>,
    /// `[size_n, size_k / 16]` float8_e4m3fn.
    pub weight_scale: Tensor<'a>,
    /// `[]`, `[1]` or `[shards]` float32: `weight_global_scale` or `weight_scale_2`.
    pub weight_global_scale: Tensor<'a>,
    /// `[size_n]`.
    pub bias: Option<Tensor<'a>>,
}

impl Nvfp4Tensors<'_> {
    /// The weight; its global scale is the multiplier.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Dtype`]; [`Error::Value`] for a block scale that is NaN or
    /// negative (the kernel has no bit for its sign), a global scale that is not positive and
    /// finite, and shards that differ under [`Shards::Equal`]; [`Error::Size`] if K does not fill
    /// whole blocks.
    pub fn unpack(self, name: &str, scheme: Scheme) -> Result<Weight<'static>> {
        let (shape, groups) = nibble_shape(&self.weight, BLOCK)?;
        let e4m3 = ScalarType::FLOAT8_E4M3FN;
        let sizes = [shape.size_n, groups];
        let scales = byte_scales(&self.weight_scale, &[DType::F8E4M3], e4m3, sizes)?;
        find(&self.weight_scale, e4m3, |v| v < 0.0, "a scale of 0 or more")?;
        let weight = Weight {
            name: name.to_owned(),
            ty: ScalarType::FLOAT4_E2M1F,
            scales,
            global_scale: Some(multiplier(&self.weight_global_scale, scheme)?),
            bias: bias_table(self.bias.as_ref(), shape.size_n)?,
            codes: codes_from_columns(4, shape, &words(self.weight.into_bytes()))?,
            zeros: None,
            groups: Groups::Uniform(GroupSize::Of(BLOCK)),
        };
        weight.validate()?;
        Ok(weight)
    }

    /// The tensors of `weight`. A divisor is the reciprocal of the multiplier in float32, so a
    /// round trip may change its last bit.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless the weight is e2m1 with e4m3fn scales per 16 k,
    /// [`Error::Missing`] without a global scale.
    pub fn pack(weight: &Weight<'_>, global: GlobalScale) -> Result<Nvfp4Tensors<'static>> {
        let name = &weight.name;
        expect_type("NVFP4", name, weight.ty, &[ScalarType::FLOAT4_E2M1F])?;
        expect_blocks("NVFP4", weight, BLOCK, ScalarType::FLOAT8_E4M3FN)?;
        let (suffix, stored) = match (global, weight.global_scale) {
            (_, None) => return Err(Error::missing(full(name, "global_scale"), "NVFP4")),
            (GlobalScale::Divisor, Some(x)) => ("weight_global_scale", 1.0 / x),
            (GlobalScale::Multiplier, Some(x)) => ("weight_scale_2", x),
        };
        let stored = vec![stored];
        Ok(Nvfp4Tensors {
            weight: nibble_tensor(weight)?,
            weight_scale: block_scales(weight, DType::F8E4M3)?,
            weight_global_scale: Tensor::from_vec(full(name, suffix), DType::F32, vec![1], stored)?,
            bias: bias_tensor(name, weight.bias.as_ref())?,
        })
    }
}

/// The multipliers of the halves of an expert's w13 if their stored global scales differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum W13Scale {
    /// w1's for both, as in upstream, whose kernels take one per expert: the values of w3 are then
    /// wrong by the quotient of the two.
    First,
    /// Each keeps its own, as in the checkpoint.
    Own,
}

/// The stored global scales of an expert's w1 and w3 that differ: a warning, not an error.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardMismatch {
    /// Tensor name.
    pub tensor: String,
    /// Expert.
    pub expert: usize,
    /// w1's, as stored.
    pub w1: f32,
    /// w3's, as stored.
    pub w3: f32,
}

impl ShardMismatch {
    /// Whether upstream warns about it: unless |w1 − w3| ≤ 1e-8 + 1e-5 · |w3| (`torch.allclose`).
    /// The absolute part of this limit exceeds small scales, so multipliers of about 1e-8 always
    /// count as equal; [`w13_global_scales`] reports every difference.
    pub fn upstream_warns(&self) -> bool {
        (self.w1 - self.w3).abs() > 1e-8 + (1e-5 * self.w3).abs()
    }
}

impl std::fmt::Display for ShardMismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { tensor, expert, w1, w3 } = self;
        write!(f, "tensor `{tensor}` at [{expert}]: w1 has {w1}, w3 has {w3}")
    }
}

/// The multipliers of a layer's w13.
#[derive(Debug, Clone, PartialEq)]
pub struct W13Scales {
    /// Multipliers of w1 and w3 for each expert.
    pub multipliers: Vec<[f32; 2]>,
    /// The experts whose two stored values differ.
    pub mismatches: Vec<ShardMismatch>,
}

/// Reads the global scales `[experts, 2]` of a layer's w13 (`w13_weight_global_scale`, or ModelOpt's
/// `w13_weight_scale_2`), w1's first. Source: vLLM 0.21.0 `CompressedTensorsW4A4Nvfp4MoEMethod`.
///
/// # Errors
/// [`Error::Shape`], [`Error::Dtype`]; [`Error::Value`] for a scale that is not positive and finite,
/// or whose reciprocal is not.
pub fn w13_global_scales(
    tensor: &Tensor<'_>,
    global: GlobalScale,
    policy: W13Scale,
) -> Result<W13Scales> {
    let [_, shards] = tensor.dims2()?;
    if shards != 2 {
        return Err(Error::shape(tensor.name(), tensor.shape(), "[experts, 2]: w1 and w3"));
    }
    let values = usable_values(tensor, global)?;
    let pairs = || values.chunks_exact(2).enumerate();
    let multipliers = pairs().map(|(_, pair)| {
        let second = if policy == W13Scale::First { pair[0] } else { pair[1] };
        [pair[0], second].map(|stored| global.multiplier(stored))
    });
    let mismatch = |(expert, pair): (usize, &[f32])| {
        let (tensor, w1, w3) = (tensor.name().to_owned(), pair[0], pair[1]);
        (w1 != w3).then_some(ShardMismatch { tensor, expert, w1, w3 })
    };
    let multipliers = multipliers.collect();
    Ok(W13Scales { multipliers, mismatches: pairs().filter_map(mismatch).collect() })
}

/// Converts a tensor's stored global scales, of weights or of quantized activations, to multipliers
/// (`input_global_scale`, a divisor; ModelOpt's `input_scale`, a multiplier).
///
/// # Errors
/// [`Error::Dtype`]; [`Error::Value`] for a scale that is not positive and finite, or whose reciprocal
/// is not.
pub fn multipliers(tensor: &Tensor<'_>, global: GlobalScale) -> Result<Vec<f32>> {
    let stored = usable_values(tensor, global)?;
    Ok(stored.into_iter().map(|x| global.multiplier(x)).collect())
}

impl GlobalScale {
    /// The multiplier of a stored value.
    fn multiplier(self, stored: f32) -> f32 {
        match self {
            Self::Divisor => 1.0 / stored,
            Self::Multiplier => stored,
        }
    }
}

/// The stored values, which must be positive and finite, as must their multipliers.
fn usable_values(tensor: &Tensor<'_>, global: GlobalScale) -> Result<Vec<f32>> {
    tensor.expect_dtype(&[DType::F32])?;
    let fine = |x: f32| x > 0.0 && x.is_finite();
    let values = tensor.elements::<f32>().into_owned();
    match values.iter().position(|&x| !(fine(x) && fine(global.multiplier(x)))) {
        None => Ok(values),
        Some(i) => {
            let expected = "a positive number whose reciprocal is finite";
            let index = super::unflatten(tensor.shape(), i);
            Err(Error::value(tensor.name(), &index, values[i], expected))
        }
    }
}

/// The multiplier of a file's global scales.
fn multiplier(tensor: &Tensor<'_>, scheme: Scheme) -> Result<f32> {
    let values = usable_values(tensor, scheme.global)?;
    let Some(&first) = values.first() else {
        return Err(Error::shape(tensor.name(), tensor.shape(), "at least one value"));
    };
    let stored = match scheme.shards {
        Shards::First => first,
        Shards::Largest => values.iter().copied().fold(first, f32::max),
        Shards::Equal => match values.iter().position(|&x| x != first) {
            None => first,
            Some(i) => {
                let index = super::unflatten(tensor.shape(), i);
                let expected = format!("{first}, as the first shard");
                return Err(Error::value(tensor.name(), &index, values[i], expected));
            }
        },
    };
    Ok(scheme.global.multiplier(stored))
}
