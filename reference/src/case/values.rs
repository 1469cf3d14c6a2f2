//! Values of inputs that no recomputation could use. Outputs are not looked at: a wrong output is
//! the checker's verdict, not an error.

use std::collections::BTreeMap;

use super::CaseError;
use super::config::{CaseConfig, QuantConfig};
use crate::checkpoint::{self, unflatten};
use crate::moe::families::RouterTensors;
use crate::tensor::{DType, Tensor};
use crate::{Error, Result};

/// Inputs by bare name.
pub(super) type Inputs<'a> = BTreeMap<String, Tensor<'a>>;

/// Checks the values of `inputs`, whose shapes and types are right.
pub(super) fn check(config: &CaseConfig, inputs: &Inputs<'_>) -> Result<()> {
    // The other methods know their own inputs.
    let own = matches!(config, CaseConfig::Method(_));
    for (name, tensor) in inputs.iter().filter(|_| !own) {
        let bare = name.trim_start_matches("w13_").trim_start_matches("w2_");
        match bare {
            "scales" | "weight_scale" | "weight_global_scale" => finite(tensor)?,
            // Without act-order nobody reads it.
            "g_idx" if config.quant().is_some_and(QuantConfig::has_act_order) => {
                let scales = name.replace("g_idx", "scales");
                let groups = inputs
                    .get(&scales)
                    .and_then(|s| s.shape().iter().rev().nth(1).copied())
                    .unwrap_or(0);
                in_range(tensor, 0, groups, "a group")?;
            }
            _ => {}
        }
    }
    match config {
        CaseConfig::Moe(_) => {
            if let Some(map) = inputs.get("expert_map") {
                let local = inputs.get("w13_scales").or(inputs.get("w13_weight_scale"));
                expert_map(map, local.and_then(|t| t.shape().first().copied()))?;
            }
        }
        CaseConfig::Align(c) => {
            if let Some(ids) = inputs.get("topk_ids") {
                in_range(ids, 0, c.num_experts, "an expert")?;
            }
            if let Some(map) = inputs.get("expert_map") {
                expert_map(map, None)?;
            }
        }
        CaseConfig::Router(c) => {
            if let Some(logits) = inputs.get("router_logits") {
                let [_, experts] = logits.dims2()?;
                if let Some(rule) = &c.rule {
                    let floats = |name: &str| inputs.get(name).map(|t| t.elements::<f32>());
                    let (bias, scale) = (floats("e_score_correction_bias"), floats("expert_scale"));
                    let (correction_bias, expert_scale) = (bias.as_deref(), scale.as_deref());
                    let tensors = RouterTensors { correction_bias, expert_scale };
                    return rule.validate(&[], experts, tensors);
                }
                router_sizes(c, experts)?;
                if let Some(bias) = inputs.get("e_score_correction_bias") {
                    bias.expect_shape(&[experts])?;
                }
            }
        }
        CaseConfig::Preprocess(c) => {
            if let Some(zeros) = inputs.get("qzeros") {
                let [groups, _] = zeros.dims2()?;
                if !c.size_k.is_multiple_of(groups.max(1)) {
                    let rule = format!("a number of groups that divides size_k {}", c.size_k);
                    return Err(Error::shape(zeros.name(), zeros.shape(), rule));
                }
            }
        }
        CaseConfig::Method(c) => c.check(inputs)?,
        CaseConfig::Linear(_) => {
            // With x, the scales are compared with it; without, they are taken as they are.
            if let (Some(scales), None) = (inputs.get("a_scales"), inputs.get("x")) {
                not_negative(scales)?;
            }
        }
        CaseConfig::DynQuant(_) => {}
    }
    Ok(())
}

/// A scale that is NaN or infinite makes every product with it meaningless.
pub(super) fn finite(tensor: &Tensor<'_>) -> Result<()> {
    let ty = match tensor.dtype() {
        // Where a scale is a byte, it is a power of two.
        DType::U8 => crate::scalar::ScalarType::FLOAT8_E8M0FNU,
        other => match checkpoint::float_type(other) {
            Some(ty) => ty,
            None => return Ok(()),
        },
    };
    checkpoint::expect_finite(tensor, ty)
}

