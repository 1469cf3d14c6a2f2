//! A float32 scale over all blocks of a matrix: how files store it, and what is done where the
//! shards of a fused matrix have several.

use super::values::unflatten;
use crate::num::tensor::{DType, Tensor};
use crate::{Error, Result};

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
pub struct GlobalStorage {
    /// Divisor or multiplier.
    pub global: GlobalScale,
    /// Choice among several.
    pub shards: Shards,
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
            let index = unflatten(tensor.shape(), i);
            Err(Error::value(tensor.name(), &index, values[i], expected))
        }
    }
}

/// The multiplier of a file's global scales.
pub(super) fn multiplier(tensor: &Tensor<'_>, scheme: GlobalStorage) -> Result<f32> {
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
                let index = unflatten(tensor.shape(), i);
                let expected = format!("{first}, as the first shard");
                return Err(Error::value(tensor.name(), &index, values[i], expected));
            }
        },
    };
    Ok(scheme.global.multiplier(stored))
}
