//! The int4 path: which stacks it takes, what comes out, and what the files say of the layers.
//!
//! Taken are codes of 4 bits without zero points in uniform groups: compressed-tensors with
//! dynamic activations of 8 bits, the same with 16-bit activations (which the path quantizes all
//! the same), and GPTQ, also with a `g_idx` that changes nothing.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use marlinspike::case::{Activation, ScoringFunc};
use marlinspike::config::{Scheme, ZeroPoints};
use marlinspike::container::TensorSpec;
use marlinspike::dims::{GroupSize, Shape};
use marlinspike::layers::ExpertMap;
use marlinspike::layout::kleidi::RhsLayout;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::families::Renormalize;
use marlinspike::tensor::DType;
use marlinspike::w4a8::moe::Refusal;
use marlinspike::w4a8::stored::{Description, LinearDescription, MoeDescription};
use serde_json::Value;

use super::stack::{StackInfo, cut};
use super::{Output, Packing, Settings, StackPlan};
use crate::convert::names::Kind;
use crate::model::bind;
use crate::model::layers::{Layers, Role, Stack};
use crate::model::routing::MoeRouting;
use crate::model::{Model, ModelError};

/// The stack without its act-order where the groups' index says what uniform groups would.
///
/// # Errors
/// [`ModelError`] for an index that cannot be read.
pub(super) fn unordered<'s>(
    model: &Model<'_>,
    stack: &'s Stack,
) -> Result<Cow<'s, Stack>, ModelError> {
    let Scheme::Wna16(w) = &stack.scheme else { return Ok(Cow::Borrowed(stack)) };
    let GroupSize::Of(group) = w.group_size else { return Ok(Cow::Borrowed(stack)) };
    if !w.desc_act {
        return Ok(Cow::Borrowed(stack));
    }
    for matrix in stack.experts.iter().flatten() {
        let names = ["g_idx", "weight_g_idx"].map(|s| format!("{}{s}", matrix.prefix));
        let Some(name) = names.iter().find(|name| model.entry(name).is_some()) else {
            return Ok(Cow::Borrowed(stack));
        };
        let g_idx = model.tensor(name)?;
        g_idx.expect_dtype(&[DType::I32]).map_err(|e| ModelError::module(&stack.module, e))?;
        if g_idx.elements::<i32>().iter().enumerate().any(|(k, &g)| g != (k / group) as i32) {
            return Ok(Cow::Borrowed(stack));
        }
    }
    let uniform = marlinspike::config::Wna16Scheme { desc_act: false, actorder: None, ..w.clone() };
    Ok(Cow::Owned(Stack { scheme: Scheme::Wna16(uniform), ..stack.clone() }))
}

/// Why the path does not take weights of `scheme`.
fn reasons(scheme: &Scheme) -> Vec<String> {
    let w = match scheme {
        Scheme::W4A8Int8 { .. } => return Vec::new(),
        Scheme::W4A8Fp8 { .. } => {
            return vec!["activations: found float8_e4m3fn, expected int8".to_owned()];
        }
        Scheme::Wna16(w) => w,
        other => return vec![format!("found {}, expected integers of 4 bits", other.label())],
    };
    let mut reasons = Vec::new();
    if w.bits() != 4 {
        reasons.push(format!("weights of {} bits: found {0}, expected 4", w.bits()));
    }
    if w.zeros != ZeroPoints::Symmetric {
        reasons.push(format!("zero points: found {}, expected symmetric weights", w.weight_type));
    }
    if w.desc_act && w.group_size != GroupSize::Channel {
        reasons.push("act-order: found a g_idx that orders rows, expected uniform groups".into());
    }
    reasons
}

/// The stack on this rank, or every reason against.
pub(super) fn stack_plan(
    stack: &Stack,
    info: StackInfo,
    kv_heads: Option<usize>,
    settings: &Settings,
    nr: usize,
) -> Result<StackPlan, Vec<String>> {
    let (k, n) = cut(stack, &info, kv_heads, settings).map_err(|e| vec![e])?;
    let reasons = reasons(&stack.scheme);
    if !reasons.is_empty() {
        return Err(reasons);
    }
    let shape = Shape::new(k.len(), n.iter().map(Range::len).sum());
    let group_size = bind::group_size(&stack.scheme, info.size_k);
    let layout = RhsLayout::new(shape, group_size, nr).map_err(|e| vec![e.to_string()])?;
    let (name, mut full) = match stack.role {
        Role::Dense => ("rhs_packed", Vec::new()),
        Role::W13 => ("w13_packed", vec![info.experts.len()]),
        Role::W2 => ("w2_packed", vec![info.experts.len()]),
    };
    full.push(layout.packed_len());
    let name = format!("{}.{name}", stack.module);
    let spec = TensorSpec { name, dtype: DType::U8, shape: full };
    Ok(StackPlan {
        module: stack.module.clone(),
        role: stack.role,
        scheme: stack.scheme.clone(),
        experts: info.experts,
        k,
        n,
        shape,
        group_size,
        groups: layout.groups(),
        act_order: false,
        is_k_full: true,
        padding: None,
        packing: Packing::Kleidi(layout),
        outputs: vec![Output { kind: Kind::Weight, spec }],
    })
}

