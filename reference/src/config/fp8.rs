//! `quant_method: fp8` (vLLM 0.21.0 `fp8.py`).

use serde_json::Value;

use super::json::{self, Obj};
use super::modules::{SkipMatch, is_skipped};
use super::scheme::{ActivationScheme, FloatContainer, Fp8Scheme, ScaleStrategy, Scheme};
use super::{ConfigError, ConfigResult, Module, ModuleKind};

/// An FP8 checkpoint's config.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8Config {
    /// Whether activation scales are in the file.
    pub static_activations: bool,
    /// `[block_n, block_k]` of block-quantized weights.
    pub weight_block_size: Option<[usize; 2]>,
    /// Whether the scales of groups of activations are powers of two (`scale_fmt: ue8m0`).
    pub ue8m0: bool,
    /// Names of unquantized modules.
    pub ignored_layers: Vec<String>,
}

/// A block `[n, k]` of positive sizes.
pub(super) fn block(path: String, value: &Value) -> ConfigResult<[usize; 2]> {
    let bad = |found: String| {
        ConfigError::bad(path.clone(), found, "two positive 32-bit numbers [block_n, block_k]")
    };
    let Value::Array(items) = value else { return Err(bad(value_kind(value).to_owned())) };
    let [n, k] = items.as_slice() else { return Err(bad(format!("{} items", items.len()))) };
    let side = |i: usize, v: &Value| match json::int(format!("{path}[{i}]"), v)? {
        n @ 1..=0x7fff_ffff => Ok(n as usize),
        n => Err(bad(n.to_string())),
    };
    Ok([side(0, n)?, side(1, k)?])
}

fn value_kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

impl Fp8Config {
    /// Parses a `quantization_config` with `quant_method: fp8`.
    ///
    /// Keys: `activation_scheme` (`static` or `dynamic`, required), `weight_block_size`, `scale_fmt`
    /// (`ue8m0`, or `float` or absent for scales that are not rounded), `ignored_layers`, else `modules_to_not_convert`.
    ///
    /// # Errors
    /// The named [`ConfigError`]; [`ConfigError::Refused`] for blocks with static activations.
    pub fn from_value(config: &Value) -> ConfigResult<Self> {
        let obj = Obj::new("", config)?;
        let static_activations = match obj.str("activation_scheme")? {
            "static" => true,
            "dynamic" => false,
            other => {
                return Err(ConfigError::bad(
                    obj.path("activation_scheme"),
                    format!("{other:?}"),
                    "static or dynamic",
                ));
            }
        };
        let weight_block_size = obj
            .get("weight_block_size")
            .map(|v| block(obj.path("weight_block_size"), v))
            .transpose()?;
        if weight_block_size.is_some() && static_activations {
            return Err(ConfigError::refused(
                "weight_block_size with activation_scheme static",
                "block-wise weights need dynamic activations",
            ));
        }
        let ue8m0 = match obj.get("scale_fmt") {
            None => false,
            Some(_) => match obj.str("scale_fmt")? {
                "ue8m0" => true,
                "float" | "float32" => false,
                other => {
                    let (path, found) = (obj.path("scale_fmt"), format!("{other:?}"));
                    return Err(ConfigError::bad(path, found, "ue8m0 or float"));
                }
            },
        };
        let mut ignored_layers = obj.strings("ignored_layers")?;
        if ignored_layers.is_empty() {
            ignored_layers = obj.strings("modules_to_not_convert")?;
        }
        Ok(Self { static_activations, weight_block_size, ue8m0, ignored_layers })
    }

    /// The scheme of one module's tensors.
    pub fn scheme_for(&self, module: &Module<'_>) -> ConfigResult<Scheme> {
        if module.kind == ModuleKind::LmHead {
            return Ok(Scheme::Unquantized { reason: "lm_head is not quantized".to_owned() });
        }
        if is_skipped(module, &self.ignored_layers, SkipMatch::Exact)? {
            return Ok(Scheme::Unquantized { reason: "in ignored_layers".to_owned() });
        }
        let (strategy, activations) = match self.weight_block_size {
            Some([block_n, block_k]) => {
                let activations = match self.ue8m0 {
                    true => ActivationScheme::DynamicGroupUe8m0(block_k),
                    false => ActivationScheme::DynamicGroup(block_k),
                };
                (ScaleStrategy::Block { block_n, block_k }, activations)
            }
            None if self.static_activations => {
                (ScaleStrategy::Tensor, ActivationScheme::StaticTensor)
            }
            None => (ScaleStrategy::Tensor, ActivationScheme::DynamicTensor),
        };
        Ok(Scheme::Fp8(Fp8Scheme {
            container: FloatContainer::Fp8,
            strategy,
            activations,
            scale_inv: self.weight_block_size.is_some(),
        }))
    }
}
