//! What the canonical arithmetic makes of a case's inputs: every output beside the layouts.

use super::tensors::half;
use crate::act_order;
use crate::case::{Case, LinearConfig, MoeConfig, QuantConfig};
use crate::gemm::schedule::{Extras, Schedule, ScheduleError};
use crate::moe::activation::Definition;
use crate::moe::align::{Absent, Align};
use crate::moe::layer::{Layer, Routed, input_global_scale, quantize_rows};
use crate::scalar::ScalarType;
use crate::tensor::{DType, Tensor};
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

fn is_schedule(error: &Error) -> bool {
    error.downcast_ref::<ScheduleError>().is_some()
}

/// Whether the canonical schedule has such a product: under act-order, groups of any size need not
/// fill the instructions of 8-bit activations, which sum each group apart.
fn defined<T>(q: &QuantConfig, made: Result<T>) -> Result<Option<T>> {
    match made {
        Err(e) if is_schedule(&e) && q.has_act_order() && q.input_dtype.is_some() => Ok(None),
        made => made.map(Some),
    }
}

/// Adds `y` of a linear case, and of 8-bit activations their codes and scales as inputs. Returns
/// whether there is a `y`.
pub(crate) fn linear(
    case: &mut Case<'static>,
    c: &LinearConfig,
    weight: &Weight<'static>,
) -> Result<bool> {
    let x = case.input("x")?.elements::<u16>().into_owned();
    let (dtype, m, k) = (c.quant.dtype, c.size_m, c.size_k);
    let factor = input_global_scale(std::slice::from_ref(weight));
    let rows = quantize_rows(&x, dtype, c.quant.input_dtype, k, factor)?;
    if let (Some(input), Some(scales)) = (c.quant.input_dtype, &rows.scales) {
        let ty = if input == ScalarType::INT8 { DType::I8 } else { DType::F8E4M3 };
        let codes: Vec<u8> = rows.codes.iter().map(|&c| c as u8).collect();
        case.add_input("a_q", Tensor::new("a_q", ty, vec![m, k], codes)?);
        case.add_input("a_scales", Tensor::from_vec("", DType::F32, vec![m, 1], scales.clone())?);
    }
    let input = c.quant.input_dtype.unwrap_or(dtype);
    let extras = Extras { activation_scales: rows.scales.as_deref(), ..Extras::default() };
    let y = Schedule::canonical(weight, dtype, input)?.execute(&rows.codes, weight, extras);
    let Some(y) = defined(&c.quant, y)? else { return Ok(false) };
    let y = y.into_iter().map(|b| b as u16).collect();
    add(case, "y", dtype, [m, c.size_n], y)?;
    Ok(true)
}

/// Adds routing, aligned tokens and all stages of a layer. Returns whether there are stages.
pub(crate) fn moe(
    case: &mut Case<'static>,
    c: &MoeConfig,
    w13: &[Weight<'static>],
    w2: &[Weight<'static>],
) -> Result<bool> {
    let logits = case.input("router_logits")?.elements::<f32>().into_owned();
    let x = case.input("x")?.elements::<u16>().into_owned();
    let map = case.inputs.get("expert_map").map(|m| m.elements::<i32>().into_owned());
    let routing = c.router().route(&logits, c.num_experts)?;
    let align = Align {
        block_size: c.block_size_m,
        num_experts: c.num_experts,
        expert_map: map.as_deref(),
        absent: Absent::Ignore,
    };
    let aligned = align.run(&routing.topk_ids)?;
    let orders = [stable(w13), stable(w2)];
    let layer = Layer {
        w13,
        w2,
        orders: [orders[0].as_deref(), orders[1].as_deref()],
        num_experts: c.num_experts,
        expert_map: map.as_deref(),
        activation: Definition::new(c.activation),
        dtype: c.quant.dtype,
        input_dtype: c.quant.input_dtype,
        router_weight_on_input: c.apply_router_weight_on_input,
    };
    let routed =
        Routed { top_k: c.top_k, topk_ids: &routing.topk_ids, topk_weights: &routing.topk_weights };
    let stages = defined(&c.quant, layer.forward(&x, routed, &layer.canonical()?))?;
    let (m, rows, dtype) = (c.size_m, c.size_m * c.top_k, c.quant.dtype);
    let ints =
        |name: &str, shape: Vec<usize>, v: Vec<i32>| Tensor::from_vec(name, DType::I32, shape, v);
    let shape = vec![m, c.top_k];
    let weights = Tensor::from_vec("", DType::F32, shape.clone(), routing.topk_weights)?;
    case.add_output("topk_weights", weights);
    case.add_output("topk_ids", ints("topk_ids", shape, routing.topk_ids)?);
    for (name, values) in [
        ("sorted_token_ids", aligned.sorted_token_ids),
        ("expert_ids", aligned.expert_ids),
        ("num_tokens_post_padded", vec![aligned.num_tokens_post_padded]),
    ] {
        case.add_output(name, ints(name, vec![values.len()], values)?);
    }
    let Some(stages) = stages else { return Ok(false) };
    add(case, "gate_up", dtype, [rows, c.w13_size_n()], stages.gate_up)?;
    add(case, "activated", dtype, [rows, c.intermediate_size], stages.activated)?;
    add(case, "down", dtype, [rows, c.hidden_size], stages.down)?;
    add(case, "y", dtype, [m, c.hidden_size], stages.y)?;
    Ok(true)
}

/// The permutations that a case states: stable ones.
fn stable(weights: &[Weight<'static>]) -> Option<Vec<Vec<u32>>> {
    let of = |w: &Weight<'static>| match &w.groups {
        Groups::Indexed { g_idx, .. } => Some(act_order::sort(g_idx).perm),
        Groups::Uniform(_) => None,
    };
    weights.iter().map(of).collect()
}

/// A 16-bit output.
fn add(
    case: &mut Case<'static>,
    name: &str,
    dtype: ScalarType,
    shape: [usize; 2],
    values: Vec<u16>,
) -> Result<()> {
    case.add_output(name, Tensor::from_vec(name, half(dtype), shape.to_vec(), values)?);
    Ok(())
}
