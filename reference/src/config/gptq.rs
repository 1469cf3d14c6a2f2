//! GPTQ configs for Marlin (vLLM 0.21.0 `gptq_marlin.py`, `utils/gptq_utils.py`).

use std::sync::Arc;

use serde_json::Value;

use super::json::{self, Obj};
use super::modules::{ListSteps, unanimous};
use super::scheme::{Scheme, Wna16Scheme, ZeroPoints};
use super::{ConfigError, ConfigResult, Module, ModuleKind, PatternBudget, PyPattern};
use crate::formats::gptq;
use crate::formats::integers::IntFormat;
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;

/// The pairs of [`weight_type`].
const TYPES: &str = "(4, true) or (8, true)";

/// Weight type of a (bits, sym) pair: upstream's `TYPE_MAP` has only symmetric 4 and 8 bits.
pub const fn weight_type(bits: i64, symmetric: bool) -> Option<ScalarType> {
    match (bits, symmetric) {
        (4, true) => Some(ScalarType::UINT4B8),
        (8, true) => Some(ScalarType::UINT8B128),
        _ => None,
    }
}

/// Quantization parameters of one module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GptqParams {
    /// Bits per weight: 4 or 8.
    pub bits: u32,
    /// −1 or the group.
    pub group_size: GroupSize,
    /// act-order; false if there is only one group.
    pub desc_act: bool,
    /// Whether zero points are the type's bias.
    pub sym: bool,
    /// `uint4b8` or `uint8b128`.
    pub weight_type: ScalarType,
}

/// What a `dynamic` rule changes; `None` keeps the base value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GptqOverride {
    /// Bits per weight.
    pub bits: Option<i64>,
    /// Group size as configured.
    pub group_size: Option<GroupSize>,
    /// act-order as configured.
    pub desc_act: Option<bool>,
    /// Symmetry.
    pub sym: Option<bool>,
}

/// One entry of `dynamic`.
#[derive(Debug, Clone)]
pub struct DynamicRule {
    pattern: PyPattern,
    /// `None` for a negative (`-:`) rule: matching modules stay unquantized.
    overrides: Option<GptqOverride>,
}

impl DynamicRule {
    /// The rule as written, prefix included.
    pub fn rule(&self) -> &str {
        self.pattern.rule()
    }

    /// What a positive rule changes; `None` when the rule is negative.
    pub fn overrides(&self) -> Option<&GptqOverride> {
        self.overrides.as_ref()
    }
}

/// The result of the `dynamic` rules for a name.
#[derive(Debug, Clone, Copy)]
pub enum DynamicMatch<'a> {
    /// No rule matches.
    None,
    /// The first matching rule is negative.
    Skip(&'a DynamicRule),
    /// The first matching rule is positive.
    Override(&'a DynamicRule, &'a GptqOverride),
}

/// A GPTQ quantization config.
#[derive(Debug, Clone)]
pub struct GptqMarlinConfig {
    /// Parameters of every module that no rule changes.
    pub base: GptqParams,
    /// `desc_act` as the file has it, before [`GptqParams::desc_act`]'s rule for one group.
    pub declared_desc_act: bool,
    /// Whether the output embedding is quantized.
    pub lm_head: bool,
    /// Per-module rules in file order; the first match wins.
    pub dynamic: Vec<DynamicRule>,
    /// Names or parts of names of quantized modules, flattened; empty when the file lists none.
    pub modules_in_block_to_quantize: Vec<String>,
    /// Set by AutoRound.
    pub autoround_version: String,
    /// Value of `checkpoint_format`: how zero points are stored.
    pub checkpoint_format: &'static IntFormat,
    /// Budget of the patterns of `dynamic`.
    budget: Arc<PatternBudget>,
}

