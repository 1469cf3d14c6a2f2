//! Router logits to expert ids and weights.

use marlinspike::case::ScoringFunc;
use marlinspike::moe::router::{Router, Routing, token_expert_indices};
use marlinspike::scalar::ScalarType;

use super::check;
use crate::{
    device::Device,
    error::AccelError,
    nvrtc::Parameter,
    raw,
    registry::{Law, Needs, Row, lattice},
};

/// Upstream: `topk_softmax`, `topk_sigmoid`, `grouped_topk`.
pub(crate) static ROW: Row = Row {
    name: "topk_router",
    source: "topk_router",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| lattice(&[("IS_SIGMOID", &[0, 1]), ("SCORES", &[0, 1, 2])]),
};

/// Arguments that were checked: a launch with them stays inside its buffers.
#[derive(Debug)]
pub(crate) struct Args<'a> {
    pub(crate) logits: &'a [f32],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) rows: u32,
    pub(crate) experts: u32,
    pub(crate) top_k: u32,
    /// 1 without groups.
    pub(crate) num_groups: u32,
    pub(crate) topk_group: u32,
    pub(crate) renormalize: u32,
    pub(crate) factor: f32,
    pub(crate) shared_bytes: u32,
}

/// Routes every row of `logits` `[rows, experts]` on the device: the bits of [`Router::route`].
///
/// # Errors
/// [`AccelError::Argument`] for what [`Router::validate`] refuses, and for more experts than a
/// thread block's shared memory holds scores of; those of preparing and running a kernel.
pub fn topk_router(
    device: &Device,
    router: &Router<'_>,
    logits: &[f32],
    experts: usize,
) -> Result<Routing, AccelError> {
    if let Err(error) = router.validate(logits, experts) {
        return Err(AccelError::argument(&ROW, "router", error, "a router that fits its logits"));
    }
    let (num_groups, topk_group) =
        router.groups.map_or((1, 1), |groups| (groups.num_expert_group, groups.topk_group));
    // Without more than a kernel gets unasked.
    let floats = 2 * experts + num_groups;
    if floats > 10 * 1024 {
        return Err(AccelError::argument(&ROW, "experts", experts, "at most 3413"));
    }
    let scores = match (&router.groups, router.logits_type) {
        (Some(_), ScalarType::FLOAT16) => 1,
        (Some(_), ScalarType::BFLOAT16) => 2,
        _ => 0,
    };
    let is_sigmoid = u32::from(router.scoring_func == ScoringFunc::Sigmoid);
    let parameters: [Parameter; 2] = [("IS_SIGMOID", is_sigmoid), ("SCORES", scores)];
    let args = Args {
        logits,
        bias: router.bias,
        rows: check::rows(&ROW, "router_logits", logits.len(), experts)?,
        experts: check::positive(&ROW, "experts", experts)?,
        top_k: check::positive(&ROW, "top_k", router.top_k)?,
        num_groups: check::positive(&ROW, "num_expert_group", num_groups)?,
        topk_group: check::positive(&ROW, "topk_group", topk_group)?,
        renormalize: router.renormalize.into(),
        factor: router.routed_scaling_factor,
        shared_bytes: 4 * floats as u32,
    };
    let function = device.function(&ROW, &parameters)?;
    let (topk_weights, topk_ids) = raw::moe::router(device, &function, &args)?;
    let token_expert_indices = token_expert_indices(args.rows as usize, router.top_k);
    Ok(Routing { topk_weights, topk_ids, token_expert_indices })
}
