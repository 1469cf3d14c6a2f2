//! Router and activation of a stored layer of experts.
//!
//! Version 2 of the description has `routing`, the family's rule as [`RoutingRule::to_json`] writes
//! it, and `correction_bias` and `expert_scale`, `[num_experts]` each, where the rule names them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    FAMILY_VERSION, MAX_EXPERTS, MoeDescription, count, described, group_size, place, read,
};
use crate::container::Container;
use crate::moe::ScoringFunc;
use crate::moe::activation::Activation;
use crate::moe::families::RoutingRule;
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
    group_size: i64,
    nr: usize,
    routing: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    correction_bias: Option<Vec<f32>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expert_scale: Option<Vec<f32>>,
}

/// The description as JSON. An f32 becomes the f64 of the same value, so its digits give it back.
pub(super) fn to_json(moe: &MoeDescription, routing: &FamilyRouting) -> Value {
    let tensors = routing.tensors();
    serde_json::json!(FamilyKeys {
        version: FAMILY_VERSION,
        layer: "moe".to_owned(),
        hidden_size: moe.hidden_size,
        intermediate_size: moe.intermediate_size,
        num_experts: moe.num_experts,
        expert_map: moe.expert_map.clone(),
        group_size: moe.group_size.to_config(),
        nr: moe.nr,
        routing: routing.rule().to_json(),
        correction_bias: tensors.correction_bias.map(<[f32]>::to_vec),
        expert_scale: tensors.expert_scale.map(<[f32]>::to_vec),
    })
}

/// The description of the experts of `module`, [`FAMILY_VERSION`]; its sizes are not checked.
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
    let FamilyKeys { correction_bias, expert_scale, .. } = keys;
    let routing = FamilyRouting::new(rule, num_experts, correction_bias, expert_scale);
    Ok(MoeDescription {
        hidden_size: keys.hidden_size,
        intermediate_size: keys.intermediate_size,
        num_experts,
        expert_map: keys.expert_map,
        group_size: group_size(module, keys.group_size)?,
        nr: keys.nr,
        routing: StoredRouting::Family(Box::new(described(module, routing)?)),
    })
}
