//! Checks before the outputs of a case are recomputed: limits, and outputs of a wrong type or
//! shape.

use super::{CaseReport, Declared, Diagnosis, OutputReport, Verdict, recompute};
use crate::case::{Case, Limits, Misfit, MisfitKind};
use crate::num::tensor::Tensor;
use crate::{Error, Result};

/// As [`check_case_as`](super::check_case_as), within `limits`.
///
/// Outputs of a wrong type or shape fail. The others are judged as if the case lacked those
/// outputs; an output that would be judged from one of them passes or is unchecked.
///
/// # Errors
/// As [`check_case_as`](super::check_case_as).
pub fn check_case_within(
    case: &Case<'_>,
    declared: &Declared,
    limits: &Limits,
) -> Result<CaseReport> {
    let Some((fitting, failed)) = without_misfits(case)? else {
        limits.check(case)?;
        return recompute(case, declared);
    };
    limits.check(&fitting)?;
    let others = match recompute(&fitting, declared) {
        Ok(report) => report.outputs,
        // An output that the others are judged from has a wrong shape and was removed.
        Err(error @ (Error::Missing { .. } | Error::Unsupported { .. })) => {
            let note = format!("outputs of a wrong shape were left out, and then {error}");
            let unchecked = |(name, tensor): (&String, &Tensor<'_>)| {
                OutputReport::unchecked(name, tensor.len(), &note)
            };
            fitting.outputs.iter().map(unchecked).collect()
        }
        Err(error) => return Err(error),
    };
    Ok(CaseReport::new(case, beside_misfits(&fitting, failed, others)))
}

/// The reports on all outputs of a case. A failed output that would be judged from an output of a
/// wrong shape becomes unchecked, because that output may be the cause.
///
/// `fitting` is the case without the failed `misfits`.
pub fn beside_misfits(
    fitting: &Case<'_>,
    misfits: Vec<OutputReport>,
    others: Vec<OutputReport>,
) -> Vec<OutputReport> {
    let judge = |report: OutputReport| {
        if report.verdict != Verdict::Fail {
            return report;
        }
        let Some(source) = misfit_source(fitting, &misfits, &report.name) else { return report };
        let note = format!(
            "judged from `{source}`, which has a wrong type or shape; recomputed without it, {} \
             values are wrong, and that may be its error",
            report.mismatches
        );
        OutputReport::unchecked(&report.name, report.elements, &note)
    };
    let others: Vec<OutputReport> = others.into_iter().map(judge).collect();
    [misfits, others].concat()
}

/// The misfit that output `name` would be judged from, directly or through outputs that the case
/// lacks.
fn misfit_source(fitting: &Case<'_>, misfits: &[OutputReport], name: &str) -> Option<String> {
    let (prefix, bare) = match name {
        _ if name.starts_with("w13_") => name.split_at("w13_".len()),
        _ if name.starts_with("w2_") => name.split_at("w2_".len()),
        _ => ("", name),
    };
    let sources: &[&str] = match bare {
        "marlin_qweight" => &["g_idx_sort_indices"],
        "topk_weights" | "expert_ids" => &["topk_ids"],
        "sorted_token_ids" | "num_tokens_post_padded" => &["topk_ids", "expert_ids"],
        "gate_up" => &["topk_ids", "topk_weights", "w13_g_idx_sort_indices", "a1q", "a1q_scale"],
        "activated" => &["gate_up"],
        "a2q" | "a2q_scale" => &["activated"],
        "down" => {
            &["activated", "topk_ids", "topk_weights", "w2_g_idx_sort_indices", "a2q", "a2q_scale"]
        }
        "y" => &["down", "lhs_packed", "rhs_packed", "g_idx_sort_indices"],
        "x_fp4" => &["x_scale"],
        "x_scale" => &["x_fp4"],
        _ => &[],
    };
    sources.iter().find_map(|source| {
        let source = format!("{prefix}{source}");
        if misfits.iter().any(|m| m.name == source) {
            return Some(source);
        }
        let absent = !fitting.outputs.contains_key(&source);
        absent.then(|| misfit_source(fitting, misfits, &source)).flatten()
    })
}

/// The case without its [`Case::misfits`], and their verdicts; `None` if all outputs fit.
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
    let (id, why) = match kind {
        MisfitKind::Dtype => ("wrong-dtype", ""),
        MisfitKind::ShardedScales => (
            "scales-sharded",
            "; the scales were cut to the groups of this rank's rows, but with act-order a row may \
             belong to any group, so each rank keeps the scales of the whole matrix",
        ),
        MisfitKind::UnshardedScales => (
            "scales-not-sharded",
            "; the scales are those of all ranks: they were not cut along K as the weight was",
        ),
        _ => ("wrong-shape", ""),
    };
    let text = format!("found {found}, expected {expected}{why}");
    // An empty tensor counts as one mismatch.
    let mut report = OutputReport::unchecked(name, elements.max(1), "");
    report.verdict = Verdict::Fail;
    report.equal_bits = Some(0.0);
    report.mismatches = elements.max(1);
    report.note = None;
    report.diagnosis = Some(Diagnosis::explains(id, text));
    report
}
