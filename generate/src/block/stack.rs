//! Experts, by the arithmetic of their products.

use std::fmt::Debug;

use marlinspike::moe::layer::Routed;
use marlinspike::w4a8::moe::ExpertLayer;

use super::{Mlp, PROJECTIONS, Workspaces, rows, rows_mut};
use crate::config::Config;
use crate::error::Result;
use crate::ops::add_piece;
use crate::weights::Weights;

/// The experts of a layer.
pub(super) trait ExpertStack: Debug + Send + Sync {
    /// Overwrites `out` `[M, H]`: each row of `x` `[M, H]` through its experts, weighted and added. A row's
    /// bits may depend only on the row and its routing.
    fn forward(
        &self,
        x: &[f32],
        routed: Routed<'_>,
        out: &mut [f32],
        w: &mut Workspaces,
    ) -> Result<()>;
}

/// Packed experts, by the int4 path's kernels or those of another format.
impl ExpertStack for Box<dyn ExpertLayer + '_> {
    fn forward(
        &self,
        x: &[f32],
        routed: Routed<'_>,
        out: &mut [f32],
        w: &mut Workspaces,
    ) -> Result<()> {
        let hidden = self.hidden_size();
        let (x, out) = (rows(x, hidden), rows_mut(out, hidden));
        Ok(self.as_ref().forward_routed(x.into(), routed, &mut w.experts, out.into())?)
    }
}

/// Experts that are not quantized, each with three matrices.
#[derive(Debug)]
pub(super) struct MlpExperts<'f> {
    experts: Vec<Mlp<'f>>,
}

impl<'f> MlpExperts<'f> {
    pub(super) fn load(
        weights: &Weights<'_, 'f>,
        config: &Config,
        module: &str,
        num_experts: usize,
    ) -> Result<Self> {
        let names = match weights.has(&format!("{module}.0.w1.weight")) {
            true => ["w1", "w3", "w2"],
            false => PROJECTIONS,
        };
        let first = weights.model().entry(&format!("{module}.0.{}.weight", names[0]));
        let width = first.and_then(|entry| entry.shape().first().copied()).filter(|&n| n > 0);
        let width = width.unwrap_or(config.intermediate_size);
        let expert = |e| {
            let prefix = format!("{module}.{e}");
            Mlp::load(weights, (&prefix, names), (config.hidden_size, width))
        };
        Ok(Self { experts: (0..num_experts).map(expert).collect::<Result<_>>()? })
    }
}

impl ExpertStack for MlpExperts<'_> {
    fn forward(
        &self,
        x: &[f32],
        routed: Routed<'_>,
        out: &mut [f32],
        w: &mut Workspaces,
    ) -> Result<()> {
        let expert = |e: usize, x: &[f32], down: &mut Vec<f32>| self.experts[e].forward(x, down, w);
        each_expert(self.experts.len(), x, routed, out, expert)
    }
}

/// Adds each token's weighted rows in the order of the experts, from zero. `expert` computes the rows
/// of one expert.
pub(super) fn each_expert(
    num_experts: usize,
    x: &[f32],
    routed: Routed<'_>,
    out: &mut [f32],
    mut expert: impl FnMut(usize, &[f32], &mut Vec<f32>) -> Result<()>,
) -> Result<()> {
    let (ids, weights) = (routed.topk_ids(), routed.topk_weights());
    let hidden = x.len() / ids.nrows();
    let mut slots: Vec<Vec<(usize, f32)>> = vec![Vec::new(); num_experts];
    for ((token, _), (&id, &weight)) in ids.indexed_iter().map(|(at, id)| (at, (id, &weights[at])))
    {
        slots[id as usize].push((token, weight));
    }
    let (mut input, mut down) = (Vec::new(), Vec::new());
    out.fill(0.0);
    for (e, slots) in slots.iter().enumerate().filter(|(_, slots)| !slots.is_empty()) {
        input.clear();
        slots.iter().for_each(|(token, _)| input.extend_from_slice(&x[token * hidden..][..hidden]));
        expert(e, &input, &mut down)?;
        for (&(token, weight), row) in slots.iter().zip(down.chunks_exact_mut(hidden)) {
            row.iter_mut().for_each(|y| *y *= weight);
            add_piece(&mut out[token * hidden..][..hidden], row);
        }
    }
    Ok(())
}