impl GptqMarlinConfig {
    /// Parses `quantization_config` of `config.json`, or a whole `quantize_config.json`.
    ///
    /// Keys: `bits`, `group_size`, `desc_act`, `sym` (required); `lm_head`, `dynamic`,
    /// `modules_in_block_to_quantize` (a list, or a list of lists), `autoround_version`,
    /// `checkpoint_format`. Others are not read.
    ///
    /// # Errors
    /// The named [`ConfigError`]; [`ConfigError::UnsupportedType`] when (bits, sym) has no
    /// weight type, as upstream's constructor refuses it.
    pub fn from_value(config: &Value) -> ConfigResult<Self> {
        let obj = Obj::new("", config)?;
        let bits = obj.int(&["bits"])?;
        let group_size = group_size(&obj, obj.int(&["group_size"])?)?;
        let declared_desc_act = obj.bool("desc_act")?;
        let sym = obj.bool("sym")?;
        let checkpoint_format = match obj.opt_str("checkpoint_format")? {
            Some("gptq_v2") => &gptq::FORMAT_V2,
            None | Some("" | "gptq") => &gptq::FORMAT,
            Some(other) => {
                return Err(ConfigError::bad(
                    obj.path("checkpoint_format"),
                    format!("{other:?}"),
                    "gptq or gptq_v2",
                ));
            }
        };
        let budget = PatternBudget::new();
        Ok(Self {
            base: params("quantization_config", bits, group_size, declared_desc_act, sym)?,
            declared_desc_act,
            lm_head: obj.opt_bool("lm_head")?.unwrap_or(false),
            dynamic: dynamic_rules(&obj, &budget)?,
            modules_in_block_to_quantize: modules(&obj)?,
            autoround_version: obj.opt_str("autoround_version")?.unwrap_or("").to_owned(),
            checkpoint_format,
            budget,
        })
    }

    /// Replaces an empty `modules_in_block_to_quantize` by the modules that have a tensor whose
    /// element type is not f16, bf16 or f32, as upstream does from the safetensors headers.
    pub fn with_quantized_modules(mut self, modules: impl IntoIterator<Item = String>) -> Self {
        if self.modules_in_block_to_quantize.is_empty() {
            self.modules_in_block_to_quantize = modules.into_iter().collect();
        }
        self
    }

    /// The first `dynamic` rule whose pattern matches the start of `name`.
    pub fn dynamic_match(&self, name: &str) -> ConfigResult<DynamicMatch<'_>> {
        self.budget.ask(name);
        for rule in &self.dynamic {
            if rule.pattern.matches_start(name)? {
                return Ok(match &rule.overrides {
                    None => DynamicMatch::Skip(rule),
                    Some(o) => DynamicMatch::Override(rule, o),
                });
            }
        }
        Ok(DynamicMatch::None)
    }

    /// Parameters of one module, or why it stays unquantized.
    ///
    /// `modules_in_block_to_quantize` applies to linear layers; experts are always quantized
    /// (upstream `get_moe_quant_method` does not read it). An empty list means that every module is
    /// quantized.
    ///
    /// A rule that gives a module more than one group restores the file's `desc_act`: its tensors
    /// were written that way. vLLM 0.21.0 keeps the base value, which is false if the base group is
    /// −1; it also keeps true if a rule sets the group to −1, where a single group has no order.
    pub fn params_for(&self, module: &Module<'_>) -> ConfigResult<Result<GptqParams, String>> {
        if module.kind == ModuleKind::LmHead && !self.lm_head {
            return Ok(Err("lm_head is not quantized".to_owned()));
        }
        let list = &self.modules_in_block_to_quantize;
        ListSteps::new(list, module.name)?;
        let listed = list.is_empty()
            || matches!(module.kind, ModuleKind::Expert | ModuleKind::FusedMoe)
            || unanimous(module, "quantized", |name| {
                Ok(list.iter().any(|l| name.contains(l.as_str())))
            })?;
        let rule = self.dynamic_match(module.name)?;
        if let DynamicMatch::Skip(rule) = rule {
            return Ok(Err(format!("rule `{}`", rule.rule())));
        }
        if !listed {
            return Ok(Err("not in modules_in_block_to_quantize".to_owned()));
        }
        let DynamicMatch::Override(rule, o) = rule else { return Ok(Ok(self.base)) };
        params(
            rule.rule(),
            o.bits.unwrap_or(i64::from(self.base.bits)),
            o.group_size.unwrap_or(self.base.group_size),
            o.desc_act.unwrap_or(self.declared_desc_act),
            o.sym.unwrap_or(self.base.sym),
        )
        .map(Ok)
    }

    /// The scheme of one module's tensors.
    pub fn scheme_for(&self, module: &Module<'_>) -> ConfigResult<Scheme> {
        Ok(match self.params_for(module)? {
            Err(reason) => Scheme::Unquantized { reason },
            Ok(p) => Scheme::Wna16(Wna16Scheme {
                checkpoint_format: self.checkpoint_format,
                weight_type: p.weight_type,
                group_size: p.group_size,
                desc_act: p.desc_act,
                actorder: None,
                // TYPE_MAP has only symmetric types, so the file's qzeros are not read.
                zeros: ZeroPoints::Symmetric,
            }),
        })
    }
}

