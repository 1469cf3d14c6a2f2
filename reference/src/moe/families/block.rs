//! What a family's block has besides its routing, by its config.

use serde_json::Value;

use super::config::{Keys, bad, family, resolve};
use super::tensors::{ExpertsRule, SharedRule};
use crate::{Error, Result};

/// What the block of `module` has besides its routing: its tensors' form, and the soft cap of its
/// logits.
///
/// # Errors
/// As [`resolve`].
pub fn block_rule(config: &Value, module: &str) -> Result<(ExpertsRule, Option<f32>)> {
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
    let Some(key) = family.logit_softcap else { return Ok((rule, None)) };
    let cap = match keys.raw(key).filter(|v| !v.is_null()) {
        None => None,
        Some(value) => {
            let cap = value.as_f64().filter(|x| x.is_finite() && *x >= 0.0);
            Some(cap.ok_or_else(|| bad(key, value, "a number that is not negative"))? as f32)
        }
    };
    Ok((rule, cap.filter(|cap| *cap > 0.0)))
}
