//! Quantization configs as found in model folders.
//!
//! [`QuantConfig::from_model_config`] reads `config.json` and selects the family by `quant_method`;
//! [`QuantConfig::scheme_for`] then returns the storage scheme of one module's tensors. Configs are
//! untrusted: every defect gives a [`ConfigError`] with the path of the key, and patterns are
//! bounded in size and steps, individually and together ([`PatternBudget`]).

mod block_experts;
mod ct;
mod error;
mod fp8;
mod gptq;
mod integers;
mod json;
mod limits;
mod modelopt;
mod modules;
mod pattern;
mod scheme;

use serde_json::Value;

pub use block_experts::BlockExpertsConfig;
pub use ct::{CompressedTensorsConfig, CtArgs, CtDynamic, CtFormat, CtScheme, CtStrategy, CtType};
pub use error::{ConfigError, ConfigResult};
pub use fp8::Fp8Config;
pub use gptq::{
    DynamicMatch, DynamicRule, GptqMarlinConfig, GptqOverride, GptqParams, weight_type,
};
pub use integers::IntegersConfig;
pub use limits::{
    BASE_STEPS, MAX_LIST_STEPS, MAX_PATTERN, MAX_PROGRAM, MAX_PROGRAMS, MAX_STEPS, STEPS_PER_BYTE,
};
pub use modelopt::{ModelOptAlgo, ModelOptConfig, wildcard};
pub use modules::{FusedMapping, Module, ModuleKind};
pub use pattern::{PatternBudget, PyPattern};
pub use scheme::{
    ActOrder, ActivationScheme, FloatContainer, Fp8Scheme, ScaleStrategy, Scheme, Wna16Scheme,
    ZeroPoints,
};

use crate::formats::BLOCK_FORMATS;
use json::Obj;

/// A quantization config of one of the known families.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum QuantConfig {
    /// `quant_method: gptq`.
    Gptq(GptqMarlinConfig),
    /// A `quant_method` of integers with one scheme for all modules: `awq`.
    Integers(IntegersConfig),
    /// `quant_method: compressed-tensors`.
    CompressedTensors(CompressedTensorsConfig),
    /// `quant_method: fp8`.
    Fp8(Fp8Config),
    /// `quant_method: modelopt` and its variants.
    ModelOpt(ModelOptConfig),
    /// A `quant_method` of a block format's experts: `mxfp4` (gpt-oss).
    BlockExperts(BlockExpertsConfig),
}

/// ModelOpt's names for block formats.
fn modelopt_blocks() -> impl Iterator<Item = &'static str> {
    BLOCK_FORMATS.into_iter().filter_map(|format| format.quant_method)
}

/// Every `quant_method` that is read.
fn methods() -> String {
    let integers = integers::formats().flat_map(|(_, keys)| keys.methods.iter().copied());
    let others = ["compressed-tensors", "fp8"];
    let modelopt = std::iter::once("modelopt").chain(modelopt_blocks());
    let experts =
        BLOCK_FORMATS.into_iter().flat_map(|format| format.expert_methods.iter().copied());
    let all = ["gptq", "gptq_marlin"].into_iter().chain(integers).chain(others);
    all.chain(modelopt).chain(experts).collect::<Vec<_>>().join(", ")
}

/// Levels of configs of parts of a model that are searched.
const NESTED: usize = 3;

/// The quantization config that one object states.
fn stated<'v>(obj: &Obj<'v>) -> Option<&'v Value> {
    ["quantization_config", "compression_config"].into_iter().find_map(|key| obj.get(key))
}

/// The quantization configs below `obj`, in the configs of a model's parts (`llm_config`,
/// `thinker_config`), with the keys of those.
fn nested<'v>(obj: &Obj<'v>, levels: usize, found: &mut Vec<(String, &'v Value)>) {
    let is_part = |key: &str| key.ends_with("_config") && !key.starts_with("quant");
    for (key, value) in obj.entries().filter(|(key, _)| is_part(key)) {
        let Ok(part) = Obj::new(obj.path(key), value) else { continue };
        found.extend(stated(&part).map(|value| (part.path("quantization_config"), value)));
        if levels > 1 {
            nested(&part, levels - 1, found);
        }
    }
}

