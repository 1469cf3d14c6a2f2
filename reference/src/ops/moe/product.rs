//! The two products of a Mixture-of-Experts layer.
//!
//! A row of `gate_up`, `activated` and `down` is one (token, slot) pair: row
//! `token · top_k + slot`. This module judges each product from the previous stage of the case.
//! [`super::walk`] judges products with a declared schedule, or after a stage that the case lacks.

use super::MoeConfig;
use crate::judge::product::{Declared, Hints, Part, Stage, known};
use crate::judge::scheduled::Product;
use crate::judge::{OutputReport, Verdict};
use crate::moe::layer::bounds::{Int8Layer, with_integer_scales};
use crate::moe::layer::{input_global_scale, quantize_rows_by};
use crate::num::dims::Shape;
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::ops::case::Case;
use crate::ops::layer::halves;
use crate::ops::quant::source::Source;
use crate::ops::routing::stated_or_routed;
use crate::products::{Extras, Rows};
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
            if id == -1 {
                local.push(None);
                continue;
            }
            let expert = usize::try_from(id).ok().filter(|&e| e < c.num_experts);
            let Some(expert) = expert else {
                let at = [row / c.top_k, row % c.top_k];
                let expected = format!("an expert below {}, or -1", c.num_experts);
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

/// The stage that a product is judged from, if the case has it.
fn before<'c>(case: &'c Case<'c>, name: &str) -> Option<&'c Tensor<'c>> {
    if name == "gate_up" { case.inputs.get("x") } else { case.output("activated") }
}

/// Whether [`expert_product`] judges `name`: 8-bit rows need a scale, which a row with an infinity or NaN
/// does not have.
pub(crate) fn is_judged(case: &Case<'_>, c: &MoeConfig, name: &str) -> bool {
    let Some(before) = before(case, name) else { return false };
    let dtype = c.quant.dtype;
    let finite = |bits: &u16| dtype.to_f64((*bits).into()).is_finite();
    c.quant.input_dtype.is_none() || before.elements::<u16>().iter().all(finite)
}

/// Judges `gate_up` or `down` by its bound from the previous stage of the case; `None` if the case
/// lacks either, or the rows cannot be quantized. Int8 rows follow any known rule, and group scales
/// are integers or not.
pub(crate) fn expert_product(
    case: &Case<'_>,
    c: &MoeConfig,
    declared: &Declared,
    name: &'static str,
) -> Result<Option<OutputReport>> {
    if case.output(name).is_none() || !is_judged(case, c, name) {
        return Ok(None);
    }
    let mut best: Option<OutputReport> = None;
    for int8 in c.int8_layers(name == "gate_up") {
        let report = product_by(case, c, declared, (name, int8))?;
        let Some(report) = report else { continue };
        if report.verdict != Verdict::Fail {
            return Ok(Some(report));
        }
        if best.as_ref().is_none_or(|best| report.mismatches < best.mismatches) {
            best = Some(report);
        }
    }
    Ok(best)
}

/// The operands of a product, a row for each slot.
struct Operands {
    codes: Vec<u32>,
    values: Rows,
    scales: Option<Vec<f32>>,
}

impl Operands {
    fn new(
        c: &MoeConfig,
        (before, first): (&Tensor<'_>, bool),
        weights: &[Weight<'_>],
        int8: Int8Layer,
    ) -> Result<Self> {
        let cols = if first { c.hidden_size } else { c.intermediate_size };
        let how = (c.quant.input_dtype, int8.rule);
        let factor = match c.quant.input_dtype {
            Some(ScalarType::INT8) if !int8.real_scales => input_global_scale(weights),
            _ => 1.0,
        };
        let by_token = first && !c.rules.router_weight_on_x;
        let count = if by_token { c.size_m } else { c.size_m * c.top_k };
        let bits = halves(before, [count, cols])?;
        let mut rows = quantize_rows_by(&bits, c.quant.dtype, how, cols, factor)?;
        if by_token {
            rows = rows.to_slots(cols, c.top_k);
        }
        let ty = c.quant.input_dtype.unwrap_or(c.quant.dtype);
        let values = Rows::decode(ty, cols, rows.codes.iter().copied())?;
        Ok(Self { codes: rows.codes, values, scales: rows.scales })
    }
}

/// [`expert_product`] by one choice of a kernel for int8 rows.
fn product_by(
    case: &Case<'_>,
    c: &MoeConfig,
    declared: &Declared,
    (name, int8): (&'static str, Int8Layer),
) -> Result<Option<OutputReport>> {
    let first = name == "gate_up";
    let (Some(found), Some(before)) = (case.output(name), before(case, name)) else {
        return Ok(None);
    };
    let (h, i) = (c.hidden_size, c.intermediate_size);
    let (prefix, shape) = match first {
        true => ("w13_", Shape::new(h, c.w13_size_n())),
        false => ("w2_", Shape::new(i, h)),
    };
    let source = Source::new(case, &c.quant, prefix, shape);
    let stored = source.weights()?;
    let operands = Operands::new(c, (before, first), &stored, int8)?;
    let integers = match c.quant.input_dtype {
        Some(ScalarType::INT8)
            if !int8.real_scales && stored.iter().any(|w| w.scales.rows() > 1) =>
        {
            Some(with_integer_scales(&stored)?)
        }
        _ => None,
    };
    let weights = integers.as_deref().unwrap_or(&stored);
    let assignment = Assignment::new(case, c)?;
    let parts = assignment.parts(weights);
    let orders = source.orders(&stored)?;
    let is_weighted = c.weights_product(first);
    let routers = is_weighted.then_some(&assignment.weights[..]);
    let scales = operands.scales.as_deref();
    let stage = Stage {
        name,
        found,
        rows: operands.values,
        radius: None,
        parts: &parts,
        orders: orders.as_deref(),
        extras: Extras { activation_scales: scales, router_weights: routers },
        dtype: c.quant.dtype,
        input_dtype: c.quant.input_dtype,
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
    let fp8 = c.quant.input_dtype == Some(ScalarType::FLOAT8_E4M3FN);
    if !fp8 || declared.states_class() {
        return stage.judge().map(Some);
    }
    let product = Product {
        x: &operands.codes,
        input: ScalarType::FLOAT8_E4M3FN,
        dtype: c.quant.dtype,
        weights,
        expert_of: Some(&assignment.local),
        orders: orders.as_deref(),
        activation_scales: scales,
        router_weights: routers,
    };
    known::judge(stage, &product).map(Some)
}
