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
    memory::Buffer,
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
    check_experts(experts, router)?;
    let rows = check::rows(&ROW, "router_logits", logits.len(), experts)? as usize;
    let entries = rows * check::positive(&ROW, "top_k", router.top_k)? as usize;
    let logits = device.upload(logits)?;
    let bias = router.bias.map(|bias| device.upload(bias)).transpose()?;
    let mut topk_weights = device.zeroed::<f32>(entries)?;
    let mut topk_ids = device.zeroed::<i32>(entries)?;
    let outputs = (&mut topk_weights, &mut topk_ids);
    route_on_device(device, router, &logits, experts, bias.as_ref(), outputs)?;
    let (topk_weights, topk_ids) = (device.download(&topk_weights)?, device.download(&topk_ids)?);
    Routing::from_rows(router.top_k, topk_weights, topk_ids)
        .map_err(|error| ROW.refuse("router", error, "whole rows"))
}

/// The number of groups, of which some are chosen.
fn groups(router: &Router<'_>) -> (usize, usize) {
    router.groups.map_or((1, 1), |groups| (groups.num_expert_group, groups.topk_group))
}

/// Returns an error for more experts than the shared memory that a kernel has by default holds scores of.
fn check_experts(experts: usize, router: &Router<'_>) -> Result<u32, AccelError> {
    let floats = experts.saturating_mul(2).saturating_add(groups(router).0);
    if floats > 10 * 1024 {
        return Err(ROW.refuse("experts", experts, "at most 3413"));
    }
    // Two floats for each expert and one for each group.
    Ok(4 * floats as u32)
}

/// [`topk_router`] in the device's memory: weights and ids `[rows, top_k]`. The router's own bias is not read. A row
/// without `top_k` experts above −∞ has the id −1 for the others, and such a row or one with a NaN any weights.
///
/// # Errors
/// [`AccelError::Argument`] for a number of experts, groups or choices that does not fit, and for buffers of other
/// lengths or of another device; those of preparing and launching the kernel.
pub fn route_on_device(
    device: &Device,
    router: &Router<'_>,
    logits: &Buffer<f32>,
    experts: usize,
    bias: Option<&Buffer<f32>>,
    (topk_weights, topk_ids): (&mut Buffer<f32>, &mut Buffer<i32>),
) -> Result<(), AccelError> {
    let bias_on_device = bias.is_none_or(|bias| bias.is_on(device));
    let parts = [
        ("router_logits", logits.is_on(device)),
        ("bias", bias_on_device),
        ("topk_weights", topk_weights.is_on(device)),
        ("topk_ids", topk_ids.is_on(device)),
    ];
    check::same_device(&ROW, device, &parts)?;
    let (num_groups, topk_group) = groups(router);
    let shared_bytes = check_experts(experts, router)?;
    let rows = check::rows(&ROW, "router_logits", logits.len(), experts)?;
    let top_k = check::positive(&ROW, "top_k", router.top_k)?;
    let per_group = experts.checked_div(num_groups).unwrap_or(0);
    let divides = num_groups > 0 && experts.is_multiple_of(num_groups);
    if !divides || !(1..=num_groups).contains(&topk_group) {
        let found = format!("{topk_group} of {num_groups} groups of {experts} experts");
        return Err(ROW.refuse("groups", found, "whole groups, some of which are chosen"));
    }
    if router.top_k > topk_group * per_group {
        return Err(ROW.refuse(
            "top_k",
            router.top_k,
            format!("at most {}", topk_group * per_group),
        ));
    }
    if let Some(bias) = bias.filter(|bias| bias.len() != experts) {
        return Err(ROW.refuse("bias", bias.len(), experts));
    }
    let entries = rows as usize * top_k as usize;
    if (topk_weights.len(), topk_ids.len()) != (entries, entries) {
        let found = format!("{} weights, {} ids", topk_weights.len(), topk_ids.len());
        return Err(ROW.refuse("topk_weights, topk_ids", found, format!("[{rows}, {top_k}]")));
    }
    let scores = match (&router.groups, router.logits_type) {
        (Some(_), ScalarType::FLOAT16) => 1,
        (Some(_), ScalarType::BFLOAT16) => 2,
        _ => 0,
    };
    let is_sigmoid = u32::from(router.scoring_func == ScoringFunc::Sigmoid);
    let parameters: [Parameter; 2] = [("IS_SIGMOID", is_sigmoid), ("SCORES", scores)];
    // Logits are rows of `experts` numbers, and a bias has as many; top_k experts and topk_group groups can be chosen.
    // An empty choice has the number -1, with which the kernel reads and writes its shared memory only.
    let arguments = RouterArguments {
        logits: logits.into(),
        bias: bias.into(),
        topk_weights: topk_weights.into(),
        topk_ids: topk_ids.into(),
        experts: check::positive(&ROW, "experts", experts)?,
        top_k,
        num_groups: check::positive(&ROW, "num_expert_group", num_groups)?,
        topk_group: check::positive(&ROW, "topk_group", topk_group)?,
        renormalize: router.renormalize.into(),
        factor: router.routed_scaling_factor,
    };
    let grid = Grid { blocks: (rows, 1, 1), threads: (128, 1, 1), shared_bytes };
    KERNEL.launch(device, &parameters, grid, arguments)
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
