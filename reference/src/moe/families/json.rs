//! Rules as JSON: the format of `--routing FILE` and `inspect --json`.
//!
//! | key | value | when absent |
//! | --- | --- | --- |
//! | `scoring_func` | `softmax`, `sigmoid`, `sqrtsoftplus`, `sparsemixer` | an error |
//! | `top_k` | experts per token | an error |
//! | `renormalize` | whether chosen weights are divided by their sum | an error |
//! | `renormalize_epsilon` | added to the sum | 0 |
//! | `renormalize_floor` | least divisor | none |
//! | `renormalize_p` | p-norm instead of the sum | none |
//! | `choose_by` | `score`, `logit` | `score` |
//! | `correction_bias` | tensor added for the choice, relative to the parent of `experts` | none |
//! | `n_group`, `topk_group` | groups, and groups kept | no groups |
//! | `group_score` | `top_two`, `max` | `top_two` |
//! | `masked_groups` | `excluded`, `zero` | `excluded` |
//! | `routed_scaling_factor` | factor on the weights | 1 |
//! | `expert_scale` | tensor of a factor for each expert | none |
//! | `zero_experts` | classes after the last expert, without matrices | 0 |
//! | `zero_expert_type` | `identity`, `skip` | `identity` |
//! | `shared_experts` | shared experts with logits and weights of their own | 0 |
//! | `token_table` | tensor of the experts of each token id | none |
//! | `token_groups` | groups of experts, chosen by the token's type | 1 |
//! | `router_jitter_noise` | threshold of `sparsemixer` | 0.01 |
//! | `apply_router_weight_on_input` | weights multiply the input | false |
//! | `activation` | upstream's name | `silu` |
//! | `swiglu_limit`, `swiglu_alpha` | parameters of the activation | its own |

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::rule::{
    ChooseBy, GroupRule, GroupScore, Masked, Renormalize, RoutingRule, Score, ZeroExpert,
};
use crate::moe::activation::Activation;
use crate::{Error, Result};

/// An example of a routing file for help texts.
pub const EXAMPLE: &str = r#"{"scoring_func": "sigmoid", "top_k": 8, "renormalize": true, "routed_scaling_factor": 2.5,
 "correction_bias": "gate.e_score_correction_bias"}"#;

const KEYS: &[&str] = &[
    "scoring_func",
    "top_k",
    "renormalize",
    "renormalize_epsilon",
    "renormalize_floor",
    "renormalize_p",
    "choose_by",
    "correction_bias",
    "n_group",
    "topk_group",
    "group_score",
    "masked_groups",
    "routed_scaling_factor",
    "expert_scale",
    "zero_experts",
    "zero_expert_type",
    "shared_experts",
    "token_table",
    "token_groups",
    "router_jitter_noise",
    "apply_router_weight_on_input",
    "activation",
    "swiglu_limit",
    "swiglu_alpha",
];

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stated {
    scoring_func: Score,
    top_k: usize,
    renormalize: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    renormalize_epsilon: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    renormalize_floor: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    renormalize_p: Option<f32>,
    #[serde(default)]
    choose_by: ChooseBy,
    #[serde(default)]
    correction_bias: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    n_group: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    topk_group: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    group_score: Option<GroupScore>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    masked_groups: Option<Masked>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    routed_scaling_factor: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expert_scale: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    zero_experts: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    zero_expert_type: Option<ZeroExpert>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shared_experts: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token_table: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token_groups: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    router_jitter_noise: Option<f32>,
    #[serde(default)]
    apply_router_weight_on_input: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    activation: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    swiglu_limit: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    swiglu_alpha: Option<f32>,
}

/// The known key nearest to `found`.
fn nearest(found: &str) -> Option<&'static str> {
    let near = KEYS.iter().map(|k| (strsim::damerau_levenshtein(found, k), *k)).min()?;
    (near.0 <= 1 + near.1.len() / 3).then_some(near.1)
}

impl RoutingRule {
    /// Reads a stated rule.
    ///
    /// # Errors
    /// [`Error::Size`] naming the key: unknown (with the nearest known one), missing, of another
    /// type or out of range.
    pub fn from_json(value: &Value) -> Result<Self> {
        let Some(object) = value.as_object() else {
            let shown: String = value.to_string().chars().take(60).collect();
            return Err(Error::size("routing", shown, "a JSON object"));
        };
        if let Some(key) = object.keys().find(|k| !KEYS.contains(&k.as_str())) {
            let shown: String = key.chars().take(60).collect();
            let expected = match nearest(&shown) {
                Some(near) => format!("a known key: did you mean `{near}`?"),
                None => format!("one of {}", KEYS.join(", ")),
            };
            return Err(Error::size("routing: key", format!("`{shown}`"), expected));
        }
        let stated: Stated = serde_path_to_error::deserialize(value).map_err(|e| {
            let path = e.path().to_string();
            let found = match object.get(&path) {
                Some(v) => v.to_string().chars().take(60).collect(),
                None => "an object".to_owned(),
            };
            let what = if path == "." { "routing".to_owned() } else { format!("routing: {path}") };
            Error::size(what, found, e.inner())
        })?;
        stated.rule()
    }

