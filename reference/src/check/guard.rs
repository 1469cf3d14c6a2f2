//! What comes before a case's outputs are recomputed: limits, and outputs of a wrong shape.

use super::{CaseReport, Declared, Diagnosis, OutputReport, Verdict, recompute};
use crate::case::{Case, Limits, Misfit, MisfitKind};
use crate::tensor::Tensor;
use crate::{Error, Result};

/// As [`check_case_as`](super::check_case_as), within `limits`.
///
/// Outputs of a wrong type or shape fail. Others are judged as if the case did not have those: a
/// stage that would be judged from one is judged from the stage before it.
///
/// # Errors
/// As [`check_case_as`](super::check_case_as).
pub fn check_case_within(
    case: &Case<'_>,
    declared: &Declared,
    limits: &Limits,
) -> Result<CaseReport> {
    let Some((fitting, mut reports)) = without_misfits(case)? else {
        limits.check(case)?;
        return recompute(case, declared);
    };
    limits.check(&fitting)?;
    match recompute(&fitting, declared) {
        Ok(report) => reports.extend(report.outputs),
        // What the others are judged from is missing, since it has a wrong shape.
        Err(error @ (Error::Missing { .. } | Error::Unsupported { .. })) => {
            let note = format!("outputs of a wrong shape were left out, and then {error}");
            let unchecked = |(name, tensor): (&String, &Tensor<'_>)| {
                OutputReport::unchecked(name, tensor.len(), &note)
            };
            reports.extend(fitting.outputs.iter().map(unchecked));
        }
        Err(error) => return Err(error),
    }
    Ok(CaseReport::new(case, reports))
}

/// The case without its [`Case::misfits`], and the verdicts on those; `None` where all outputs fit.
///
/// # Errors
/// As [`Case::misfits`].
pub fn without_misfits<'a>(case: &Case<'a>) -> Result<Option<(Case<'a>, Vec<OutputReport>)>> {
    let misfits = case.misfits()?;
    if misfits.is_empty() {
        return Ok(None);
    }
    let mut fitting = case.clone();
    let mut reports = Vec::new();
    for misfit in misfits {
        let elements = fitting.outputs.remove(&misfit.name).map_or(0, |tensor| tensor.len());
        reports.push(report(&misfit, elements));
    }
    Ok(Some((fitting, reports)))
}

fn report(misfit: &Misfit, elements: usize) -> OutputReport {
    let Misfit { name, kind, found, expected } = misfit;
    let (id, what) = match kind {
        MisfitKind::Dtype => ("wrong-dtype", "another element type"),
        MisfitKind::ShardedScales => (
            "scales-sharded",
            "the groups of this rank's rows alone: with act-order a row may belong to any group \
             of the whole matrix, so a row-parallel rank keeps all of them",
        ),
        _ => ("wrong-shape", "another shape"),
    };
    let text = format!("{what}: found {found}, expected {expected}");
    // An empty tensor is one mismatch all the same.
    let mut report = OutputReport::unchecked(name, elements.max(1), "");
    report.verdict = Verdict::Fail;
    report.equal_bits = Some(0.0);
    report.mismatches = elements.max(1);
    report.note = None;
    report.diagnosis = Some(Diagnosis { id: id.to_owned(), text, unexplained: 0 });
    report
}
