//! Verdicts on stages whose bounds were carried over recomputed stages.

use std::borrow::Cow;

use super::{Stage, Stages, expert, with_expert};
use crate::Result;
use crate::judge::power::{Accepted, Power};
use crate::judge::{Diagnosis, OutputReport, Verdict};
use crate::moe::activation::bound::Bounds;
use crate::moe::layer::carried::CodeRanges;
use crate::moe::{narrow, widen};
use crate::num::interval::{Bound, Interval};
use crate::num::scalar::{self, ScalarType};
use crate::num::tensor::Tensor;
use crate::ops::case::Case;

/// The values of a stage.
pub(crate) enum Values<'c> {
    Bits(Cow<'c, [u16]>),
    Bounds(Vec<Bound>),
}

impl Values<'_> {
    pub(crate) fn bounds(&self, ty: ScalarType) -> Cow<'_, [Bound]> {
        match self {
            Self::Bits(bits) => {
                Cow::Owned(bits.iter().map(|&b| Bound::exactly(ty.to_f64(b.into()))).collect())
            }
            Self::Bounds(bounds) => Cow::Borrowed(bounds),
        }
    }
}

/// What to record where carried bounds are too weak.
pub(crate) const REMEDY: &str = "add `out.gate_up`, and `out.activated` or `out.a2q` and `out.a2q_scale`, and `out.down` to the case";

/// The bounds on `activated`; `fused`: also those of a kernel that quantizes it without rounding it first.
///
/// # Errors
/// As [`Bounds::of_type`].
pub(crate) fn activated_bounds(
    c: &Stages,
    gate_up: &Values<'_>,
    fused: bool,
) -> Result<Vec<Bound>> {
    let (definition, size_i) = (c.definition, c.intermediate_size);
    let rounded = Bounds::of_type(definition, c.dtype)?;
    let exact = Bounds::of_type(definition, ScalarType::FLOAT32)?;
    let gate_up = gate_up.bounds(c.dtype);
    let mut all = Vec::with_capacity(c.size_m * c.top_k * size_i);
    for row in gate_up.chunks_exact(definition.width_in(size_i).max(1)) {
        all.extend((0..size_i).map(|i| {
            let [gate, up] = definition.places(i, size_i).map(|at| &row[at]);
            let own = rounded.of_bounds(gate, up);
            if !fused {
                return own;
            }
            let free = exact.of_bounds(gate, up);
            let interval = match (own.interval.is_empty(), free.interval.is_empty()) {
                (true, true) => Interval::EMPTY,
                (true, false) => free.interval,
                (false, true) => own.interval,
                (false, false) => own.interval.hull(free.interval),
            };
            Bound { interval, nan: own.nan || free.nan, ..own }
        }));
    }
    Ok(all)
}

/// `value` rounded once to FLOAT16 or BFLOAT16.
pub(crate) fn rounded(ty: ScalarType, value: f64) -> u16 {
    match ty {
        _ if value.is_nan() => narrow(ty, f32::NAN),
        ScalarType::FLOAT16 => scalar::f64_to_f16_rne(value),
        _ => scalar::f64_to_bf16_rne(value),
    }
}

/// The median of half the bounds' widths, in steps of `ty`; infinite without a bound.
pub(crate) fn half_width(bounds: &[Bound], ty: ScalarType) -> f64 {
    let mut widths: Vec<f64> = bounds
        .iter()
        .filter(|b| !b.interval.is_empty())
        .map(|b| match b.interval.lo.is_finite() && b.interval.hi.is_finite() {
            true => {
                let [lo, hi] = [b.interval.lo, b.interval.hi].map(|x| rounded(ty, x));
                ty.steps(lo.into(), hi.into()) / 2.0
            }
            false => f64::INFINITY,
        })
        .collect();
    widths.sort_by(f64::total_cmp);
    widths.get(widths.len() / 2).copied().unwrap_or(0.0)
}

