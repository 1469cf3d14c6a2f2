//! Which known mistakes may be the cause of a computed operation's wrong outputs: one that all outputs bear
//! out.

use super::expected::{Computation, Expected, Mistake, made};
use crate::judge::compare::{Candidate, Elements, compared, elements};
use crate::judge::mistake::{Comparison, Strength};
use crate::judge::{Diagnosis, OutputReport, Verdict};
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;

/// The mistakes that explain each output. A mistake that changes a right output, or that does not explain
/// another wrong output which it changes, is none; nor is one whose outputs are zeros, which say nothing of
/// their cause. The best mistakes of an output come first.
pub(super) fn of_outputs<'c, C: Computation>(
    computation: &C,
    pairs: &[(Expected, &Tensor<'_>)],
) -> Vec<Vec<Candidate<'c>>> {
    let mut all: Vec<Vec<Candidate<'c>>> = pairs.iter().map(|_| Vec::new()).collect();
    let found: Vec<Elements> = pairs.iter().map(|(_, found)| elements(found)).collect();
    let is_right = |i: usize| pairs[i].0.elements == found[i];
    if (0..pairs.len()).all(is_right) {
        return all;
    }
    let mistakes = C::mistakes();
    let cost = (mistakes.len().max(1) as f64).log2();
    let mut causes: Vec<(usize, Mistake<C>, Vec<Option<Elements>>)> = Vec::new();
    for mistake in mistakes {
        let Some(wrong) = made(computation, &mistake) else { continue };
        if let Some((unexplained, changed)) = predicted(wrong, pairs, &found, cost) {
            causes.push((unexplained, mistake, changed));
        }
    }
    // Stable: of equals, the first in the list.
    causes.sort_by_key(|(unexplained, ..)| *unexplained);
    for (_, mistake, changed) in causes {
        for (i, elements) in changed.into_iter().enumerate() {
            let Some(elements) = elements.filter(|_| !is_right(i)) else { continue };
            let text = mistake.text.clone();
            all[i].push(Candidate::of(mistake.id, text, move || Some(elements.clone())));
        }
    }
    all
}

/// The values that a mistake leaves unexplained, and the outputs that it changes; `None` if an output
/// contradicts it.
fn predicted(
    wrong: Vec<Expected>,
    pairs: &[(Expected, &Tensor<'_>)],
    found: &[Elements],
    cost: f64,
) -> Option<(usize, Vec<Option<Elements>>)> {
    let mut pooled = Comparison::default();
    let mut changed = Vec::with_capacity(pairs.len());
    let mut wrong: Vec<Option<Expected>> = wrong.into_iter().map(Some).collect();
    for ((expected, tensor), found) in pairs.iter().zip(found) {
        let of_output =
            wrong.iter_mut().find(|o| o.as_ref().is_some_and(|o| o.name == expected.name));
        let made = of_output.and_then(Option::take).map(|o| o.elements);
        let made = made.filter(|made| *made != expected.elements);
        let Some(made) = made else {
            changed.push(None);
            continue;
        };
        if made.len() != found.len() || made.len() > 1 && made.iter().all(|&bits| bits == 0) {
            return None;
        }
        let widths = [expected.form.width, tensor.dtype().bits() as u32];
        let one = compared(widths, [&expected.elements, &made, found]);
        if one.broken > 0 || one.unexplained * 10 > one.explained + one.unexplained {
            return None;
        }
        pooled.explained += one.explained;
        pooled.unexplained += one.unexplained;
        pooled.evidence += one.evidence;
        pooled.changed += one.changed;
        pooled.total += one.total;
        changed.push(Some(made));
    }
    let outcome = pooled.outcome(cost)?;
    Some((outcome.unexplained, changed))
}

/// Explains wrong outputs without a known mistake: one may be right for another wrong one, and scales may be
/// too large or too small.
pub(super) fn follow<C: Computation>(
    case: &Case<'_>,
    computation: &C,
    reports: &mut [OutputReport],
) {
    let is_open = |r: &OutputReport| {
        let known = r.diagnosis.as_ref().is_some_and(|d| d.strength != Strength::Place);
        r.verdict == Verdict::Fail && !known
    };
    let wrong: Vec<String> =
        reports.iter().filter(|r| is_open(r)).map(|r| r.name.clone()).collect();
    for source in &wrong {
        let Some(found) = case.output(source) else { continue };
        let made = computation.following(source, &elements(found));
        let Some(made) = made.and_then(|made| made.outputs().ok()) else { continue };
        for report in reports.iter_mut().filter(|r| r.name != *source && is_open(r)) {
            let follows = |o: &&Expected| {
                o.name == report.name
                    && case.output(&o.name).is_some_and(|t| elements(t) == o.elements)
            };
            if made.iter().any(|o| follows(&o)) {
                let text = format!("right for the values of out.{source}, which are wrong");
                report.diagnosis = Some(Diagnosis::explains("follows-other-output", text));
            }
        }
    }
    for report in reports.iter_mut().filter(|r| is_open(r)) {
        let (Some(found), Some(place)) = (case.output(&report.name), &mut report.diagnosis) else {
            continue;
        };
        let right = computation.outputs().ok().and_then(|all| {
            all.into_iter().find(|o| o.name == report.name && o.dtype == DType::F32)
        });
        if let Some(text) = right.and_then(|right| ratios(&right.elements, &elements(found))) {
            place.text = format!("{}; {text}", place.text);
        }
    }
}

/// By how much wrong f32 values are too large, or too small, if all are one of both.
fn ratios(right: &[u32], found: &[u32]) -> Option<String> {
    let pairs = right.iter().zip(found).filter(|(right, found)| right != found);
    let ratio = |(&right, &found): (&u32, &u32)| {
        f64::from(f32::from_bits(found)) / f64::from(f32::from_bits(right))
    };
    let all: Vec<f64> = pairs.map(ratio).collect();
    let least = all.iter().copied().fold(f64::INFINITY, f64::min);
    let largest = all.iter().copied().fold(0.0, f64::max);
    let is_number = all.iter().all(|r| r.is_finite() && *r > 0.0);
    let one_way = least > 1.0 || largest < 1.0;
    (is_number && one_way && !all.is_empty()).then(|| match all.len() {
        1 => format!("{least:.4} times the right value"),
        _ => format!("each is {least:.4} to {largest:.4} times the right value"),
    })
}
