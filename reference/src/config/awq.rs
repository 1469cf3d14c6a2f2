//! AWQ configs (vLLM 0.21.0 `awq.py`, `awq_marlin.py`).

use serde_json::Value;

use super::gptq::group_size;
use super::json::Obj;
use super::modules::{SkipMatch, is_skipped};
use super::scheme::{Scheme, Wna16Scheme, ZeroPoints};
use super::{ConfigError, ConfigResult, Module, ModuleKind};
use crate::formats::awq;
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;

/// An AWQ quantization config.
#[derive(Debug, Clone, PartialEq)]
pub struct AwqConfig {
    /// Bits per weight: 4.
    pub bits: u32,
    /// −1 or the group.
    pub group_size: GroupSize,
    /// Whether the file has run-time zero points. Always true: without them there is no
    /// Marlin weight type for AWQ's codes.
    pub zero_point: bool,
    /// Layout family as the file names it, lower case (`gemm` when absent).
    pub version: String,
    /// Whether the output embedding is quantized.
    pub lm_head: bool,
    /// Parts of names of unquantized modules.
    pub modules_to_not_convert: Vec<String>,
}

impl AwqConfig {
    /// Parses `quantization_config` of `config.json`, or a whole `quant_config.json` /
    /// `quantize_config.json`.
    ///
    /// Keys: `bits` or `w_bit`, `group_size` or `q_group_size`, `zero_point` (required);
    /// `version`, `lm_head`, `modules_to_not_convert`.
    ///
    /// # Errors
    /// The named [`ConfigError`]. Upstream does not read `version`; the `gemv` layouts store
    /// other tensors under the same names, so they are refused here.
    pub fn from_value(config: &Value) -> ConfigResult<Self> {
        let obj = Obj::new("", config)?;
        let bits = obj.int(&["bits", "w_bit"])?;
        let group_size = group_size(&obj, obj.int(&["group_size", "q_group_size"])?)?;
        let zero_point = obj.bool("zero_point")?;
        if bits != 4 {
            return Err(ConfigError::UnsupportedType {
                context: "AWQ quantization_config".to_owned(),
                bits,
                symmetric: !zero_point,
                expected: "bits=4 with zero points",
            });
        }
        if !zero_point {
            return Err(ConfigError::refused(
                "AWQ without zero_point",
                "Marlin reads uint4 with run-time zero points only",
            ));
        }
        let version = obj.opt_str("version")?.unwrap_or("gemm").to_ascii_lowercase();
        if !matches!(version.as_str(), "gemm" | "exllama" | "ipex") {
            return Err(ConfigError::bad(
                obj.path("version"),
                format!("{version:?}"),
                "gemm (or exllama, ipex, which are stored alike)",
            ));
        }
        Ok(Self {
            bits: 4,
            group_size,
            zero_point,
            version,
            lm_head: obj.opt_bool("lm_head")?.unwrap_or(false),
            modules_to_not_convert: obj.strings("modules_to_not_convert")?,
        })
    }

    /// The scheme of one module's tensors.
    pub fn scheme_for(&self, module: &Module<'_>) -> ConfigResult<Scheme> {
        if module.kind == ModuleKind::LmHead && !self.lm_head {
            return Ok(Scheme::Unquantized { reason: "lm_head is not quantized".to_owned() });
        }
        if is_skipped(module, &self.modules_to_not_convert, SkipMatch::Substring)? {
            return Ok(Scheme::Unquantized { reason: "in modules_to_not_convert".to_owned() });
        }
        Ok(Scheme::Wna16(Wna16Scheme {
            checkpoint_format: &awq::FORMAT,
            weight_type: ScalarType::UINT4,
            group_size: self.group_size,
            desc_act: false,
            actorder: None,
            zeros: ZeroPoints::Stored,
        }))
    }
}
