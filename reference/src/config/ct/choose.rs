//! From quantization arguments to a scheme, in upstream's order of precedence
//! (vLLM 0.21.0 `_get_scheme_from_parts` and `CompressedTensorsMoEMethod.get_moe_method`).
//!
//! The device is not considered: where upstream falls back by capability, the scheme describes the
//! checkpoint and kernel selection decides.

use super::{CtArgs, CtDynamic, CtFormat, CtScheme, CtStrategy, CtType};
use crate::config::{
    ActOrder, ActivationScheme, ConfigError, ConfigResult, FloatContainer, Fp8Scheme, Module,
    ModuleKind, ScaleStrategy, Scheme, Wna16Scheme, ZeroPoints,
};
use crate::formats::blocks::BlockFormat;
use crate::formats::{BLOCK_FORMATS, compressed_tensors};
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;

const CONTAINER: FloatContainer = FloatContainer::CompressedTensors;

pub(super) fn scheme(module: &Module<'_>, group: &CtScheme) -> ConfigResult<Scheme> {
    let (weights, inputs) = (&group.weights, group.input_activations.as_ref());
    if let Some(format) = BLOCK_FORMATS.into_iter().find(|format| is_block(weights, format)) {
        let weight_only = match inputs.filter(|_| format.quantizes_activations()) {
            None => true,
            Some(a) if is_block(a, format) => false,
            Some(a) => {
                let title = format.title();
                return Err(ConfigError::refused(
                    format!("`{}`: {title} weights", module.name),
                    format!("activations must be {title} or unquantized, found {}", a.summary()),
                ));
            }
        };
        return Ok(Scheme::Block { format, container: CONTAINER, weight_only });
    }
    let scheme = match (weights.ty, inputs) {
        (CtType::Int, None) => wna16(module, weights, group.format)?,
        (CtType::Float, _) => fp8(weights, inputs),
        (CtType::Int, Some(inputs)) => int8_activations(weights, inputs, group.format)?,
    };
    scheme.ok_or_else(|| ConfigError::NoScheme {
        module: module.name.to_owned(),
        reason: format!(
            "weights {}, activations {}, format {}",
            weights.summary(),
            inputs.map_or("none".to_owned(), CtArgs::summary),
            group.format.map_or("none", CtFormat::name),
        ),
    })
}

fn is_block(args: &CtArgs, format: &BlockFormat) -> bool {
    let scale = format.compressed_tensors_scale;
    let strategy = match format.has_global_scale() {
        true => CtStrategy::TensorGroup,
        false => CtStrategy::Group,
    };
    args.strategy == strategy
        && args.symmetric
        && args.group_size == Some(format.block as i64)
        && args.ty == CtType::Float
        && args.num_bits == format.element.size_bits()
        && scale.is_none_or(|scale| args.scale_dtype.as_deref() == Some(scale))
}

fn group_size(args: &CtArgs) -> GroupSize {
    match args.group_size {
        Some(g) if g > 0 => GroupSize::Of(g as usize),
        _ => GroupSize::Channel,
    }
}

/// Weight-only integers.
fn wna16(
    module: &Module<'_>,
    weights: &CtArgs,
    format: Option<CtFormat>,
) -> ConfigResult<Option<Scheme>> {
    let grouped = matches!(weights.strategy, CtStrategy::Channel | CtStrategy::Group);
    if !grouped || weights.dynamic.truthy() {
        return Ok(None);
    }
    let checkpoint_format = match format {
        Some(CtFormat::PackQuantized) => &compressed_tensors::PACKED,
        Some(CtFormat::IntQuantized | CtFormat::NaiveQuantized) => &compressed_tensors::BYTES,
        _ => return Ok(None),
    };
    // The layer of vLLM 0.21.0 refuses what the files of each expert may hold.
    if module.kind == ModuleKind::FusedMoe && !weights.symmetric {
        return Err(ConfigError::refused(
            format!("`{}`: asymmetric weights", module.name),
            "experts are read with symmetric quantization only",
        ));
    }
    let weight_type = match (weights.num_bits, weights.symmetric) {
        (4, true) => ScalarType::UINT4B8,
        (8, true) => ScalarType::UINT8B128,
        (4, false) => ScalarType::UINT4,
        (8, false) => ScalarType::UINT8,
        (bits, symmetric) => {
            return Err(ConfigError::UnsupportedType {
                context: module.name.to_owned(),
                bits: i64::from(bits),
                symmetric,
                expected: "4 or 8 bits",
            });
        }
    };
    Ok(Some(Scheme::Wna16(Wna16Scheme {
        checkpoint_format,
        weight_type,
        group_size: group_size(weights),
        desc_act: weights.actorder == Some(ActOrder::Group),
        actorder: weights.actorder,
        zeros: if weights.symmetric { ZeroPoints::Symmetric } else { ZeroPoints::Stored },
    })))
}