/// Checks one set of parameters; `context` names the config or rule.
fn params(
    context: &str,
    bits: i64,
    group_size: GroupSize,
    desc_act: bool,
    sym: bool,
) -> ConfigResult<GptqParams> {
    let Some(weight_type) = weight_type(bits, sym) else {
        return Err(ConfigError::UnsupportedType {
            context: context.to_owned(),
            bits,
            symmetric: sym,
            expected: TYPES,
        });
    };
    Ok(GptqParams {
        bits: weight_type.size_bits(),
        group_size,
        desc_act: desc_act && group_size != GroupSize::Channel,
        sym,
        weight_type,
    })
}

/// −1, or a positive number that fits a 32-bit size.
pub(super) fn group_size(obj: &Obj<'_>, value: i64) -> ConfigResult<GroupSize> {
    match value {
        -1 => Ok(GroupSize::Channel),
        1..=0x7fff_ffff => Ok(GroupSize::Of(value as usize)),
        _ => Err(ConfigError::bad(obj.path("group_size"), value, "-1 or a positive 32-bit number")),
    }
}

/// Largest number of rules and list entries: far above real files, but small enough that a hostile
/// file cannot make every lookup take minutes.
const MAX_RULES: usize = 16_384;

fn dynamic_rules(obj: &Obj<'_>, budget: &Arc<PatternBudget>) -> ConfigResult<Vec<DynamicRule>> {
    let Some(dynamic) = obj.opt_obj("dynamic")? else { return Ok(Vec::new()) };
    let count = dynamic.entries().count();
    if count > MAX_RULES {
        return Err(ConfigError::bad("dynamic", count, format!("at most {MAX_RULES} rules")));
    }
    dynamic
        .entries()
        .map(|(rule, value)| {
            if let Some(pattern) = rule.strip_prefix("-:") {
                return Ok(DynamicRule {
                    pattern: PyPattern::within(rule, pattern, budget)?,
                    overrides: None,
                });
            }
            let pattern = PyPattern::within(rule, rule.strip_prefix("+:").unwrap_or(rule), budget)?;
            let o = Obj::new(dynamic.path(rule), value)?;
            let overrides = GptqOverride {
                bits: o.opt_int(&["bits"])?,
                group_size: o.opt_int(&["group_size"])?.map(|g| group_size(&o, g)).transpose()?,
                desc_act: o.opt_bool("desc_act")?,
                sym: o.opt_bool("sym")?,
            };
            Ok(DynamicRule { pattern, overrides: Some(overrides) })
        })
        .collect()
}

/// `modules_in_block_to_quantize`: strings, or lists of strings, flattened.
fn modules(obj: &Obj<'_>) -> ConfigResult<Vec<String>> {
    const KEY: &str = "modules_in_block_to_quantize";
    let items = obj.opt_array(KEY)?.unwrap_or_default();
    let mut flat = Vec::new();
    for (i, item) in items.iter().enumerate() {
        match (item, items.first()) {
            (Value::Array(inner), Some(Value::Array(_))) => {
                let path = format!("{}[{i}]", obj.path(KEY));
                for (j, name) in inner.iter().enumerate() {
                    flat.push(json::string(path.clone(), j, name)?);
                }
            }
            (Value::String(s), Some(Value::String(_))) => flat.push(s.clone()),
            _ => {
                let expected = "an array of strings, or an array of arrays of strings";
                return Err(obj.wrong(&format!("{KEY}[{i}]"), item, expected));
            }
        }
    }
    Ok(flat)
}
