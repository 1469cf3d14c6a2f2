//! Generated cases of layers: random inputs, and outputs by the canonical arithmetic.

use super::MoeConfig;
use crate::layers::{ExpertPlacement, determine_expert_map};
use crate::moe::align::{Absent, Align};
use crate::moe::layer::{Arithmetic, Layer, Routed, Stages};
use crate::moe::sum::sum_bits_with;
use crate::num::array::{FloatView2, HalfArray2, rows_of};
use crate::num::dims::Shape;
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::draw::{ROWS, Rng, activations};
use crate::ops::layer::shared_output;
use crate::ops::layer_rules::Prescale;
use crate::ops::quant::stack::{Stack, add_halves, defined};
use crate::ops::quant::values::whole_k;
use crate::ops::quant::{states_factor, weight};
use crate::ops::router::logits;
use crate::products::schedule::ScheduleChoice;
use crate::weight::{Groups, Weight};
use crate::{Result, act_order};

/// Adds random inputs to an empty case, and every output.
pub(super) fn case(config: &MoeConfig, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
    let c = MoeConfig { size_m: rng.pick(&ROWS), ..config.clone() };
    case.config = c.clone().into();
    let (h, i) = (c.hidden_size, c.intermediate_size);
    let experts =
        determine_expert_map(c.ep_size, c.ep_rank, c.num_experts, ExpertPlacement::Linear)?;
    let mut stack = |prefix, shape: Shape, whole_k: usize| -> Result<Vec<Weight<'static>>> {
        let name = |e| format!("{}[{e}]", str::trim_end_matches(prefix, '_'));
        (0..experts.local_num_experts)
            .map(|e| weight(rng, &name(e), &c.quant, shape, whole_k))
            .collect()
    };
    // w13 is cut along N, w2 along K.
    let (s13, s2) = (Shape::new(h, c.w13_size_n()), Shape::new(i, h));
    let w13 = stack("w13_", s13, h)?;
    let w2 = stack("w2_", s2, whole_k(&c.quant, i))?;
    case.add_input("x", activations(rng, c.quant.dtype, c.size_m, h)?);
    case.add_input("router_logits", logits(rng, DType::F32, c.size_m, c.num_experts)?);
    if let Some(map) = experts.map {
        case.add_input("expert_map", Tensor::from_vec("", DType::I32, vec![map.len()], map)?);
    }
    let w13 = Stack { prefix: "w13_", quant: &c.quant, shape: s13, weights: w13 };
    let w2 = Stack { prefix: "w2_", quant: &c.quant, shape: s2, weights: w2 };
    w13.add_inputs(case)?;
    w2.add_inputs(case)?;
    let factors = [w13.add_outputs(case)?, w2.add_outputs(case)?]
        .map(|p| states_factor(&c.quant).then_some(f64::from(p.scale_factor)));
    let defined = add_stages(case, &c, &w13.weights, &w2.weights)?;
    let schedule = defined.then_some(ScheduleChoice::Canonical);
    case.config = MoeConfig {
        scale_factor_w13: factors[0],
        scale_factor_w2: factors[1],
        schedule_w13: schedule.clone(),
        schedule_w2: schedule,
        ..c
    }
    .into();
    Ok(())
}

