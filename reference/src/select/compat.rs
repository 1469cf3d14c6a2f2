//! Whether the Marlin kernels can run a config, and the method that a loader then selects (vLLM
//! 0.21.0 `is_gptq_marlin_compatible`, `override_quantization_method`): pure functions that return
//! the decision with its reason.

use serde_json::Value;

use super::{Capability, Platform, check_marlin_supported};
use crate::config::weight_type;
use crate::formats::integers::IntConfig;
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;

/// A yes or no with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The answer.
    pub compatible: bool,
    /// The reason.
    pub reason: String,
}

fn no(reason: impl Into<String>) -> Decision {
    Decision { compatible: false, reason: reason.into() }
}

/// `quant_method` in lower case, empty when it is absent or not a string.
fn method(config: &Value) -> String {
    config.get("quant_method").and_then(Value::as_str).unwrap_or("").to_lowercase()
}

/// The value of `key` unless null.
fn present<'a>(config: &'a Value, key: &str) -> Option<&'a Value> {
    config.get(key).filter(|v| !v.is_null())
}

fn group_size(value: &Value) -> Result<GroupSize, Decision> {
    value
        .as_i64()
        .and_then(|g| GroupSize::from_config(g).ok())
        .ok_or_else(|| no(format!("group_size {value} is neither -1 nor positive")))
}

/// Whether a GPTQ config can be run by Marlin: the platform is CUDA, `quant_method` is `gptq`,
/// `bits`, `group_size`, `sym` and `desc_act` are all present, (bits, sym) has a weight type, and
/// Marlin supports that type and group size on the device.
///
/// Release 0.21.0 also accepts CPUs, whose kernels support only 4-bit weights.
pub fn is_gptq_marlin_compatible(config: &Value, device: &Capability) -> Decision {
    if device.platform != Platform::Cuda {
        return no(format!("{} is not CUDA", device.platform));
    }
    let found = method(config);
    if found != "gptq" {
        return no(format!("quant_method is `{found}`, not `gptq`"));
    }
    let mut fields = [None; 4];
    for (slot, key) in fields.iter_mut().zip(["bits", "group_size", "sym", "desc_act"]) {
        match present(config, key) {
            None => return no(format!("`{key}` is absent")),
            value => *slot = value,
        }
    }
    let [Some(bits), Some(group), Some(sym), Some(_)] = fields else {
        return no("a required key is absent");
    };
    let pair = bits.as_i64().zip(sym.as_bool());
    let Some(ty) = pair.and_then(|(b, s)| weight_type(b, s)) else {
        return no(format!("no weight type for bits={bits}, sym={sym}"));
    };
    marlin(ty, group, false, device)
}

/// Whether a config of an integer format ([`IntConfig`]) can be run by Marlin (upstream
/// `is_awq_marlin_compatible`): `quant_method` is the format's, `bits`, `group_size` and `zero_point` are
/// present, and Marlin supports `uint4` with or without run-time zero points as `zero_point` says.
pub fn is_marlin_compatible(keys: &IntConfig, config: &Value, device: &Capability) -> Decision {
    if !matches!(device.platform, Platform::Cuda | Platform::Rocm) {
        return no(format!("{} is not CUDA-like", device.platform));
    }
    let (found, expected) = (method(config), keys.methods[0]);
    if found != expected {
        return no(format!("quant_method is `{found}`, not `{expected}`"));
    }
    let mut fields = [None; 3];
    let names = [keys.bits[0], keys.group_size[0], keys.zero_point];
    for (slot, key) in fields.iter_mut().zip(names) {
        match present(config, key) {
            None => return no(format!("`{key}` is absent")),
            value => *slot = value,
        }
    }
    let [Some(bits), Some(group), Some(zero_point)] = fields else {
        return no("a required key is absent");
    };
    if bits.as_i64() != Some(4) {
        return no(format!("bits={bits}, only 4 is read"));
    }
    marlin(ScalarType::UINT4, group, zero_point.as_bool().unwrap_or(false), device)
}

fn marlin(ty: ScalarType, group: &Value, zero_points: bool, device: &Capability) -> Decision {
    let group = match group_size(group) {
        Ok(group) => group,
        Err(decision) => return decision,
    };
    match check_marlin_supported(ty, group, zero_points, device) {
        Ok(()) => {
            Decision { compatible: true, reason: format!("Marlin reads {ty}, group_size {group}") }
        }
        Err(reason) => no(reason.to_string()),
    }
}

/// The method that a user requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UserQuant<'a> {
    /// No method: the loader decides.
    Unspecified,
    /// A method by name.
    Named(&'a str),
}

/// The method that a loader uses for a GPTQ config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Override {
    /// `Some("gptq_marlin")`, or `None` to keep the config's own method.
    pub method: Option<&'static str>,
    /// Why.
    pub reason: String,
}

/// Whether a GPTQ config runs as `gptq_marlin`: it is compatible, and the user named no method,
/// `marlin` or `gptq_marlin`.
pub fn override_quantization_method(
    config: &Value,
    user: UserQuant<'_>,
    device: &Capability,
) -> Override {
    let decision = is_gptq_marlin_compatible(config, device);
    let keep = |reason| Override { method: None, reason };
    if !decision.compatible {
        return keep(decision.reason);
    }
    match user {
        UserQuant::Unspecified | UserQuant::Named("marlin" | "gptq_marlin") => {
            Override { method: Some("gptq_marlin"), reason: decision.reason }
        }
        UserQuant::Named("gptq") => {
            keep("the config can run as gptq_marlin, but gptq was asked for explicitly".to_owned())
        }
        UserQuant::Named(other) => keep(format!("`{other}` was asked for")),
    }
}
