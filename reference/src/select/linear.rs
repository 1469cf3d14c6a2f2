//! Whether Marlin runs a linear layer.

use super::{
    Backend, Capability, InputType, LinearDesc, MarlinRefusal, Options, Platform, Reason,
    Selection, check_marlin_supported, check_marlin_supports_shape,
};
use crate::config::Scheme;
use crate::num::scalar::ScalarType;

/// Whether Marlin runs a linear layer (upstream `can_implement` and `is_supported` of its Marlin
/// linear kernels). Lists all reasons against it, not only the first.
///
/// FP8 weights are refused on devices with native FP8 (8.9 and newer), unless
/// [`Options::force_fp8_marlin`] is set.
pub fn select_linear(scheme: &Scheme, desc: &LinearDesc, device: &Capability) -> Selection {
    Selection::among(&[Backend::MarlinLinear], |_| reasons(scheme, desc, device))
}

fn reasons(scheme: &Scheme, desc: &LinearDesc, device: &Capability) -> Vec<Reason> {
    let mut reasons = platform(device);
    match scheme {
        Scheme::Unquantized { .. } => return vec![Reason::Unquantized],
        Scheme::Wna16(w) => {
            reasons.extend(
                check_marlin_supported(w.weight_type, w.group_size, !w.symmetric(), device)
                    .err()
                    .map(Reason::from),
            );
        }
        Scheme::Fp8(_) => {
            let native = device.at_least(8, 9) && !desc.options.force_fp8_marlin;
            if native {
                reasons.push(Reason::NativeFp8 { compute: device.to_int() });
            }
            if desc.options.batch_invariant {
                reasons.push(Reason::BatchInvariance);
            }
        }
        Scheme::Block { .. } => {}
        other => {
            reasons.push(Reason::Scheme { scheme: other.label() });
            return reasons;
        }
    }
    reasons.extend(inputs(scheme, &desc.options, device));
    reasons.extend(
        check_marlin_supports_shape(
            desc.output_size_per_partition,
            desc.input_size_per_partition,
            desc.input_size,
            scheme.group_size(),
        )
        .err()
        .map(Reason::from),
    );
    reasons
}

/// Marlin runs on NVIDIA GPUs from compute capability 7.5 on.
pub(super) fn platform(device: &Capability) -> Vec<Reason> {
    if device.platform != Platform::Cuda {
        return vec![MarlinRefusal::Platform { platform: device.platform }.into()];
    }
    if !device.at_least(7, 5) {
        return vec![Reason::Device {
            device: device.to_string(),
            expected: "CUDA 7.5 or newer".to_owned(),
        }];
    }
    Vec::new()
}

/// 8-bit activations: int8 only with `uint4b8`; e4m3fn with `uint4b8` and 4-bit Microscaling
/// formats, on compute capability 8.9 or 12.0.
pub(super) fn inputs(scheme: &Scheme, options: &Options, device: &Capability) -> Option<Reason> {
    let input = options.input_type;
    if input == InputType::SixteenBit {
        return None;
    }
    let reads = match scheme {
        Scheme::Wna16(w) => w.weight_type == ScalarType::UINT4B8,
        Scheme::Block { format, .. } => format.fp8_activations && input == InputType::Fp8,
        _ => false,
    };
    if !reads {
        return Some(Reason::Inputs { weights: scheme.label(), inputs: input.name() });
    }
    let pays_off = matches!(device.to_int(), 89 | 120);
    (input == InputType::Fp8 && !pays_off).then(|| Reason::Fp8Inputs { device: device.to_string() })
}