impl QuantConfig {
    /// The quantization config inside a `config.json`: `quantization_config`, otherwise
    /// `compression_config`, at the top level, inside `text_config`, or inside another config of a part
    /// (`llm_config`, `thinker_config.text_config`); `None` without any.
    ///
    /// # Errors
    /// The named [`ConfigError`].
    pub fn from_model_config(config: &Value) -> ConfigResult<Option<Self>> {
        let root = Obj::new("config.json", config)?;
        let text = root.opt_obj("text_config")?;
        let below = root.clone();
        for obj in [Some(root), text].into_iter().flatten() {
            if let Some(found) = stated(&obj) {
                return Self::from_value(found).map(Some);
            }
        }
        let mut found = Vec::new();
        nested(&below, NESTED, &mut found);
        let Some((first, value)) = found.first() else { return Ok(None) };
        if let Some((other, _)) = found.iter().find(|(_, other)| other != value) {
            return Err(ConfigError::Conflict {
                subject: "quantization_config".to_owned(),
                reason: format!("`{first}` and `{other}` state different ones"),
            });
        }
        Self::from_value(value).map(Some)
    }

    /// A quantization config on its own: the value of `quantization_config`, or a whole
    /// `quantize_config.json`, `quant_config.json` or `hf_quant_config.json`.
    ///
    /// Files on their own may lack `quant_method`; then `quantization` means ModelOpt,
    /// `config_groups` compressed-tensors, [`IntConfig::zero_point`](crate::formats::integers::IntConfig)
    /// its format and `desc_act` GPTQ.
    ///
    /// # Errors
    /// The named [`ConfigError`].
    pub fn from_value(config: &Value) -> ConfigResult<Self> {
        let obj = Obj::new("", config)?;
        let has = |key: &str| obj.get(key).is_some();
        let marked = || integers::formats().find(|(_, keys)| has(keys.zero_point));
        let method = match obj.opt_str("quant_method")? {
            Some(method) => method.to_ascii_lowercase(),
            None if has("quantization") => "modelopt".to_owned(),
            None if has("config_groups") => "compressed-tensors".to_owned(),
            None => match marked() {
                Some((_, keys)) => keys.methods[0].to_owned(),
                None if has("desc_act") => "gptq".to_owned(),
                None => return Err(ConfigError::MissingKey { key: "quant_method".to_owned() }),
            },
        };
        match method.as_str() {
            "gptq" | "gptq_marlin" => GptqMarlinConfig::from_value(config).map(Self::Gptq),
            "compressed-tensors" | "compressed_tensors" => {
                CompressedTensorsConfig::from_value(config).map(Self::CompressedTensors)
            }
            "fp8" => Fp8Config::from_value(config).map(Self::Fp8),
            name if name == "modelopt" || modelopt_blocks().any(|m| m == name) => {
                ModelOptConfig::from_value(config).map(Self::ModelOpt)
            }
            name => Self::of_format(name, config),
        }
    }

    /// [`Self::from_value`] for the methods that a format names.
    fn of_format(method: &str, config: &Value) -> ConfigResult<Self> {
        if let Some(of) = integers::formats().find(|(_, keys)| keys.methods.contains(&method)) {
            return IntegersConfig::from_value(of, config).map(Self::Integers);
        }
        match BlockExpertsConfig::format_of(method) {
            Some(format) => BlockExpertsConfig::from_value(format, config).map(Self::BlockExperts),
            None => Err(ConfigError::UnknownMethod {
                method: method.chars().take(60).collect(),
                expected: methods(),
            }),
        }
    }

    /// The family's name, as `quant_method` spells it.
    pub const fn method(&self) -> &'static str {
        match self {
            Self::Gptq(_) => "gptq",
            Self::Integers(c) => c.method,
            Self::CompressedTensors(_) => "compressed-tensors",
            Self::Fp8(_) => "fp8",
            Self::ModelOpt(_) => "modelopt",
            Self::BlockExperts(c) => c.format.expert_methods[0],
        }
    }

    /// How the tensors of `module`, a linear layer under its checkpoint name
    /// (`model.layers.0.mlp.experts.3.up_proj`), are stored.
    ///
    /// Use it for linear layers only: a config that quantizes "every linear layer" does not state
    /// which modules are norms or embeddings.
    ///
    /// # Errors
    /// The named [`ConfigError`].
    pub fn scheme_for(&self, module: &str) -> ConfigResult<Scheme> {
        self.scheme_of(&Module::in_checkpoint(module))
    }

    /// [`Self::scheme_for`] with the kind of layer and the fused layers spelled out.
    ///
    /// # Errors
    /// The named [`ConfigError`].
    pub fn scheme_of(&self, module: &Module<'_>) -> ConfigResult<Scheme> {
        match self {
            Self::Gptq(c) => c.scheme_for(module),
            Self::Integers(c) => c.scheme_for(module),
            Self::CompressedTensors(c) => c.scheme_for(module),
            Self::Fp8(c) => c.scheme_for(module),
            Self::ModelOpt(c) => c.scheme_for(module),
            Self::BlockExperts(c) => c.scheme_for(module),
        }
    }
}
