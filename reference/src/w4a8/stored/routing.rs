//! Router and activation of a stored layer of experts.
//!
//! Version 2 of the description has `routing`, the family's rule as [`RoutingRule::to_json`] writes
//! it, and `correction_bias` and `expert_scale`, `[num_experts]` each, where the rule names them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    FAMILY_VERSION, FORMAT_VERSION, MAX_EXPERTS, MoeDescription, TABLES_VERSION, count, described,
    group_size, place, read, short, tables,
};
use crate::container::Container;
use crate::layouts::cpu::{CpuFormat, CpuTables};
use crate::layouts::{CPU_FORMATS, CPU_INT4};
use crate::moe::ScoringFunc;
use crate::moe::activation::Activation;
use crate::moe::families::{Renormalize, RouterTensors, RoutingRule, Score};
use crate::w4a8::FamilyRouting;
use crate::{Error, Result};

/// Router and activation of a stored layer.
#[derive(Debug, Clone, PartialEq)]
pub enum StoredRouting {
    /// Settings of upstream's operator.
    Operator(OperatorRouting),
    /// A family's rule with its tensors.
    Family(Box<FamilyRouting>),
}

/// Settings of upstream's operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OperatorRouting {
    /// Experts per token.
    pub top_k: usize,
    /// Logits to scores.
    pub scoring_func: ScoringFunc,
    /// Whether a token's router weights are divided by their sum.
    pub renormalize: bool,
    /// Activation between the products.
    pub activation: Activation,
    /// Whether router weights multiply the input instead of the output.
    pub router_weight_on_input: bool,
}

/// The keys of the experts' description, [`FAMILY_VERSION`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FamilyKeys {
    version: u32,
    layer: String,
    hidden_size: usize,
    intermediate_size: usize,
    num_experts: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expert_map: Option<Vec<i32>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weights: Option<String>,
    group_size: i64,
    nr: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    zero_points: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    act_order: Option<bool>,
    routing: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    correction_bias: Option<Vec<f32>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expert_scale: Option<Vec<f32>>,
}

/// The description as JSON. An f32 becomes the f64 of the same value, so its digits give it back.
pub(super) fn to_json(
    moe: &MoeDescription,
    rule: &RoutingRule,
    tensors: RouterTensors<'_>,
) -> Value {
    let is_int4 = *moe.format == CPU_INT4;
    let tables = moe.tables != CpuTables::NONE;
    serde_json::json!(FamilyKeys {
        version: match (tables, is_int4) {
            (true, _) => TABLES_VERSION,
            (false, true) => FAMILY_VERSION,
            (false, false) => FORMAT_VERSION,
        },
        layer: "moe".to_owned(),
        hidden_size: moe.hidden_size,
        intermediate_size: moe.intermediate_size,
        num_experts: moe.num_experts,
        expert_map: moe.expert_map.clone(),
        weights: (tables || !is_int4).then(|| moe.format.name.to_owned()),
        group_size: moe.group_size.to_config(),
        nr: moe.nr,
        zero_points: tables.then_some(moe.tables.zero_points),
        act_order: tables.then_some(moe.tables.act_order),
        routing: rule.to_json(),
        correction_bias: tensors.correction_bias.map(<[f32]>::to_vec),
        expert_scale: tensors.expert_scale.map(<[f32]>::to_vec),
    })
}

/// The description of the experts of `module`, [`FAMILY_VERSION`] and later; its sizes are not checked.
pub(super) fn read_family(file: &Container<'_>, module: &str) -> Result<MoeDescription> {
    let keys: FamilyKeys = read(file, module, "moe")?;
    let num_experts = count(module, "num_experts", keys.num_experts, MAX_EXPERTS)?;
    let rule = described(module, RoutingRule::from_json(&keys.routing))?;
    let tensors =
        [("correction_bias", &keys.correction_bias), ("expert_scale", &keys.expert_scale)];
    for (key, values) in tensors {
        let len = values.as_ref().map_or(num_experts, Vec::len);
        if len != num_experts {
            return Err(Error::shape(place(module, key), &[len], format!("[{num_experts}]")));
        }
    }
    let format = format(module, keys.version, keys.weights.as_deref())?;
    let stated = [keys.zero_points, keys.act_order];
    let tables = tables(module, stated, keys.version, TABLES_VERSION)?;
    let FamilyKeys { correction_bias, expert_scale, .. } = keys;
    let routing = FamilyRouting::new(rule, num_experts, correction_bias, expert_scale);
    Ok(MoeDescription {
        format,
        hidden_size: keys.hidden_size,
        intermediate_size: keys.intermediate_size,
        num_experts,
        expert_map: keys.expert_map,
        group_size: group_size(module, keys.group_size)?,
        nr: keys.nr,
        tables,
        routing: StoredRouting::Family(Box::new(described(module, routing)?)),
    })
}

/// The format that a description of this version names.
pub(super) fn format(
    module: &str,
    version: u32,
    weights: Option<&str>,
) -> Result<&'static CpuFormat> {
    let place = || place(module, "weights");
    match weights {
        None if version < FORMAT_VERSION => Ok(&CPU_INT4),
        None => Err(Error::missing(place(), format!("version {FORMAT_VERSION}"))),
        Some(found) if version < FORMAT_VERSION => {
            let expected = format!("no such key before version {FORMAT_VERSION}");
            Err(Error::value(place(), &[], short(found), expected))
        }
        Some(found) => CpuFormat::from_name(found).ok_or_else(|| {
            let known: Vec<_> = CPU_FORMATS.iter().map(|format| format.name).collect();
            let expected = format!("one of {}", known.join(", "));
            Error::value(place(), &[], short(found), expected)
        }),
    }
}

impl OperatorRouting {
    /// The same routing as a family's rule.
    pub(super) fn rule(&self) -> RoutingRule {
        let renormalize = if self.renormalize { Renormalize::SUM } else { Renormalize::Never };
        let scoring_func = match self.scoring_func {
            ScoringFunc::Sigmoid => Score::Sigmoid,
            _ => Score::Softmax,
        };
        RoutingRule {
            scoring_func,
            activation: self.activation,
            apply_router_weight_on_input: self.router_weight_on_input,
            ..RoutingRule::softmax(self.top_k, renormalize)
        }
    }
}