/// e4m3fn weights, with or without activation quantization.
fn fp8(weights: &CtArgs, inputs: Option<&CtArgs>) -> Option<Scheme> {
    if weights.num_bits != 8 || !weights.symmetric || weights.dynamic.truthy() {
        return None;
    }
    let strategy = match (weights.strategy, weights.block_structure) {
        (CtStrategy::Tensor, _) => ScaleStrategy::Tensor,
        (CtStrategy::Channel, _) => ScaleStrategy::Channel,
        (CtStrategy::Block, Some([block_n, block_k])) => ScaleStrategy::Block { block_n, block_k },
        _ => return None,
    };
    let activations = match inputs {
        None => ActivationScheme::None,
        Some(a) if a.ty != CtType::Float || a.num_bits != 8 => return None,
        Some(a) => activation_scheme(a)?,
    };
    Some(Scheme::Fp8(Fp8Scheme { container: CONTAINER, strategy, activations, scale_inv: false }))
}

fn activation_scheme(args: &CtArgs) -> Option<ActivationScheme> {
    match (args.dynamic, args.strategy) {
        (CtDynamic::Static, CtStrategy::Tensor) if args.symmetric => {
            Some(ActivationScheme::StaticTensor)
        }
        (CtDynamic::Dynamic, CtStrategy::Tensor) => Some(ActivationScheme::DynamicTensor),
        (CtDynamic::Dynamic, CtStrategy::Token) => Some(ActivationScheme::DynamicToken),
        (CtDynamic::Dynamic, CtStrategy::Group) => {
            args.group_size.filter(|&g| g > 0).map(|g| ActivationScheme::DynamicGroup(g as usize))
        }
        _ => None,
    }
}

/// Integer weights with quantized activations.
fn int8_activations(
    weights: &CtArgs,
    inputs: &CtArgs,
    format: Option<CtFormat>,
) -> ConfigResult<Option<Scheme>> {
    if !weights.symmetric || weights.dynamic.truthy() || inputs.num_bits != 8 {
        return Ok(None);
    }
    let dynamic_token = inputs.strategy == CtStrategy::Token && inputs.dynamic.truthy();
    let per_row = matches!(weights.strategy, CtStrategy::Channel | CtStrategy::Group);
    if weights.num_bits == 4 && per_row && dynamic_token {
        let group_size = group_size(weights);
        let packed = format == Some(CtFormat::PackQuantized);
        if inputs.ty == CtType::Float {
            let fits = packed
                && inputs.symmetric
                && weights.strategy == CtStrategy::Group
                && weights.actorder != Some(ActOrder::Group);
            return Ok(fits.then_some(Scheme::W4A8Fp8 { group_size }));
        }
        let checkpoint_format = match format {
            Some(CtFormat::PackQuantized) => &compressed_tensors::PACKED,
            Some(CtFormat::IntQuantized | CtFormat::NaiveQuantized) => &compressed_tensors::BYTES,
            _ => return Ok(None),
        };
        return Ok(Some(Scheme::W4A8Int8 { group_size, checkpoint_format }));
    }
    let strategy = match weights.strategy {
        CtStrategy::Tensor => ScaleStrategy::Tensor,
        CtStrategy::Channel => ScaleStrategy::Channel,
        _ => return Ok(None),
    };
    let static_tensor = inputs.strategy == CtStrategy::Tensor && !inputs.dynamic.truthy();
    if weights.num_bits != 8 || inputs.ty != CtType::Int || !(dynamic_token || static_tensor) {
        return Ok(None);
    }
    let activations =
        if dynamic_token { ActivationScheme::DynamicToken } else { ActivationScheme::StaticTensor };
    let input_symmetric = inputs.symmetric;
    Ok(Some(Scheme::W8A8Int8 { strategy, activations, input_symmetric }))
}