/// Adds routing, aligned tokens and all stages of a layer. Returns whether there are stages.
pub(super) fn add_stages(
    case: &mut Case<'_>,
    c: &MoeConfig,
    w13: &[Weight<'static>],
    w2: &[Weight<'static>],
) -> Result<bool> {
    let logits = case.input("router_logits")?.elements::<f32>().into_owned();
    let x = case.input("x")?.elements::<u16>().into_owned();
    let map = case.inputs.get("expert_map").map(|m| m.elements::<i32>().into_owned());
    let routing = c.router().route(rows_of("router_logits", &logits, c.num_experts)?)?;
    let align = Align {
        block_size: c.block_size_m,
        num_experts: c.num_experts,
        expert_map: map.as_deref(),
        absent: Absent::Ignore,
    };
    let routed = routing.routed()?;
    let aligned = align.run(routed.ids())?;
    let orders = [stable(w13), stable(w2)];
    let layer = Layer {
        w13,
        w2,
        orders: [orders[0].as_deref(), orders[1].as_deref()],
        num_experts: c.num_experts,
        expert_map: map.as_deref(),
        activation: c.definition(),
        dtype: c.quant.dtype,
        input_dtype: c.quant.input_dtype,
        router_weight_on_input: c.apply_router_weight_on_input,
    };
    let mut how = layer.canonical()?;
    let input = c.quant.input_dtype.unwrap_or(c.quant.dtype);
    if let Some(choice) = &c.schedule_w13 {
        how.w13 = choice.resolve(w13, c.quant.dtype, input)?;
    }
    if let Some(choice) = &c.schedule_w2 {
        how.w2 = choice.resolve(w2, c.quant.dtype, input)?;
    }
    let stages = defined(&c.quant, forward(&layer, c, &x, routed, &how))?;
    case.add_output("topk_weights", Tensor::from_array("topk_weights", routing.topk_weights)?);
    case.add_output("topk_ids", Tensor::from_array("topk_ids", routing.topk_ids)?);
    for (name, values) in [
        ("sorted_token_ids", aligned.sorted_token_ids),
        ("expert_ids", aligned.expert_ids),
        ("num_tokens_post_padded", vec![aligned.num_tokens_post_padded]),
    ] {
        let shape = vec![values.len()];
        case.add_output(name, Tensor::from_vec(name, DType::I32, shape, values)?);
    }
    let Some(stages) = stages else { return Ok(false) };
    let Stages { gate_up, activated, down, mut y } = stages;
    let sizes = [c.size_m, c.hidden_size];
    if let Some(shared) = shared_output(case, sizes)? {
        let (ty, rows) = (c.quant.dtype, down.view().bits_of("down", c.quant.dtype)?);
        let made = sum_bits_with((&rows, Some(&shared)), ty, c.top_k, c.hidden_size, how.chain)?;
        y = HalfArray2::from_bits("y", ty, sizes, made)?;
    }
    for (name, stage) in [("gate_up", gate_up), ("activated", activated), ("down", down), ("y", y)]
    {
        let shape = [stage.shape()[0], stage.shape()[1]];
        add_halves(case, name, c.quant.dtype, shape, stage.into_bits())?;
    }
    Ok(true)
}

/// The stages of x; with router weights on x, those of a row of x for each slot.
fn forward(
    layer: &Layer<'_>,
    c: &MoeConfig,
    x: &[u16],
    routed: Routed<'_>,
    how: &Arithmetic,
) -> Result<Stages> {
    let (h, dtype) = (c.hidden_size, c.quant.dtype);
    if !c.rules.router_weight_on_x {
        return layer.forward(FloatView2::from_rows("x", dtype, h, x)?, routed, how);
    }
    let weights = routed.topk_weights;
    let rows = Prescale::RoundedWeight.apply(x, weights, [c.top_k, h], dtype);
    let ones = vec![1.0; weights.len()];
    let by_slot = Routed { top_k: 1, topk_weights: &ones, ..routed };
    let x = FloatView2::from_rows("x", dtype, h, &rows)?;
    let gate_up = layer.gate_up(x, by_slot, &how.w13)?;
    let activated = layer.activate(gate_up.view(), how.chain)?;
    let down = layer.down(activated.view(), by_slot, &how.w2)?;
    let y = layer.sum(down.view(), c.top_k, how.chain)?;
    Ok(Stages { gate_up, activated, down, y })
}

/// The permutations of a generated case, which are stable sorts.
fn stable(weights: &[Weight<'static>]) -> Option<Vec<Vec<u32>>> {
    let of = |w: &Weight<'static>| match &w.groups {
        Groups::Indexed { g_idx, .. } => Some(act_order::sort(g_idx).perm),
        Groups::Uniform(_) => None,
    };
    weights.iter().map(of).collect()
}
