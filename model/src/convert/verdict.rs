//! Whether upstream's selection has a Marlin kernel for a stack.

use marlinspike::layouts::marlin::InputDtype;
use marlinspike::num::dims::Shape;
use marlinspike::select::{
    Backend, InputType, LinearDesc, MoeDesc, Options, Selection, select_linear, select_moe,
};

use super::settings::Settings;
use crate::model::layers::{Role, Stack};

/// The selection for `stack`, of which this rank holds `shape` out of `full_k` rows.
///
/// FP8 weights are selected with Marlin forced: a device that multiplies FP8 itself may still run
/// them with Marlin.
pub fn selection(stack: &Stack, shape: Shape, full_k: usize, settings: &Settings) -> Selection {
    let input_type = match settings.input {
        InputDtype::Model => InputType::SixteenBit,
        InputDtype::Int8 => InputType::Int8,
        InputDtype::Fp8 => InputType::Fp8,
    };
    let options = Options { batch_invariant: false, force_fp8_marlin: true, input_type };
    match stack.role {
        Role::Dense => {
            let desc = LinearDesc {
                input_size: full_k,
                input_size_per_partition: shape.size_k,
                output_size_per_partition: shape.size_n,
                options,
            };
            select_linear(&stack.scheme, &desc, &settings.device)
        }
        role => {
            let (hidden, intermediate) = match role {
                Role::W13 if stack.has_gate() => (shape.size_k, shape.size_n / 2),
                Role::W13 => (shape.size_k, shape.size_n),
                _ => (shape.size_n, shape.size_k),
            };
            let desc = MoeDesc { options, ..MoeDesc::new(hidden, intermediate) };
            select_moe(&stack.scheme, &desc, &settings.device)
        }
    }
}

/// The reasons for refusing the stack, each with its backends; empty if a backend takes it.
pub fn reasons(stack: &Stack, shape: Shape, full_k: usize, settings: &Settings) -> Vec<String> {
    against(&selection(stack, shape, full_k, settings))
}

/// The refusals of a selection that chose nothing.
pub fn against(selection: &Selection) -> Vec<String> {
    if selection.chosen.is_some() {
        return Vec::new();
    }
    let mut by_reason: Vec<(String, Vec<Backend>)> = Vec::new();
    for refusal in &selection.refusals {
        let reason = refusal.reason.to_string();
        match by_reason.iter_mut().find(|(r, _)| *r == reason) {
            Some((_, backends)) => backends.push(refusal.backend),
            None => by_reason.push((reason, vec![refusal.backend])),
        }
    }
    by_reason
        .into_iter()
        .map(|(reason, backends)| {
            let names: Vec<_> = backends.iter().map(|b| b.name()).collect();
            format!("{reason} ({})", names.join(", "))
        })
        .collect()
}
