//! Contradictions between a config and its family: errors, and notes on differing results of other
//! engines.

use std::collections::BTreeSet;

use serde_json::Value;

use super::config::{Keys, bad};
use super::row::{ActivationRule, Family, RenormRule, Same};
use super::rule::{Renormalize, RoutingRule, Score};
use crate::Result;

/// Keys that name a scoring function in one family or another.
const SCORE_KEYS: &[&str] = &[
    "scoring_func",
    "score_func",
    "score_function",
    "moe_router_activation_func",
    "moe_router_activation",
    "expert_selection_fn",
    "router_score_function",
];

/// Keys of renormalization, and of a factor, in one family or another.
const NORM_KEYS: &[&str] =
    &["norm_topk_prob", "route_norm", "moe_renormalize", "norm_expert_weight"];
const SCALE_KEYS: &[&str] = &[
    "routed_scaling_factor",
    "route_scale",
    "router_scaling_factor",
    "moe_router_scaling_factor",
    "moe_routed_scaling_factor",
];

impl Keys<'_> {
    /// Returns an error if the config contradicts the family.
    pub(super) fn refuse_contradictions(&self, family: &Family, rule: &RoutingRule) -> Result<()> {
        for key in SCORE_KEYS {
            let Some(value) = self.peek(key).filter(|v| !v.is_null()) else { continue };
            if value.as_str() != Some(rule.scoring_func.name()) {
                let expected = format!(
                    "\"{}\", as {} has it",
                    rule.scoring_func.name(),
                    family.model_types[0]
                );
                return Err(bad(key, value, &expected));
            }
        }
        for key in NORM_KEYS {
            if let Some(value) = self.peek(key).filter(|v| !v.is_null() && !v.is_boolean()) {
                return Err(bad(key, value, "true or false"));
            }
        }
        for key in SCALE_KEYS {
            if let Some(value) = self.peek(key).filter(|v| !v.is_null() && !v.is_number()) {
                return Err(bad(key, value, "a number"));
            }
        }
        let weights = "moe_apply_router_weight_on_input";
        if let Some(value) = self.peek(weights)
            && value.as_bool() == Some(true)
            && !rule.apply_router_weight_on_input
        {
            return Err(bad(weights, value, "false"));
        }
        let kind = self.layer_kind();
        if kind.contains("hash") && rule.token_table.is_none() {
            let found = Value::from(kind);
            let expected = "a layer whose router chooses; here a table of token ids does";
            return Err(bad("mlp_layer_types", &found, expected));
        }
        for key in ["swiglu_limit", "swiglu_limits"] {
            let Some(value) = self.peek(key).and_then(|v| self.of_layer(v)) else { continue };
            let limits = value.as_f64().is_none_or(|x| x != 0.0) && !value.is_null();
            if limits && !self.read.borrow().contains(key) {
                let expected = format!("none: {} has no such limit", family.model_types[0]);
                return Err(bad(key, value, &expected));
            }
        }
        Ok(())
    }

    /// Notes on differing results of vLLM, and on routing keys that the family ignores.
    pub(super) fn notes(&self, family: &Family, rule: &RoutingRule) -> Vec<String> {
        let name = family.model_types[0];
        let mut notes = Vec::new();
        let mut compared = BTreeSet::new();
        for other in family.vllm {
            let Some(value) = self.peek(other.key) else { continue };
            let same = match other.same {
                Same::Flag(flag) => value.is_null() || value.as_bool() == Some(flag),
                Same::Number(x) => value.as_f64() == Some(x) || value.is_null(),
            };
            // A null p of DBRX means no division.
            let is_norm = matches!(rule.renormalize, Renormalize::Never) && value.is_null();
            compared.insert(other.key);
            if !same || (is_norm && matches!(family.renormalize, RenormRule::Norm(_))) {
                notes.push(format!(
                    "{name} as transformers computes it; with {}: {value} vLLM {}",
                    other.key, other.does
                ));
            }
        }
        let always = rule.renormalize != Renormalize::Never;
        let scale = f64::from(rule.routed_scaling_factor);
        let keys = NORM_KEYS.iter().map(|k| (*k, Value::from(always)));
        let keys = keys.chain(SCALE_KEYS.iter().map(|k| (*k, Value::from(scale))));
        for (key, neutral) in keys {
            let read = self.read.borrow().contains(key) || compared.contains(key);
            let Some(value) = self.peek(key).filter(|v| !v.is_null() && !read) else { continue };
            let same = match (value.as_f64(), neutral.as_f64()) {
                (Some(a), Some(b)) => a as f32 == b as f32,
                _ => *value == neutral,
            };
            if !same {
                notes.push(format!("config.json: {key}: {value} is not read by {name}"));
            }
        }
        notes.extend(self.other_notes(family, rule));
        let method = self.peek("topk_method").and_then(Value::as_str);
        if let Some(found) = method.filter(|m| *m != "noaux_tc")
            && rule.correction_bias.is_some()
        {
            notes.push(format!(
                "{name} as transformers computes it; with topk_method: {found} vLLM has no \
                 correction bias"
            ));
        }
        notes
    }

    /// Notes on groups, limits and caps that another engine or input would treat differently.
    fn other_notes(&self, family: &Family, rule: &RoutingRule) -> Vec<String> {
        let name = family.model_types[0];
        let mut notes = Vec::new();
        let groups = ["n_group", "num_expert_group"];
        let groups =
            groups.iter().find_map(|k| Some((k, self.peek(k)?.as_u64().filter(|&n| n > 1)?)));
        if let Some((key, n)) = groups.filter(|_| rule.groups.is_none()) {
            notes.push(match family.group_method {
                Some((method, _)) => format!(
                    "{name} as transformers computes it; with {key}: {n} vLLM chooses groups first, \
                     whatever {method} says"
                ),
                None => format!("config.json: {key}: {n} is not read by {name}"),
            });
        }
        let no_norm = self.peek("norm_topk_prob").and_then(Value::as_bool) == Some(false);
        if family.softmax_of_chosen && rule.scoring_func == Score::Softmax && no_norm {
            notes.push(format!(
                "{name} as transformers computes it; with norm_topk_prob: false vLLM does not \
                 renormalize"
            ));
        }
        if family.activation == ActivationRule::Step && rule.swiglu_limit.is_some_and(|l| l != 7.0)
        {
            notes.push(format!("{name} as transformers computes it; vLLM has a limit of 7 alone"));
        }
        let cap = self.peek("moe_router_logit_softcapping").and_then(Value::as_f64);
        if cap.is_some_and(|c| c > 0.0) {
            notes
                .push("router_logits are taken as they are after the router's soft cap".to_owned());
        }
        notes
    }
}