/// f32 scales that everything is multiplied or divided by.
pub(super) fn positive(tensor: &Tensor<'_>) -> Result<()> {
    let values = tensor.elements::<f32>();
    match values.iter().position(|s| !(s.is_finite() && *s > 0.0)) {
        None => Ok(()),
        Some(i) => {
            let at = unflatten(tensor.shape(), i);
            Err(Error::value(tensor.name(), &at, values[i], "a positive finite scale"))
        }
    }
}

/// f32 scales that may be zero.
fn not_negative(tensor: &Tensor<'_>) -> Result<()> {
    let values = tensor.elements::<f32>();
    match values.iter().position(|s| !(s.is_finite() && *s >= 0.0)) {
        None => Ok(()),
        Some(i) => {
            let at = unflatten(tensor.shape(), i);
            Err(Error::value(tensor.name(), &at, values[i], "a finite scale of 0 or more"))
        }
    }
}

/// e4m3 block scales of a product: units read no sign, and a NaN makes everything NaN.
pub(super) fn e4m3_scales(tensor: &Tensor<'_>) -> Result<()> {
    match tensor.bytes().iter().position(|&b| b > 0x7e) {
        None => Ok(()),
        Some(i) => {
            let (at, found) = (unflatten(tensor.shape(), i), format!("{:#x}", tensor.bytes()[i]));
            Err(Error::value(tensor.name(), &at, found, "0 or more, no NaN"))
        }
    }
}

/// Global expert ids; −1 is none.
pub(super) fn expert_ids(tensor: &Tensor<'_>, num_experts: usize) -> Result<()> {
    in_range(tensor, -1, num_experts, "an expert, or -1,")
}

fn in_range(tensor: &Tensor<'_>, low: i32, high: usize, what: &str) -> Result<()> {
    let values = tensor.elements::<i32>();
    match values.iter().position(|&v| v < low || i64::from(v) >= high as i64) {
        None => Ok(()),
        Some(i) => Err(Error::value(
            tensor.name(),
            &unflatten(tensor.shape(), i),
            values[i],
            format!("{what} from {low} below {high}"),
        )),
    }
}

/// Global to local ids: −1, or each local id once, from 0 to `local` (where known) without holes.
pub(super) fn expert_map(map: &Tensor<'_>, local: Option<usize>) -> Result<()> {
    let values = map.elements::<i32>();
    let here = values.iter().filter(|&&v| v >= 0).count();
    in_range(map, -1, local.unwrap_or(here), "a local expert")?;
    let mut seen = vec![false; local.unwrap_or(here)];
    for (i, &v) in values.iter().enumerate() {
        let Ok(v) = usize::try_from(v) else { continue };
        if std::mem::replace(&mut seen[v], true) {
            return Err(Error::value(map.name(), &[i], v, "each local expert once"));
        }
    }
    match (local, seen.iter().position(|s| !s)) {
        (Some(local), Some(absent)) => {
            let found = format!("no entry {absent}");
            Err(Error::value(map.name(), &[], found, format!("all {local} local experts")))
        }
        _ => Ok(()),
    }
}

fn router_sizes(c: &super::RouterConfig, experts: usize) -> Result<()> {
    let contradiction = |key: &str, found: usize, with: String| {
        let (key, found) = (key.to_owned(), found.to_string());
        Error::from(CaseError::Contradiction { key, found, with })
    };
    if c.top_k > experts {
        let with = format!("the {experts} experts of `in.router_logits`");
        return Err(contradiction("top_k", c.top_k, with));
    }
    if let Some(g) = c.grouped {
        if !experts.is_multiple_of(g.num_expert_group) {
            let with = format!("the {experts} experts of `in.router_logits`, which it must divide");
            return Err(contradiction("num_expert_group", g.num_expert_group, with));
        }
        let reachable = g.topk_group * (experts / g.num_expert_group);
        if c.top_k > reachable {
            let with = format!("topk_group {}, which leaves {reachable} experts", g.topk_group);
            return Err(contradiction("top_k", c.top_k, with));
        }
    }
    Ok(())
}
