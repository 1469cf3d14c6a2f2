//! The verdict on `activated`. Nothing states which exponential a kernel takes, so the layer's own bits
//! are one of several right results: others pass by the bound of [`fused_experts`](crate::ops::moe).

use super::stages::Layer;
use crate::Result;
use crate::judge::power::{Accepted, Power};
use crate::judge::{OutputReport, Strength, Verdict};
use crate::num::interval::Bound;
use crate::num::tensor::Tensor;
use crate::ops::case::Case;
use crate::ops::computation::bitwise;
use crate::ops::layer::activated::CLASS;
use crate::w4a8::Values;

/// The remedy if the bound is too weak.
const REMEDY: &str =
    "compute `activated` with the layer's own exponential, which is compared bit for bit";

/// Judges `activated` of `case` by its bound where `report`, the comparison bit for bit, fails and names
/// no mistake that explains every value.
pub(super) fn settle(report: &mut OutputReport, case: &Case<'_>, layer: &Layer) -> Result<()> {
    let Some(found) = case.output(&report.name) else { return Ok(()) };
    let is_named = report.diagnosis.as_ref().is_some_and(|d| d.strength == Strength::Explains);
    if report.verdict != Verdict::Fail || is_named {
        return Ok(());
    }
    let (bounds, expected) = layer.activated_bounds()?;
    let values = Values::from_tensor(found)?.to_f32();
    let ratios = bounds.iter().zip(&values).map(|(bound, &value)| bound.ratio(value));
    let largest = ratios.fold(0f64, f64::max);
    let exact = expected.to_f32();
    // What is within its bound counts as right.
    let allowed = |((bound, &value), &exact): ((&Bound, &f32), &f32)| {
        if bound.allows(value) { exact } else { value }
    };
    let values = bounds.iter().zip(&values).zip(&exact).map(allowed).collect();
    let values = Values::from_f32(values, layer.dtype())?;
    let mut lenient = case.clone();
    lenient.add_output(&report.name, tensor(found, &values)?);
    let judged = bitwise(&lenient, layer)?.into_iter().find(|r| r.name == report.name);
    let Some(mut judged) = judged else { return Ok(()) };
    let equal = 1.0 - report.mismatches as f64 / found.len().max(1) as f64;
    judged.equal_bits = Some(equal);
    judged.max_error_over_bound = Some(largest);
    judged.note = Some(format!("{CLASS}; bits compared with f32 with one rounding"));
    let accepted: Vec<Accepted> = bounds.iter().map(Accepted::from).collect();
    judged.unbounded = accepted.iter().filter(|a| a.is_unbounded() && !a.exact.is_nan()).count();
    judged.settle(Power::of(&accepted, layer.cols(), layer.dtype()), REMEDY);
    *report = judged;
    Ok(())
}

/// `values` in a tensor like `found`.
fn tensor(found: &Tensor<'_>, values: &Values) -> Result<Tensor<'static>> {
    let (name, shape) = (found.name(), found.shape().to_vec());
    match values {
        Values::F32(values) => Tensor::from_vec(name, found.dtype(), shape, values.clone()),
        Values::Bf16(values) => Tensor::from_vec(name, found.dtype(), shape, values.clone()),
    }
}