/// What the files say of each layer, by module. A layer of experts that cannot be described is
/// refused with both of its stacks.
pub(super) fn descriptions(
    model: &Model<'_>,
    layers: &Layers,
    planned: &mut [Result<StackPlan, Vec<String>>],
    maps: &BTreeMap<String, ExpertMap>,
) -> BTreeMap<String, Description> {
    let mut all = BTreeMap::new();
    for i in 0..planned.len() {
        let stack = &layers.stacks[i];
        let Ok(plan) = &planned[i] else { continue };
        let Packing::Kleidi(layout) = plan.packing else { continue };
        if stack.role == Role::Dense {
            let linear = LinearDescription { layout, group_size: plan.group_size };
            all.insert(stack.module.clone(), Description::Linear(linear));
            continue;
        }
        if stack.role == Role::W2 && all.contains_key(&stack.module) {
            continue;
        }
        let other = layers.stacks.iter().position(|s| {
            s.module == stack.module && s.role != stack.role && s.role != Role::Dense
        });
        let sibling = other.and_then(|j| planned[j].as_ref().ok());
        let map = maps.get(&stack.module).and_then(|m| m.map.clone());
        match experts(model, stack, plan, sibling, map) {
            Ok(described) => {
                all.insert(stack.module.clone(), Description::Moe(described));
            }
            Err(reason) => {
                planned[i] = Err(vec![reason.clone()]);
                if let Some(j) = other {
                    planned[j] = Err(vec![reason]);
                }
            }
        }
    }
    all
}

/// The experts of a layer whose first planned stack is `plan`, w13.
fn experts(
    model: &Model<'_>,
    stack: &Stack,
    plan: &StackPlan,
    sibling: Option<&StackPlan>,
    expert_map: Option<Vec<i32>>,
) -> Result<MoeDescription, String> {
    let (Role::W13, Some(w2)) = (stack.role, sibling) else {
        return Err("found one of w13 and w2, expected both".to_owned());
    };
    let Packing::Kleidi(layout) = plan.packing else {
        return Err("found another format, expected the int4 path".to_owned());
    };
    let (w13, down) = (plan.shape, w2.shape);
    if w13.size_n != 2 * down.size_k || w13.size_k != down.size_n {
        return Err(format!("found w13 {w13} and w2 {down}, expected [H, 2I] and [I, H]"));
    }
    if plan.group_size != w2.group_size {
        let (a, b) = (plan.group_size, w2.group_size);
        return Err(format!("found groups of {a} in w13 and of {b} in w2, expected the same"));
    }
    let num_experts = stack.experts.len();
    let routing = routing(model, &stack.module, num_experts)?;
    Ok(MoeDescription {
        hidden_size: w13.size_k,
        intermediate_size: down.size_k,
        num_experts,
        expert_map,
        group_size: plan.group_size,
        nr: layout.nr(),
        top_k: routing.rule.top_k,
        scoring_func: ScoringFunc::Softmax,
        renormalize: routing.rule.renormalize != Renormalize::Never,
        activation: Activation::Silu,
        router_weight_on_input: routing.rule.apply_router_weight_on_input,
    })
}

/// The layer's routing, where it is what upstream's method computes: softmax without groups, bias
/// or factor, and SiLU.
fn routing(model: &Model<'_>, module: &str, num_experts: usize) -> Result<MoeRouting, String> {
    let groups = model.config_value("n_group").and_then(Value::as_u64);
    if model.stated_routing.is_none() && groups.is_some_and(|groups| groups > 1) {
        return Err(Refusal::GroupedTopk.to_string());
    }
    let routing = MoeRouting::read(model, module, num_experts, false).map_err(|e| e.to_string())?;
    let plain = routing.rule.plain().filter(|r| r.scoring_func == ScoringFunc::Softmax);
    if plain.is_none() {
        let found = routing.summary();
        let expected = "\"softmax\" without groups, bias or factor";
        return Err(format!("found {found}, expected {expected}"));
    }
    if routing.activation != Definition::new(Activation::Silu) {
        let (name, limit) = (routing.rule.activation, routing.rule.swiglu_limit);
        let limit = limit.map_or(String::new(), |l| format!(" with swiglu_limit {l}"));
        return Err(format!("activation: found {name}{limit}, expected \"silu\""));
    }
    Ok(routing)
}