/// What the bounds of a stage are for, and where they come from.
pub(crate) struct Origin<'o> {
    /// The class of kernels.
    pub(crate) class: &'o str,
    /// The stage of the case that the bounds were carried from.
    pub(crate) from: &'o str,
    /// What to record or declare if the bounds are too weak.
    pub(crate) remedy: &'static str,
}

/// Compares `found` `[rows, cols]` with the bounds of a stage that earlier stages were carried into.
pub(crate) fn judge(
    case: &Case<'_>,
    c: &Stages,
    (name, cols): (&'static str, usize),
    found: &[u16],
    bounds: (&[Bound], Origin<'_>),
) -> OutputReport {
    judge_with(case, c, (name, cols), found, bounds, &|_, _| None)
}

/// Names the known mistake that explains the wrong values of a stage.
pub(crate) type Known<'k> = &'k dyn Fn(&Stage<'_>, &[usize]) -> Option<Diagnosis>;

/// [`judge`], with the known mistakes of a stage.
pub(crate) fn judge_with(
    case: &Case<'_>,
    c: &Stages,
    (name, cols): (&'static str, usize),
    found: &[u16],
    (bounds, origin): (&[Bound], Origin<'_>),
    known: Known<'_>,
) -> OutputReport {
    let ty = c.dtype;
    let expected = bounds.iter().map(|b| rounded(ty, b.exact)).collect();
    let class = format!(
        "bound: {}, carried from `{}`; median half-width {} steps of {ty}",
        origin.class,
        origin.from,
        half_width(bounds, ty)
    );
    let (class, chain, remedy) = (class.into(), "the exact result", origin.remedy);
    let shape = [found.len() / cols.max(1), cols];
    let stage = Stage { name, class, remedy, ty, found, shape, expected, chain };
    let (mut report, wrong) = stage.judge(|i| bounds[i]);
    let Some(&first) = wrong.first() else { return report };
    let row = first / cols.max(1);
    let of_token = name == "y";
    let expert = if of_token { None } else { expert(case, row) };
    let place = match of_token {
        true => format!("token {row}"),
        false => {
            let top_k = c.top_k.max(1);
            format!("token {}, slot {}{}", row / top_k, row % top_k, with_expert(expert))
        }
    };
    report.first_mismatch = Some(stage.mismatch(first, expert));
    let known = known(&stage, &wrong);
    report.diagnosis = known.or_else(|| Some(stage.pattern_or_place(&wrong, &place)));
    report
}

/// An `activated` that its carried bounds refute is not that of x. A case without `gate_up` may state one of
/// its own, for what follows from it, so it is not judged. If it ends with the quantized rows, rows with
/// infinities or NaN that x cannot give are no output of a layer but the quantizer's input.
pub(crate) fn as_stated(
    case: &Case<'_>,
    report: OutputReport,
    (found, bounds, size_i): (&[u16], &[Bound], usize),
    ty: ScalarType,
) -> OutputReport {
    if report.verdict != Verdict::Fail {
        return report;
    }
    let ends = ["a2q", "a2q_scale"].iter().all(|name| case.output(name).is_some())
        && ["gate_up", "down", "y"].iter().all(|name| case.output(name).is_none());
    let rows = found.chunks(size_i.max(1)).zip(bounds.chunks(size_i.max(1)));
    let rows: Vec<[bool; 2]> = rows
        .map(|(row, bounds)| {
            let value = |bits: u16| f64::from(widen(ty, bits));
            let wrong = |(bits, b): (&u16, &Bound)| !b.allows(widen(ty, *bits));
            let foreign = |(bits, b): (&u16, &Bound)| !value(*bits).is_finite() && wrong((bits, b));
            let pairs = || row.iter().zip(bounds);
            [pairs().any(wrong), pairs().any(foreign)]
        })
        .collect();
    let count = report.mismatches;
    let name = report.name.clone();
    let mut stated = OutputReport::unchecked(&name, report.elements, "");
    if ends && rows.iter().all(|[wrong, foreign]| wrong == foreign) {
        let special = rows.iter().filter(|[_, foreign]| *foreign).count();
        let text = format!(
            "rows with infinities or NaN that `x` does not give ({special}) are the input of the quantizer, of \
             which only the codes and scales were judged; every other row is within the bound"
        );
        report.note.clone_into(&mut stated.note);
        stated.verdict = Verdict::Pass;
        stated.equal_bits = report.equal_bits;
        stated.diagnosis = Some(Diagnosis::explains("quantizer-input", text));
        return stated;
    }
    stated.note = Some(format!(
        "{count} values are not those of `x`: what follows is judged from them; to judge them, add \
         `out.gate_up` to the case"
    ));
    stated
}

/// Compares codes of `ty` and their scales with the ranges that the bounds of their source give.
pub(crate) fn quantized(
    found: [Option<&Tensor<'_>>; 2],
    names: [&str; 2],
    ty: ScalarType,
    ranges: &CodeRanges,
    remedy: &str,
) -> Vec<OutputReport> {
    let mut reports = Vec::new();
    if let Some(codes) = found[0] {
        let values: Vec<f64> = codes.bytes().iter().map(|&b| ty.to_f64(b.into())).collect();
        let of = |(range, exact): (&[f64; 2], &f64)| Accepted {
            exact: *exact,
            lo: range[0],
            hi: range[1],
            nan: false,
        };
        let accepted: Vec<Accepted> = ranges.codes.iter().zip(&ranges.exact).map(of).collect();
        reports.push(within(names[0], &values, &accepted, (ranges.size_k, remedy)));
    }
    if let Some(scales) = found[1] {
        let values: Vec<f64> = scales.elements::<f32>().iter().map(|&s| s.into()).collect();
        let of = |range: &[f32; 3]| {
            let [lo, exact, hi] = range.map(f64::from);
            Accepted { exact, lo, hi, nan: false }
        };
        // A scale for all rows is judged by the first.
        let accepted: Vec<Accepted> = ranges.scales.iter().take(values.len()).map(of).collect();
        reports.push(within(names[1], &values, &accepted, (values.len(), remedy)));
    }
    reports
}

/// Compares values with the ranges that they must be in.
fn within(
    name: &str,
    values: &[f64],
    accepted: &[Accepted],
    (cols, remedy): (usize, &str),
) -> OutputReport {
    let pairs = || values.iter().zip(accepted);
    let wrong: Vec<usize> =
        pairs().enumerate().filter(|(_, (v, a))| !a.accepts(**v)).map(|(i, _)| i).collect();
    let equal = pairs().filter(|(v, a)| **v == a.exact).count();
    let open = accepted.iter().filter(|a| a.lo < a.hi).count();
    let mut report = OutputReport::unchecked(name, values.len(), "");
    report.equal_bits = Some(equal as f64 / values.len().max(1) as f64);
    report.mismatches = wrong.len();
    report.verdict = if wrong.is_empty() { Verdict::Pass } else { Verdict::Fail };
    report.note = Some(format!(
        "between the values that the bounds of `activated` give, which the case lacks; {open} of {} \
         may have more than one",
        accepted.len()
    ));
    let gaps = Power::of(accepted, cols, ScalarType::FLOAT32).gaps();
    if report.verdict == Verdict::Pass && !gaps.is_empty() {
        report.verdict = Verdict::Unchecked;
        report.add_note(&format!("the bound would accept {}; {remedy}", gaps.join(", ")));
    }
    if let Some(&first) = wrong.first() {
        let cols = cols.max(1);
        let text = format!(
            "{} of {} values; the first, at [{}, {}], is {} where {} to {} belongs",
            wrong.len(),
            values.len(),
            first / cols,
            first % cols,
            values[first],
            accepted[first].lo,
            accepted[first].hi,
        );
        report.diagnosis = Some(Diagnosis::place("outside-bound", text, wrong.len()));
    }
    report
}
