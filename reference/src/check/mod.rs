//! The verdict on a case: every output is recomputed from the inputs and compared.
//!
//! Packed, permuted and integer outputs are compared bit for bit; router weights, activations and
//! sums with bounds derived from the operations that an implementation may use. Outputs that are not computed
//! here yet are reported as unchecked and keep the case from passing.

mod guard;

use serde::Serialize;

pub use crate::judge::{
    Accepted, Cause, Declared, Diagnosis, ErrorMap, Grid, Mismatch, OutputReport, Picture, Power,
    Rejects, Strength, Verdict,
};
pub use crate::ops::{LayerSource, MatrixSource, add_outputs, mistaken, mistakes};
pub use guard::{beside_misfits, check_case_within, without_misfits};

use crate::Result;
use crate::case::{Case, Limits};

/// The verdict on a case.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct CaseReport {
    /// Operation.
    pub op: String,
    /// The case's name.
    pub name: String,
    /// Fail when an output failed, else unchecked when one was not checked or there is none,
    /// else pass.
    pub verdict: Verdict,
    /// One report per output, in the order of their names.
    pub outputs: Vec<OutputReport>,
}

impl CaseReport {
    /// The verdict that follows from those on the outputs.
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
/// When an input cannot be used (a combination that upstream refuses, a `g_idx` that does not fit
/// its scales, ...). A wrong output is a verdict, not an error.
pub fn check_case(case: &Case<'_>) -> Result<CaseReport> {
    check_case_as(case, &Declared::default())
}

/// As [`check_case`], of a kernel that is declared to compute its products as `declared` says.
///
/// # Errors
/// As [`check_case`]; [`crate::case::CaseError::TooLarge`] for a case beyond the default
/// [`Limits`].
pub fn check_case_as(case: &Case<'_>, declared: &Declared) -> Result<CaseReport> {
    check_case_within(case, declared, &Limits::default())
}

/// Judges the outputs of a case within the limits, all of whose outputs have the right shapes.
fn recompute(case: &Case<'_>, declared: &Declared) -> Result<CaseReport> {
    // Where no convention is declared, the one that the case's config states.
    let stated = case.config.quant().and_then(|quant| quant.convention);
    let convention = declared.convention.or(stated);
    let declared = &Declared { convention, ..declared.clone() };
    let mut outputs = case.config.operation().judge(case, declared)?;
    for (name, tensor) in &case.outputs {
        if !outputs.iter().any(|o| o.name == *name) {
            let note = format!("{} of `{}` is not computed here yet", name, case.op);
            outputs.push(OutputReport::unchecked(name, tensor.len(), &note));
        }
    }
    for output in &mut outputs {
        // What has no error over a bound was compared for every bit.
        let every_bit = output.max_error_over_bound.is_none() && output.equal_bits == Some(1.0);
        if output.verdict == Verdict::Pass && output.power.is_none() && every_bit {
            output.power = Some(Power::every_bit());
        }
    }
    Ok(CaseReport::new(case, outputs))
}
