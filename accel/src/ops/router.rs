//! Router logits to expert ids and weights.

use marlinspike::case::ScoringFunc;
use marlinspike::moe::router::{Router, Routing};
use marlinspike::num::array::rows_of;
use marlinspike::num::scalar::ScalarType;

use super::check;
use crate::{
    call::Call,
    device::Device,
    error::AccelError,
    launch::{Arguments, Grid, Kernel, Pointer, arguments},
    nvrtc::Parameter,
    operation::{Law, Mutant, Needs, Row, lattice},
};

/// Upstream: `topk_softmax`, `topk_sigmoid`, `grouped_topk`.
pub(crate) static ROW: Row = Row {
    name: "topk_router",
    source: "topk_router",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| Ok(lattice(&[("IS_SIGMOID", &[0, 1]), ("SCORES", &[0, 1, 2])])),
    arguments: RouterArguments::SIZES,
    mutants: &[Mutant::new("of equal experts the higher id", "other_id < id", "other_id > id")],
};

static KERNEL: Kernel<RouterArguments> = Kernel::new(&ROW);

arguments! {
    /// Arguments of `topk_router.cu`.
    RouterArguments {
        logits: Pointer,
        bias: Pointer,
        topk_weights: Pointer,
        topk_ids: Pointer,
        experts: u32,
        top_k: u32,
        num_groups: u32,
        topk_group: u32,
        renormalize: u32,
        factor: f32,
    }
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
    let rows = rows_of("router_logits", logits, experts);
    if let Err(error) = rows.and_then(|logits| router.validate(logits)) {
        return Err(ROW.refuse("router", error, "a router that fits its logits"));
    }
    let (num_groups, topk_group) =
        router.groups.map_or((1, 1), |groups| (groups.num_expert_group, groups.topk_group));
    // Limited to the shared memory that a kernel has by default.
    let floats = 2 * experts + num_groups;
    if floats > 10 * 1024 {
        return Err(ROW.refuse("experts", experts, "at most 3413"));
    }
    let scores = match (&router.groups, router.logits_type) {
        (Some(_), ScalarType::FLOAT16) => 1,
        (Some(_), ScalarType::BFLOAT16) => 2,
        _ => 0,
    };
    let is_sigmoid = u32::from(router.scoring_func == ScoringFunc::Sigmoid);
    let parameters: [Parameter; 2] = [("IS_SIGMOID", is_sigmoid), ("SCORES", scores)];
    let rows = check::rows(&ROW, "router_logits", logits.len(), experts)?;
    let top_k = check::positive(&ROW, "top_k", router.top_k)?;
    let entries = rows as usize * top_k as usize;
    let logits = device.upload(logits)?;
    let bias = router.bias.map(|bias| device.upload(bias)).transpose()?;
    let mut topk_weights = device.zeroed::<f32>(entries)?;
    let mut topk_ids = device.zeroed::<i32>(entries)?;
    // Logits are rows of `experts` numbers, finite or -inf, and a bias has as many finite ones; top_k experts and
    // topk_group groups can be chosen, so that no choice is empty (`Router::validate`).
    let arguments = RouterArguments {
        logits: (&logits).into(),
        bias: bias.as_ref().into(),
        topk_weights: (&mut topk_weights).into(),
        topk_ids: (&mut topk_ids).into(),
        experts: check::positive(&ROW, "experts", experts)?,
        top_k,
        num_groups: check::positive(&ROW, "num_expert_group", num_groups)?,
        topk_group: check::positive(&ROW, "topk_group", topk_group)?,
        renormalize: router.renormalize.into(),
        factor: router.routed_scaling_factor,
    };
    // Two floats for each expert and one for each group.
    let shared_bytes = 4 * floats as u32;
    let grid = Grid { blocks: (rows, 1, 1), threads: (128, 1, 1), shared_bytes };
    KERNEL.launch(device, &parameters, grid, arguments)?;
    let (topk_weights, topk_ids) = (device.download(&topk_weights)?, device.download(&topk_ids)?);
    Routing::from_rows(router.top_k, topk_weights, topk_ids)
        .map_err(|error| ROW.refuse("router", error, "whole rows"))
}

/// [`topk_router`].
#[derive(Debug, Clone, Copy)]
pub struct Route<'a> {
    /// The router.
    pub router: &'a Router<'a>,
    /// `[rows, experts]`.
    pub logits: &'a [f32],
    /// Columns of the logits.
    pub experts: usize,
}

impl Call for Route<'_> {
    type Output = Routing;

    fn row(&self) -> &'static Row {
        &ROW
    }

    fn on_device(&self, device: &Device) -> Result<Routing, AccelError> {
        topk_router(device, self.router, self.logits, self.experts)
    }

    fn by_reference(&self) -> marlinspike::Result<Routing> {
        self.router.route(rows_of("router_logits", self.logits, self.experts)?)
    }
}