    /// The rule as JSON, as [`RoutingRule::from_json`] reads it.
    pub fn to_json(&self) -> Value {
        let (mut epsilon, mut floor, mut p) = (None, None, None);
        match self.renormalize {
            Renormalize::Never | Renormalize::SUM => {}
            Renormalize::SumPlus(x) => epsilon = Some(x),
            Renormalize::SumAtLeast(x) => floor = Some(x),
            Renormalize::Norm(x) => p = Some(x),
        }
        let groups = self.groups;
        let stated = Stated {
            scoring_func: self.scoring_func,
            top_k: self.top_k,
            renormalize: self.renormalize != Renormalize::Never,
            renormalize_epsilon: epsilon,
            renormalize_floor: floor,
            renormalize_p: p,
            choose_by: self.choose_by,
            correction_bias: self.correction_bias.clone(),
            n_group: groups.map(|g| g.n_group),
            topk_group: groups.map(|g| g.topk_group),
            group_score: groups.map(|g| g.group_score),
            masked_groups: groups.map(|g| g.masked),
            routed_scaling_factor: Some(self.routed_scaling_factor),
            expert_scale: self.expert_scale.clone(),
            zero_experts: (self.zero_experts > 0).then_some(self.zero_experts),
            zero_expert_type: (self.zero_expert_type != ZeroExpert::Identity)
                .then_some(self.zero_expert_type),
            shared_experts: (self.shared_experts > 0).then_some(self.shared_experts),
            token_table: self.token_table.clone(),
            token_groups: (self.token_groups > 1).then_some(self.token_groups),
            router_jitter_noise: (self.scoring_func == Score::SparseMixer).then_some(self.jitter),
            apply_router_weight_on_input: self.apply_router_weight_on_input,
            activation: Some(self.activation.name().to_owned()),
            swiglu_limit: self.swiglu_limit,
            swiglu_alpha: self.swiglu_alpha,
        };
        serde_json::to_value(stated).unwrap_or(Value::Null)
    }
}

impl Stated {
    fn rule(self) -> Result<RoutingRule> {
        let bad = |key: &str, found: String, expected: &str| {
            Err(Error::size(format!("routing: {key}"), found, expected))
        };
        let dividing = [self.renormalize_epsilon, self.renormalize_floor, self.renormalize_p];
        let renormalize = match (self.renormalize, dividing) {
            (false, [None, None, None]) => Renormalize::Never,
            (true, [None, None, None]) => Renormalize::SUM,
            (true, [Some(x), None, None]) => Renormalize::SumPlus(x),
            (true, [None, Some(x), None]) => Renormalize::SumAtLeast(x),
            (true, [None, None, Some(x)]) if x > 0.0 => Renormalize::Norm(x),
            (true, [None, None, Some(x)]) => {
                return bad("renormalize_p", x.to_string(), "a number above 0");
            }
            _ => {
                let names = ["renormalize_epsilon", "renormalize_floor", "renormalize_p"];
                let stated = names.iter().zip(dividing).filter(|(_, value)| value.is_some());
                let stated: Vec<&str> = stated.map(|(name, _)| *name).collect();
                let found = format!("{} with {}", self.renormalize, stated.join(" and "));
                return bad("renormalize", found, "true with at most one of these keys");
            }
        };
        let groups = match (self.n_group, self.topk_group) {
            (None, None) if self.group_score.is_none() && self.masked_groups.is_none() => None,
            (Some(n_group), Some(topk_group)) => Some(GroupRule {
                n_group,
                topk_group,
                group_score: self.group_score.unwrap_or_default(),
                masked: self.masked_groups.unwrap_or_default(),
            }),
            (Some(n), None) => {
                return bad("topk_group", format!("none next to n_group {n}"), "both or none");
            }
            (n, _) => {
                let found = n.map_or("none".to_owned(), |n| n.to_string());
                return bad("n_group", found, "a number next to topk_group and the keys of groups");
            }
        };
        let activation = match self.activation.as_deref() {
            None => Activation::Silu,
            Some(name) => match Activation::from_name(name) {
                Some(activation) => activation,
                None => return bad("activation", format!("{name:?}"), "upstream's name, as silu"),
            },
        };
        let rule = RoutingRule {
            scoring_func: self.scoring_func,
            top_k: self.top_k,
            choose_by: self.choose_by,
            groups,
            renormalize,
            routed_scaling_factor: self.routed_scaling_factor.unwrap_or(1.0),
            jitter: self.router_jitter_noise.unwrap_or(0.01),
            correction_bias: self.correction_bias,
            expert_scale: self.expert_scale,
            zero_experts: self.zero_experts.unwrap_or(0),
            zero_expert_type: self.zero_expert_type.unwrap_or_default(),
            shared_experts: self.shared_experts.unwrap_or(0),
            token_table: self.token_table,
            token_groups: self.token_groups.unwrap_or(1),
            apply_router_weight_on_input: self.apply_router_weight_on_input,
            activation,
            swiglu_limit: self.swiglu_limit,
            swiglu_alpha: self.swiglu_alpha,
        };
        rule.activation(false)?;
        rule.in_range()?;
        Ok(rule)
    }
}
