//! What a family's block has besides its routing, by its config.

use std::collections::BTreeMap;

use serde_json::Value;

use super::config::{Keys, bad, family, resolve};
use super::key::Key;
use super::stage_rules::StageRule;
use super::tensors::{ExpertsRule, SharedRule};
use crate::{Error, Result};

/// Numbers of a block that its config states.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct BlockNumbers {
    /// c of the logits' soft cap c · tanh(l / c).
    pub logit_softcap: Option<f32>,
    /// Factor on the logits.
    pub logit_multiplier: Option<f32>,
    /// c of the gate's soft cap; the sigmoid sees the gate without it.
    pub gate_softcap: Option<f32>,
    /// c of the soft cap of up.
    pub up_softcap: Option<f32>,
    eps: BTreeMap<&'static str, f32>,
}

impl BlockNumbers {
    /// ε of a norm by its key.
    pub fn eps(&self, key: &Key<f32>) -> f32 {
        self.eps.get(key.keys[0]).copied().or(key.default).unwrap_or_default()
    }
}

/// What the block of `module` has besides its routing: the form of its tensors, and its numbers.
///
/// # Errors
/// As [`resolve`].
pub fn block_rule(config: &Value, module: &str) -> Result<(ExpertsRule, BlockNumbers)> {
    let resolved = resolve(config, module)?;
    let keys = Keys::new(config, module);
    let Some(family) = family(&resolved.model_type) else {
        return Err(Error::unsupported(resolved.model_type, "the family is not known"));
    };
    let mut rule = family.experts;
    rule.shared = match rule.shared {
        SharedRule::Step(_) => {
            let limit = keys.peek("swiglu_limits_shared").and_then(|list| keys.of_layer(list));
            let limit = limit.and_then(Value::as_f64).filter(|limit| *limit > 0.0);
            limit.map_or(SharedRule::Plain, |limit| SharedRule::Step(Some(limit as f32)))
        }
        SharedRule::Averaged => match keys.text("shared_expert_combination_strategy")? {
            None | Some("average") => SharedRule::Averaged,
            Some("sum") => SharedRule::Same,
            Some(other) => {
                let key = "shared_expert_combination_strategy";
                return Err(bad(key, &Value::from(other), "average or sum"));
            }
        },
        other => other,
    };
    let mut numbers = BlockNumbers {
        logit_multiplier: rule.logit_multiplier.map(|key| keys.number(&key)).transpose()?,
        ..BlockNumbers::default()
    };
    if let Some([gate, up]) = rule.softcaps {
        numbers.gate_softcap = Some(keys.number(&gate)?);
        numbers.up_softcap = Some(keys.number(&up)?);
    }
    for stage in rule.stages.iter().flat_map(|(_, stages)| *stages) {
        if let StageRule::Norm { eps, .. } = stage {
            numbers.eps.insert(eps.keys[0], keys.number(eps)?);
        }
    }
    let Some(key) = family.logit_softcap else { return Ok((rule, numbers)) };
    let cap = match keys.raw(key).filter(|v| !v.is_null()) {
        None => None,
        Some(value) => {
            let cap = value.as_f64().filter(|x| x.is_finite() && *x >= 0.0);
            Some(cap.ok_or_else(|| bad(key, value, "a number that is not negative"))? as f32)
        }
    };
    numbers.logit_softcap = cap.filter(|cap| *cap > 0.0);
    Ok((rule, numbers))
}
