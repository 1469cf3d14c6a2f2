//! Judges a case: recomputes every output from the inputs and compares.
//!
//! Packed, permuted and integer outputs are compared bit for bit; router weights, activations and
//! sums with bounds that follow from the operations that an implementation may use. Outputs that
//! marlinspike does not compute are reported as unchecked; such a case does not pass.

mod guard;

use std::borrow::Cow;

use serde::Serialize;

pub use crate::judge::{
    Accepted, Cause, Declared, Diagnosis, ErrorMap, Grid, Mismatch, OutputReport, Picture, Power,
    Rejects, Strength, Verdict,
};
pub use crate::ops::{LayerSource, MatrixSource, add_outputs, mistaken, mistakes};
pub use guard::{beside_misfits, check_case_within, without_misfits};

use crate::Result;
use crate::case::{Case, Dim, Limits};
use crate::num::tensor::Tensor;

/// The verdict on a case.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct CaseReport {
    /// Operation.
    pub op: String,
    /// The case's name.
    pub name: String,
    /// `Fail` if an output failed; otherwise `Unchecked` if an output is unchecked or there is
    /// none; otherwise `Pass`.
    pub verdict: Verdict,
    /// One report per output, in the order of their names.
    pub outputs: Vec<OutputReport>,
}

impl CaseReport {
    /// Combines the verdicts on the outputs.
    pub fn new(case: &Case<'_>, mut outputs: Vec<OutputReport>) -> Self {
        outputs.sort_by(|a, b| a.name.cmp(&b.name));
        let any = |v| outputs.iter().any(|o| o.verdict == v);
        let verdict = if any(Verdict::Fail) {
            Verdict::Fail
        } else if outputs.is_empty() || any(Verdict::Unchecked) {
            Verdict::Unchecked
        } else {
            Verdict::Pass
        };
        Self { op: case.op.to_string(), name: case.name.clone(), verdict, outputs }
    }
}

/// Recomputes every output of `case` from its inputs and compares.
///
/// # Errors
/// Returns an error for an invalid input (a combination that upstream refuses, a `g_idx` that does
/// not fit its scales). A wrong output gives a verdict, not an error.
pub fn check_case(case: &Case<'_>) -> Result<CaseReport> {
    check_case_as(case, &Declared::default())
}

/// As [`check_case`], for a kernel whose products are computed as `declared` states.
///
/// # Errors
/// As [`check_case`]; [`crate::case::CaseError::TooLarge`] for a case beyond the default
/// [`Limits`].
pub fn check_case_as(case: &Case<'_>, declared: &Declared) -> Result<CaseReport> {
    check_case_within(case, declared, &Limits::default())
}

/// The verdicts on outputs without elements, and the case without them. Only outputs of which the config
/// demands no elements: `size_m` is 0. Their shapes were checked, and nothing else could be wrong.
fn without_empty<'a, 'c>(case: &'a Case<'c>) -> Result<(Vec<OutputReport>, Cow<'a, Case<'c>>)> {
    if !case.outputs.values().any(Tensor::is_empty) {
        return Ok((Vec::new(), Cow::Borrowed(case)));
    }
    let rules = case.config.rules(case.local_experts())?;
    let empty = |name: &String, tensor: &Tensor<'_>| {
        let rule = rules.iter().find(|rule| rule.name.strip_prefix("out.") == Some(name));
        tensor.is_empty() && rule.is_some_and(|rule| rule.shape.contains(&Dim::Is(0)))
    };
    let mut rest = case.clone();
    rest.outputs.retain(|name, tensor| !empty(name, tensor));
    let note = "no elements: the shape is right, and there is nothing else to compare";
    let passing = |(name, _): (&String, &Tensor<'_>)| OutputReport {
        verdict: Verdict::Pass,
        ..OutputReport::unchecked(name, 0, note)
    };
    let all = case.outputs.iter().filter(|(name, tensor)| empty(name, tensor));
    Ok((all.map(passing).collect(), Cow::Owned(rest)))
}

/// The note on an output that only has to be as infinite as its inputs.
const NO_FINITE_VALUE: &str =
    "no value is finite, so that nothing was compared: check a case with smaller inputs";

/// Judges the outputs of a case that is within the limits and has no misfits.
fn recompute(case: &Case<'_>, declared: &Declared) -> Result<CaseReport> {
    // A declared convention takes precedence over that of the case's config.
    let stated = case.config.quant().and_then(|quant| quant.convention);
    let convention = declared.convention.or(stated);
    let min_power = match declared.min_power {
        Some(limit) => Some(limit),
        None => case.min_power()?,
    };
    let declared = &Declared { convention, min_power, ..declared.clone() };
    let (empty, judged) = without_empty(case)?;
    // Without outputs, the stated inputs of a case are judged.
    let mut outputs = match judged.outputs.is_empty() && !empty.is_empty() {
        true => Vec::new(),
        false => judged.config.operation().judge(&judged, declared)?,
    };
    outputs.extend(empty);
    for (name, tensor) in &case.outputs {
        if !outputs.iter().any(|o| o.name == *name) {
            let note = format!("{} of `{}` is not computed here yet", name, case.op);
            outputs.push(OutputReport::unchecked(name, tensor.len(), &note));
        }
    }
    for output in &mut outputs {
        // Outputs without an error over a bound were compared bit for bit.
        let every_bit = output.max_error_over_bound.is_none() && output.equal_bits == Some(1.0);
        if output.verdict == Verdict::Pass && output.power.is_none() && every_bit {
            output.power = Some(Power::every_bit());
        }
        // Rows that are NaN because their activations are say that a kernel passes NaN on.
        let stated = output.power.is_some_and(|power| power.every_bit) && case.has_no_finite_row();
        let is_finite = stated || case.finite_share(&output.name) != Some(0.0);
        if output.verdict == Verdict::Pass && !is_finite {
            output.verdict = Verdict::Unchecked;
            output.add_note(NO_FINITE_VALUE);
        }
        output.require_power(declared.power_limit());
    }
    Ok(CaseReport::new(case, outputs))
}
