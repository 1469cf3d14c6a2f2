//! int8 weights of W8A8-int8 checkpoints, and the parameters of their static activations.
//!
//! Source: vLLM 0.21.0 `compressed_tensors_w8a8_int8.py` and `CutlassInt8ScaledMMLinearKernel`.

use super::fp8::{Fp8Scales, Fp8Tensors};
use crate::num::scalar::ScalarType;
use crate::weight::Weight;
use crate::{Error, Result};

/// The tensors of one matrix: [`Fp8Tensors`] with a `weight` `[size_n, size_k]` int8.
#[derive(Debug, Clone, PartialEq)]
pub struct Int8Tensors<'a>(
    /// The tensors.
    pub Fp8Tensors<'a>,
);

impl Int8Tensors<'_> {
    /// The weight, one scale for each column.
    ///
    /// # Errors
    /// As [`Fp8Tensors::unpack`]; [`Error::Unsupported`] for blocks.
    pub fn unpack(self, name: &str, scales: &Fp8Scales) -> Result<Weight<'static>> {
        if matches!(scales, Fp8Scales::Block { .. }) {
            let what = format!("{name}: int8 with scales of blocks");
            return Err(Error::unsupported(what, "scales of tensors or channels"));
        }
        self.0.unpack_as(ScalarType::INT8, name, scales)
    }
}

/// One static scale and zero point for the shards of a fused matrix, each with its own `scales` and
/// `zeros` (`input_scale`, `input_zero_point`): those of the smallest range of values that contains the
/// ranges of all shards, as upstream computes them in f32. The zero point is truncated, not rounded.
///
/// # Errors
/// [`Error::Size`] for no shards or other numbers of zero points; [`Error::Value`] for ranges that are
/// empty or overflow.
pub fn static_range(name: &str, scales: &[f32], zeros: &[i32]) -> Result<(f32, i32)> {
    if scales.is_empty() || scales.len() != zeros.len() {
        let what = format!("{name}: input zero points");
        return Err(Error::size(what, zeros.len(), format!("{}, 1 or more", scales.len().max(1))));
    }
    let end = |code: i32| {
        let values = scales.iter().zip(zeros);
        values.map(move |(scale, zero)| scale * (code - zero) as f32)
    };
    let largest = end(i8::MAX.into()).fold(f32::NEG_INFINITY, f32::max);
    let least = end(i8::MIN.into()).fold(f32::INFINITY, f32::min);
    let scale = (largest - least) / 255.0;
    if !(scale.is_finite() && scale > 0.0) {
        let what = format!("{name}: input_scale");
        return Err(Error::value(
            what,
            &[],
            scale,
            "a positive finite scale of the shards' ranges",
        ));
    }
    Ok((scale, (-128.0 - least / scale) as i32))
}
