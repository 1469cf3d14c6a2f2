//! How the activations of W8A8-int8 layers are quantized.

use marlinspike::config::{ActivationScheme, ScaleStrategy};
use marlinspike::formats::int8::static_range;
use marlinspike::method::Quantizer;
use marlinspike::prepare::fp8::largest_scale;
use marlinspike::quantize::Int8Quantizer;
use marlinspike::{Error, Result};

use super::matrices::Matrices;
use crate::model::Model;

/// The quantizer of a scheme whose scales are computed at run time; `None` for scales of the file.
///
/// # Errors
/// [`Error::Unsupported`] for experts that upstream refuses: those without a scale for each channel and
/// each token, and those with zero points, which no kernel of experts applies.
pub(super) fn dynamic(
    strategy: ScaleStrategy,
    activations: ActivationScheme,
    input_symmetric: bool,
    is_moe: bool,
) -> Result<Option<Quantizer>> {
    let of_tokens = activations == ActivationScheme::DynamicToken;
    if is_moe && !(of_tokens && strategy == ScaleStrategy::Channel && input_symmetric) {
        let how = if of_tokens { "dynamic" } else { "static" };
        let zeros = if input_symmetric { "symmetric" } else { "asymmetric" };
        let what = format!("int8 experts: {strategy:?} scales, {how} {zeros} activations");
        return Err(Error::unsupported(what, "channel scales and dynamic symmetric activations"));
    }
    let quantizer = match (is_moe, input_symmetric) {
        (true, _) => Int8Quantizer::Expert,
        (false, true) => Int8Quantizer::Token,
        (false, false) => Int8Quantizer::TokenAzp,
    };
    Ok(of_tokens.then_some(Quantizer::Int8(quantizer)))
}

/// The quantizer of a linear layer with static activations, whose shards have `scales`.
///
/// # Errors
/// As [`static_range`], and for tensors that cannot be read.
pub(super) fn fixed(
    model: &Model<'_>,
    matrices: &Matrices<'_>,
    input_symmetric: bool,
    scales: &[f32],
) -> Result<Quantizer> {
    Ok(Quantizer::Int8(match input_symmetric {
        true => Int8Quantizer::Tensor(largest_scale(scales)),
        false => {
            let zeros = matrices.input_zeros(model)?;
            let (scale, zero) = static_range(matrices.module, scales, &zeros)?;
            Int8Quantizer::TensorAzp(scale, zero)
        }
    }))
}
