//! `transform_config`: rotations of activations and weights (compressed-tensors `transform_args.py`).
//!
//! A rotation of weights is already in the file. One of the input or the output of a linear layer is
//! computed at run time, so a product of the stored matrix alone is wrong.

use std::sync::Arc;

use super::super::json::Obj;
use super::{Target, bounded};
use crate::config::{ConfigError, ConfigResult, Module, PatternBudget};

/// A rotation at run time.
#[derive(Debug, Clone)]
pub(super) struct Transform {
    /// The key of its scheme.
    key: String,
    /// Hadamard, random-hadamard or random-matrix.
    ty: String,
    /// What it rotates.
    location: &'static str,
    targets: Vec<Target>,
    ignore: Vec<Target>,
}

/// Locations whose rotation is in the stored weights, or outside linear layers.
const STORED: &[&str] = &["weight_input", "weight_output", "q_attn", "k_cache"];
/// Locations whose rotation is computed at run time.
const COMPUTED: &[&str] = &["input", "output"];

/// The rotations at run time of `transform_config`.
pub(super) fn read(obj: &Obj<'_>, budget: &Arc<PatternBudget>) -> ConfigResult<Vec<Transform>> {
    let mut found = Vec::new();
    let Some(config) = obj.opt_obj("transform_config")? else { return Ok(found) };
    let Some(groups) = config.opt_obj("config_groups")? else {
        return match config.entries().find(|(_, value)| !value.is_null()) {
            None => Ok(found),
            Some((key, _)) => Err(ConfigError::UnknownKey {
                key: config.path(key),
                expected: "config_groups".to_owned(),
            }),
        };
    };
    let list = |of: &Obj<'_>, key: &str| -> ConfigResult<Vec<Target>> {
        let texts = of.strings(key)?;
        bounded(of, key, texts.len())?;
        texts.iter().map(|text| Target::new(text, budget)).collect()
    };
    for (name, value) in groups.entries() {
        let scheme = Obj::new(groups.path(name), value)?;
        let ty = scheme.opt_str("type")?.unwrap_or("a transform").to_owned();
        let apply = scheme.opt_array("apply")?.unwrap_or_default();
        bounded(&scheme, "apply", apply.len())?;
        for (i, value) in apply.iter().enumerate() {
            let of = Obj::new(format!("{}[{i}]", scheme.path("apply")), value)?;
            let location = of.str("location")?.to_ascii_lowercase();
            if STORED.contains(&&*location) {
                continue;
            }
            let Some(location) = COMPUTED.iter().find(|l| **l == location) else {
                let expected = [COMPUTED, STORED].concat().join(", ");
                return Err(ConfigError::bad(of.path("location"), location, expected));
            };
            let (targets, ignore) = (list(&of, "targets")?, list(&of, "ignore")?);
            let (key, ty) = (groups.path(name), ty.clone());
            found.push(Transform { key, ty, location, targets, ignore });
        }
    }
    Ok(found)
}

/// The refusal of a module with a rotation at run time.
pub(super) fn expect_none(transforms: &[Transform], module: &Module<'_>) -> ConfigResult<()> {
    for t in transforms {
        let any = |targets: &[Target]| -> ConfigResult<bool> {
            for target in targets {
                if target.matches_name(module.name)?
                    || target.matches_class(module.kind.class_name())?
                {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        if any(&t.targets)? && !any(&t.ignore)? {
            return Err(ConfigError::refused(
                format!("`{}`: {} of its {} ({})", module.name, t.ty, t.location, t.key),
                "found a rotation at run time, expected a product of the stored matrix alone",
            ));
        }
    }
    Ok(())
}
