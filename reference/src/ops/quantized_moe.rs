//! What the layers of 8-bit weights and activations share: names, checks of inputs, outputs, known
//! mistakes.

use crate::Result;
use crate::judge::OutputReport;
use crate::judge::compare::Rows;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::computation::{Expected, Form};
use crate::ops::schema::{Inputs, expert_ids, expert_map, finite};
use crate::ops::tensors::half;
use crate::weight::Weight;

/// Names of the quantized activations of w13 and w2 and of their scales.
pub(super) const QUANTIZED: [[&str; 2]; 2] = [["a1q", "a1q_scale"], ["a2q", "a2q_scale"]];

/// Experts, those of the rank, and experts per token of generated cases.
pub(super) const EXPERTS: [(usize, usize, usize); 3] = [(4, 4, 2), (6, 3, 3), (8, 8, 1)];

/// Checks the inputs of a layer with `num_experts` experts, of which the case has `num_local`.
///
/// # Errors
/// As the checks of each input, and `scales` of tensors whose names end in `_scale`.
pub(super) fn check_inputs(
    inputs: &Inputs<'_>,
    [num_experts, num_local]: [usize; 2],
    scales: fn(&Tensor<'_>) -> Result<()>,
) -> Result<()> {
    for (name, tensor) in inputs {
        match name.as_str() {
            "x" | "topk_weights" => finite(tensor)?,
            "topk_ids" => expert_ids(tensor, num_experts)?,
            "expert_map" => expert_map(tensor, Some(num_local))?,
            name if name.ends_with("_scale") => scales(tensor)?,
            _ => {}
        }
    }
    Ok(())
}

/// Codes of rows `[_, cols]` that enter w13 (`which` 0) or w2 (1).
pub(super) fn codes(which: usize, dtype: DType, cols: usize, elements: &[u32]) -> Expected {
    let rows = elements.len() / cols;
    Expected {
        name: QUANTIZED[which][0].to_owned(),
        dtype,
        shape: vec![rows, cols],
        elements: elements.to_vec(),
        form: Form::lines(Rows::K, [cols, rows], 8, None),
    }
}

/// An output `[_, cols]` of the type of x.
pub(super) fn halves(name: &str, dtype: ScalarType, cols: usize, elements: Vec<u32>) -> Expected {
    let rows = elements.len() / cols;
    Expected {
        name: name.to_owned(),
        dtype: half(dtype),
        shape: vec![rows, cols],
        elements,
        form: Form::lines(Rows::List, [cols, rows], 16, None),
    }
}

/// Adds a report for each output of the case that has none: it is judged from the stage named next to
/// it, which the case lacks.
pub(super) fn report_unjudged(
    case: &Case<'_>,
    reports: &mut Vec<OutputReport>,
    before: &[(&str, &str)],
) {
    for (name, before) in before {
        if let Some(found) = case.output(name)
            && !reports.iter().any(|r| r.name == *name)
        {
            let note = format!("`{name}` is judged from {before}, which the case lacks");
            reports.push(OutputReport::unchecked(name, found.len(), &note));
        }
    }
}

/// The mistake of taking the first expert's scales for all.
pub(super) fn scales_of_first_expert(stacks: &mut [Vec<Weight<'static>>; 2]) {
    for stack in stacks {
        let first = stack[0].scales.clone();
        stack.iter_mut().for_each(|w| w.scales = first.clone());
    }
}

/// The mistake of exchanging the halves of every w13.
pub(super) fn swap_halves(w13: &mut [Weight<'static>]) {
    for weight in w13 {
        let n = weight.shape().size_n;
        let columns: Vec<usize> = (0..n).map(|i| (i + n / 2) % n).collect();
        if let Ok(swapped) = weight.gather_columns(&columns) {
            *weight = swapped;
        }
    }
}

/// The mistake of taking global ids for those of the rank's `num_local` experts; whether the case has a
/// map.
pub(super) fn ignore_map(
    map: &mut Option<Vec<i32>>,
    topk_ids: &mut [i32],
    num_local: usize,
) -> bool {
    let had_map = map.take().is_some();
    if had_map {
        topk_ids.iter_mut().for_each(|id| *id = id.rem_euclid(num_local as i32));
    }
    had_map
}
