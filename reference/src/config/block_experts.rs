//! Checkpoints whose experts alone are quantized, to a block format: `quant_method: mxfp4` of gpt-oss
//! (vLLM 0.21.0 `mxfp4.py`).

use serde_json::Value;

use super::json::Obj;
use super::scheme::{FloatContainer, Scheme};
use super::{ConfigResult, Module, ModuleKind};
use crate::formats::BLOCK_FORMATS;
use crate::formats::blocks::BlockFormat;

/// Stacked experts in a block format, everything else unquantized.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockExpertsConfig {
    /// The experts' format.
    pub format: &'static BlockFormat,
    /// Names of unquantized modules, as the file lists them.
    pub modules_to_not_convert: Vec<String>,
}

impl BlockExpertsConfig {
    /// The format whose [`BlockFormat::expert_methods`] contain `quant_method`.
    pub fn format_of(quant_method: &str) -> Option<&'static BlockFormat> {
        BLOCK_FORMATS.into_iter().find(|format| format.expert_methods.contains(&quant_method))
    }

    /// Parses a `quantization_config` of experts in `format`.
    ///
    /// # Errors
    /// The named [`ConfigError`](super::ConfigError).
    pub fn from_value(format: &'static BlockFormat, config: &Value) -> ConfigResult<Self> {
        let obj = Obj::new("", config)?;
        Ok(Self { format, modules_to_not_convert: obj.strings("modules_to_not_convert")? })
    }

    /// The scheme of one module's tensors: only experts are quantized, regardless of the list
    /// (upstream has no linear layer of these methods and ignores the list for experts).
    pub fn scheme_for(&self, module: &Module<'_>) -> ConfigResult<Scheme> {
        Ok(match module.kind {
            ModuleKind::Expert | ModuleKind::FusedMoe => Scheme::Block {
                format: self.format,
                container: FloatContainer::StackedBlocks,
                weight_only: true,
            },
            ModuleKind::Linear | ModuleKind::LmHead => Scheme::Unquantized {
                reason: format!("{} checkpoints quantize experts alone", self.format.title()),
            },
        })
    }
}
