//! What the int4 path and its neighbours do not take.

use marlinspike::config::{ActivationScheme, ScaleStrategy, Scheme};
use marlinspike::layouts::CPU_E2M1;
use marlinspike::num::scalar::ScalarType;

use crate::model::layers::Role;

/// The reasons why the path does not take weights of `scheme`.
pub(super) fn reasons(scheme: &Scheme, role: Role) -> Vec<String> {
    let w = match scheme {
        Scheme::W4A8Int8 { .. } => return Vec::new(),
        Scheme::W8A8Int8 { .. } => return int8_reasons(scheme, role),
        Scheme::Block { format, .. }
            if format.element == CPU_E2M1.element && format.scale == ScalarType::FLOAT8_E8M0FNU =>
        {
            let found = format!("found a linear layer of {}, expected experts", scheme.label());
            return if role == Role::Dense { vec![found] } else { Vec::new() };
        }
        Scheme::W4A8Fp8 { .. } => {
            return vec!["activations: found float8_e4m3fn, expected int8".to_owned()];
        }
        Scheme::Wna16(w) => w,
        other => return vec![format!("found {}, expected integers of 4 bits", other.label())],
    };
    let mut reasons = Vec::new();
    if w.bits() != 4 {
        reasons.push(format!("weights of {} bits, expected 4", w.bits()));
    }
    reasons
}

/// The reasons why the path does not take int8 weights of `scheme`: it quantizes activations per token,
/// without zero points.
fn int8_reasons(scheme: &Scheme, role: Role) -> Vec<String> {
    let &Scheme::W8A8Int8 { strategy, activations, input_symmetric } = scheme else {
        return Vec::new();
    };
    let mut reasons = Vec::new();
    if activations != ActivationScheme::DynamicToken || !input_symmetric {
        let how = if activations == ActivationScheme::DynamicToken { "dynamic" } else { "static" };
        let zeros = if input_symmetric { "symmetric" } else { "asymmetric" };
        reasons.push(format!("activations: found {how} {zeros}, expected dynamic symmetric"));
    }
    if role != Role::Dense && strategy != ScaleStrategy::Channel {
        reasons.push(format!("experts: found {strategy:?} scales, expected one for each channel"));
    }
    reasons
}
