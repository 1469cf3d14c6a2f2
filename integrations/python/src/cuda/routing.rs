//! Routing, alignment, activation and sum.

use marlinspike::moe::ScoringFunc;
use marlinspike::moe::router::{Groups, Router};
use marlinspike_accel::AccelError;
use marlinspike_accel::ops::{
    Runs, activate_on_device, align_on_device, route_on_device, sum_on_device,
};
use pyo3::prelude::*;

use super::{Memory, Place, View};
use crate::error::{Failed, raised};
use crate::products::{activation_named, half_named};

/// Weights and ids `[M, top_k]` of logits `[M, experts]` in f32. `logits_type`: the type that they had.
#[pyfunction]
pub(crate) fn cuda_topk(
    py: Python<'_>,
    place: Place,
    logits: Memory,
    experts: usize,
    logits_type: &str,
    rule: (usize, bool, String, Option<(usize, usize)>, f32),
    bias: Option<Memory>,
    outputs: (Memory, Memory),
) -> PyResult<()> {
    let (top_k, renormalize, scoring_func, groups, routed_scaling_factor) = rule;
    let scoring_func = scoring_func.as_str();
    let scoring = ScoringFunc::NAMED.iter().find(|(name, _)| *name == scoring_func);
    let &(_, scoring) = scoring.ok_or_else(|| {
        raised(format!("scoring_func: found {scoring_func}, expected softmax or sigmoid"))
    })?;
    let plain = Router::new(scoring, top_k, renormalize);
    let logits_type =
        if logits_type == "float32" { plain.logits_type } else { half_named(logits_type)? };
    let groups =
        groups.map(|(num_expert_group, topk_group)| Groups { num_expert_group, topk_group });
    let router = Router { groups, routed_scaling_factor, logits_type, ..plain };
    py.detach(|| {
        let view = View::new(place, None)?;
        let (mut weights, mut ids) = (view.take(outputs.0), view.take(outputs.1));
        let (logits, bias) = (view.take(logits), view.optional(bias));
        let outputs = (&mut weights, &mut ids);
        route_on_device(view.device(), &router, &logits, experts, bias.as_ref(), outputs)
    })
    .failed()
}

/// Tokens in blocks of one expert. `tables`: run and, with a map, expert of each expert of all ranks; the experts of
/// this rank. Without `outputs`, only the number of entries and blocks that they must have room for.
#[pyfunction]
pub(crate) fn cuda_align(
    py: Python<'_>,
    place: Place,
    topk_ids: Memory,
    block_size: usize,
    tables: (Memory, Option<Memory>, usize),
    work: Option<(u64, u64)>,
    outputs: Option<(Memory, Memory, Memory)>,
) -> PyResult<(u64, usize, usize)> {
    py.detach(|| -> Result<_, AccelError> {
        let view = View::new(place, work)?;
        let (run_of, expert_of, experts) = tables;
        let runs = Runs::from_tables(view.take(run_of), view.optional(expert_of), experts)?;
        let mut blocks = runs.room(view.device(), topk_ids.1, block_size)?;
        let sizes = (blocks.most_entries(), blocks.most_entries() / block_size);
        if let Some((sorted, experts, total)) = outputs {
            blocks.write_to(view.take(sorted), view.take(experts), view.take(total))?;
            align_on_device(view.device(), &runs, &view.take(topk_ids), &mut blocks)?;
        }
        Ok((view.device().scratch_bytes(), sizes.0, sizes.1))
    })
    .failed()
}

/// `[M, size_i]` of `[M, width]`.
#[pyfunction]
pub(crate) fn cuda_activation(
    py: Python<'_>,
    place: Place,
    dtype: &str,
    activation: &str,
    gate_up: Memory,
    size_i: usize,
    out: Memory,
) -> PyResult<()> {
    let (dtype, definition) = (half_named(dtype)?, activation_named(activation)?);
    py.detach(|| {
        let view = View::new(place, None)?;
        let (gate_up, mut out) = (view.take(gate_up), view.take(out));
        activate_on_device(view.device(), &definition, &gate_up, dtype, size_i, &mut out)
    })
    .failed()
}

/// `[M, H]` of `[M, top_k, H]`.
#[pyfunction]
pub(crate) fn cuda_sum(
    py: Python<'_>,
    place: Place,
    dtype: &str,
    down: Memory,
    sizes: (usize, usize),
    out: Memory,
) -> PyResult<()> {
    let dtype = half_named(dtype)?;
    let (top_k, size_n) = sizes;
    py.detach(|| {
        let view = View::new(place, None)?;
        let (down, mut out) = (view.take(down), view.take(out));
        sum_on_device(view.device(), &down, dtype, top_k, size_n, None, &mut out)
    })
    .failed()
}
