//! The two products of a Mixture-of-Experts layer.
//!
//! A row of `gate_up`, `activated` and `down` is one (token, slot) pair: row
//! `token · top_k + slot`. This module judges each product from the previous stage of the case.
//! [`super::walk`] judges products with a declared schedule, with 8-bit activations, or after a
//! stage that the case lacks.

use super::MoeConfig;
use crate::judge::OutputReport;
use crate::judge::product::{Declared, Hints, Part, Stage, decoded};
use crate::num::dims::Shape;
use crate::ops::case::Case;
use crate::ops::quant::source::Source;
use crate::ops::routing::stated_or_routed;
use crate::products::Extras;
use crate::weight::Weight;
use crate::{Error, Result};

/// The local expert of each row, if it is on this rank.
struct Assignment {
    local: Vec<Option<usize>>,
    /// Router weight of each row.
    weights: Vec<f32>,
    /// The global id of each local expert; empty if global and local ids are equal.
    ids: Vec<usize>,
}

impl Assignment {
    fn new(case: &Case<'_>, c: &MoeConfig) -> Result<Self> {
        let (ids, weights) = stated_or_routed(case, &c.router(), c.num_experts)?;
        let map = case.inputs.get("expert_map").map(|m| m.elements::<i32>().into_owned());
        let mut local = Vec::with_capacity(ids.len());
        for (row, &id) in ids.iter().enumerate() {
            let expert = usize::try_from(id).ok().filter(|&e| e < c.num_experts);
            let Some(expert) = expert else {
                let at = [row / c.top_k, row % c.top_k];
                let expected = format!("an expert below {}", c.num_experts);
                return Err(Error::value("out.topk_ids", &at, id, expected));
            };
            local.push(match &map {
                Some(map) => usize::try_from(map[expert]).ok(),
                None => Some(expert),
            });
        }
        let mut ids = Vec::new();
        for (expert, local) in map.iter().flatten().enumerate() {
            if let Ok(local) = usize::try_from(*local)
                && local < c.num_experts
            {
                ids.resize(ids.len().max(local + 1), 0);
                ids[local] = expert;
            }
        }
        Ok(Self { local, weights, ids })
    }

    /// The rows of each local expert.
    fn parts<'w>(&self, weights: &'w [Weight<'w>]) -> Vec<Part<'w>> {
        let mut parts: Vec<Part<'w>> = weights
            .iter()
            .enumerate()
            .map(|(e, weight)| {
                let global = self.ids.get(e).copied().unwrap_or(e);
                Part { weight, rows: Vec::new(), expert: Some(e), global }
            })
            .collect();
        for (row, local) in self.local.iter().enumerate() {
            if let Some(part) = local.and_then(|e| parts.get_mut(e)) {
                part.rows.push(row);
            }
        }
        parts
    }
}

/// Judges `gate_up` and `down` of a layer without declared schedules.
pub(super) fn judge(
    case: &Case<'_>,
    c: &MoeConfig,
    declared: &Declared,
) -> Result<Vec<OutputReport>> {
    let mut reports = Vec::new();
    for (name, schedule) in [("gate_up", &c.schedule_w13), ("down", &c.schedule_w2)] {
        if schedule.is_none() {
            reports.extend(expert_product(case, c, declared, name)?);
        }
    }
    Ok(reports)
}

/// Judges `gate_up` or `down` by its bound from the previous stage of the case; `None` if the case
/// lacks either, or activations are 8-bit.
pub(crate) fn expert_product(
    case: &Case<'_>,
    c: &MoeConfig,
    declared: &Declared,
    name: &'static str,
) -> Result<Option<OutputReport>> {
    let first = name == "gate_up";
    let before = if first { Some(case.input("x")?) } else { case.output("activated") };
    let (Some(found), Some(before), None) = (case.output(name), before, c.quant.input_dtype) else {
        return Ok(None);
    };
    let mut rows = decoded(before)?;
    if first {
        let tokens: Vec<usize> = (0..c.size_m * c.top_k).map(|row| row / c.top_k).collect();
        let missing = || Error::size("rows of x", rows.rows(), c.size_m);
        rows = rows.select(&tokens).ok_or_else(missing)?;
    }
    let (h, i) = (c.hidden_size, c.intermediate_size);
    let (prefix, shape) = match first {
        true => ("w13_", Shape::new(h, c.w13_size_n())),
        false => ("w2_", Shape::new(i, h)),
    };
    let source = Source::new(case, &c.quant, prefix, shape);
    let weights = source.weights()?;
    let assignment = Assignment::new(case, c)?;
    let parts = assignment.parts(&weights);
    let orders = source.orders(&weights)?;
    let routers = (c.apply_router_weight_on_input == first).then_some(&assignment.weights[..]);
    let stage = Stage {
        name,
        found,
        rows,
        radius: None,
        parts: &parts,
        orders: orders.as_deref(),
        extras: Extras { activation_scales: None, router_weights: routers },
        dtype: c.quant.dtype,
        input_dtype: None,
        declared,
        top_k: Some(c.top_k),
        hints: Hints {
            router_weights: Some(&assignment.weights),
            tensor_parallel: c.quant.tensor_parallel.filter(|_| !first),
            unused_g_idx: None,
            is_gated: c.activation.is_gated(),
            is_unpermuted: false,
            mistaken: None,
        },
    };
    stage.judge().map(Some)
}
