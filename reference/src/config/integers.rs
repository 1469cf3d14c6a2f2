//! Checkpoints of 4-bit integers with zero points and one scheme for all modules: `quant_method: awq`
//! (vLLM 0.21.0 `awq.py`, `awq_marlin.py`). The format's [`IntConfig`] has the names of the keys.

use serde_json::Value;

use super::gptq::group_size;
use super::json::Obj;
use super::modules::{SkipMatch, is_skipped};
use super::scheme::{Scheme, Wna16Scheme, ZeroPoints};
use super::{ConfigError, ConfigResult, Module, ModuleKind};
use crate::formats::int_formats;
use crate::formats::integers::{IntConfig, IntFormat};
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;

/// A quantization config of 4-bit integers with zero points.
#[derive(Debug, Clone, PartialEq)]
pub struct IntegersConfig {
    /// How the matrices are stored.
    pub format: &'static IntFormat,
    /// The method's name, as `quant_method` spells it.
    pub(super) method: &'static str,
    /// −1 or the group.
    pub group_size: GroupSize,
    /// Layout family as the file names it, in lower case.
    pub version: String,
    /// Whether the output embedding is quantized.
    pub lm_head: bool,
    /// Parts of names of unquantized modules.
    pub modules_to_not_convert: Vec<String>,
}

/// The formats with such configs.
pub(super) fn formats() -> impl Iterator<Item = (&'static IntFormat, &'static IntConfig)> {
    int_formats().filter_map(|format| Some((format, format.config?)))
}

impl IntegersConfig {
    /// Parses the config of one of [`formats`]: `quantization_config` of `config.json`, or a whole
    /// `quant_config.json` / `quantize_config.json`.
    ///
    /// Optional keys: `version`, `lm_head`, `modules_to_not_convert`.
    ///
    /// # Errors
    /// The named [`ConfigError`], also for a `version` that the format does not list.
    pub(super) fn from_value(
        (format, keys): (&'static IntFormat, &'static IntConfig),
        config: &Value,
    ) -> ConfigResult<Self> {
        let title = format.name.to_uppercase();
        let obj = Obj::new("", config)?;
        let bits = obj.int(keys.bits)?;
        let group_size = group_size(&obj, obj.int(keys.group_size)?)?;
        let zero_point = obj.bool(keys.zero_point)?;
        if bits != 4 {
            return Err(ConfigError::UnsupportedType {
                context: format!("{title} quantization_config"),
                bits,
                symmetric: !zero_point,
                expected: "bits=4 with zero points",
            });
        }
        if !zero_point {
            return Err(ConfigError::refused(
                format!("{title} without {}", keys.zero_point),
                "Marlin reads uint4 with run-time zero points only",
            ));
        }
        let (default, others) = keys.versions.split_first().unwrap_or((&"", &[]));
        let version = obj.opt_str("version")?.unwrap_or(default).to_ascii_lowercase();
        if !keys.versions.contains(&version.as_str()) {
            return Err(ConfigError::bad(
                obj.path("version"),
                format!("{version:?}"),
                format!("{default} (or {}, which are stored alike)", others.join(", ")),
            ));
        }
        Ok(Self {
            format,
            method: keys.methods[0],
            group_size,
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
            checkpoint_format: self.format,
            weight_type: ScalarType::UINT4,
            group_size: self.group_size,
            desc_act: false,
            actorder: None,
            zeros: ZeroPoints::Stored,
        }))
    }
}
