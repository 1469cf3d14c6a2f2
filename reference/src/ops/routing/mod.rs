//! Verdicts on routing: expert ids, router weights, blocks of tokens.

pub(in crate::ops) mod align;
pub(in crate::ops) mod block;
pub(in crate::ops) mod families;
mod ids;
mod logits;
mod rows;
pub(in crate::ops) mod stated;
pub(in crate::ops) mod tokens;
mod weights;

use rows::Arranged;
pub use rows::TopkOrder;

use crate::formats::float_type;
use crate::judge::compare::Mismatch;
use crate::judge::picture::Picture;
use crate::judge::{Diagnosis, OutputReport, Verdict};
use crate::moe::ScoringFunc;
use crate::moe::bound::{Bounds, Roundings};
use crate::moe::router::{Router, Routing, token_expert_indices};
use crate::num::array::rows_of;
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::ops::case::Case;
use crate::{Error, Result};

/// The router and logits of a case, and the reference's routing.
struct Context<'c> {
    router: Router<'c>,
    logits: &'c [f32],
    experts: usize,
    routing: Routing,
    bounds: Vec<Bounds>,
}

impl<'c> Context<'c> {
    fn new(router: Router<'c>, logits: &'c [f32], experts: usize) -> Result<Self> {
        let routing = router.route(rows_of("router_logits", logits, experts)?)?;
        let rows = logits.chunks_exact(experts);
        let bounds = rows.map(|row| Bounds::new(&router, row)).collect();
        Ok(Self { router, logits, experts, routing, bounds })
    }

    fn rows(&self) -> usize {
        self.bounds.len()
    }

    fn round(&mut self, roundings: Roundings) {
        self.bounds.iter_mut().for_each(|bound| bound.set_roundings(roundings));
    }
}

/// Judges `token_expert_indices`, if present.
pub(in crate::ops) fn entries(
    case: &Case<'_>,
    logits: &Tensor<'_>,
    top_k: usize,
) -> Result<Option<OutputReport>> {
    let Some(found) = case.output("token_expert_indices") else { return Ok(None) };
    let [rows, _] = logits.dims2()?;
    let expected = token_expert_indices(rows, top_k);
    let report = exact("token_expert_indices", found, &expected, |row| {
        format!("entry (token, j) is j times the number of tokens plus the token; {row}")
    })?;
    Ok(Some(report))
}

/// `topk_ids` and `topk_weights` of the case, or routed from its logits.
///
/// # Errors
/// Returns an error if one is neither stated nor can be routed, or if the logits are invalid.
pub(in crate::ops) fn stated_or_routed(
    case: &Case<'_>,
    router: &Router<'_>,
    num_experts: usize,
) -> Result<(Vec<i32>, Vec<f32>)> {
    let ids = case.output("topk_ids").map(|t| t.elements::<i32>().into_owned());
    let weights = case.output("topk_weights").map(|t| t.elements::<f32>().into_owned());
    let (ids, weights) = match (ids, weights) {
        (Some(ids), Some(weights)) => return Ok((ids, weights)),
        lacking => lacking,
    };
    let Some(logits) = case.inputs.get("router_logits") else {
        let what = if ids.is_none() { "topk_ids" } else { "topk_weights" };
        return Err(Error::unsupported(format!("a layer without {what}"), "router_logits"));
    };
    let values = logits.elements::<f32>();
    let routed = router.route(rows_of("router_logits", &values, num_experts)?)?;
    let ids = ids.unwrap_or_else(|| routed.topk_ids.into_raw_vec_and_offset().0);
    Ok((ids, weights.unwrap_or_else(|| routed.topk_weights.into_raw_vec_and_offset().0)))
}

/// Judges `topk_ids` and `topk_weights`, if present. Kernels of grouped top-k round the scores of 16-bit
/// logits to the logits' type, as torch does, or keep f32, as upstream's CUDA operator does: both are
/// right, and the one that leaves fewer wrong values is reported. After 16-bit scores, weights may be
/// rounded as [`Roundings`] describes.
pub(in crate::ops) fn topk(
    case: &Case<'_>,
    router: Router<'_>,
    logits: &[f32],
    tensor: &Tensor<'_>,
) -> Result<Vec<OutputReport>> {
    topk_in(case, router, logits, tensor, TopkOrder::Sorted)
}

/// [`topk`] with entries in `order`. Ids of padding rows, whose logits order no experts, must be distinct
/// experts; their weights are not compared.
pub(in crate::ops) fn topk_in(
    case: &Case<'_>,
    router: Router<'_>,
    logits: &[f32],
    tensor: &Tensor<'_>,
    order: TopkOrder,
) -> Result<Vec<OutputReport>> {
    let [_, experts] = tensor.dims2()?;
    let padding = rows::padding(logits, experts, router.scoring_func == ScoringFunc::Sigmoid);
    if padding.is_empty() && order == TopkOrder::Sorted {
        return by_either_rule(case, router, logits, experts);
    }
    let logits = rows::without_padding(logits, experts, &padding);
    let routing = router.route(rows_of("router_logits", &logits, experts)?)?;
    let routed = routing.routed()?;
    let expected = (routed.ids(), routed.weights());
    let arranged = Arranged::new(case, padding, order, expected, router.top_k)?;
    let mut reports = by_either_rule(&arranged.case, router, &logits, experts)?;
    arranged.restore(case, experts, &mut reports);
    Ok(reports)
}

fn by_either_rule(
    case: &Case<'_>,
    router: Router<'_>,
    logits: &[f32],
    experts: usize,
) -> Result<Vec<OutputReport>> {
    let rounded = by_rule(case, router.clone(), logits, experts)?;
    let wrong = |reports: &[OutputReport]| reports.iter().map(|r| r.mismatches).sum::<usize>();
    if wrong(&rounded) == 0 || router.score_type() == ScalarType::FLOAT32 {
        return Ok(rounded);
    }
    let router = Router { logits_type: ScalarType::FLOAT32, ..router };
    let mut kept = by_rule(case, router, logits, experts)?;
    if wrong(&kept) >= wrong(&rounded) {
        return Ok(rounded);
    }
    for report in &mut kept {
        let text = "scores kept in f32";
        report.note = Some(report.note.take().map_or(text.into(), |n| format!("{text}; {n}")));
    }
    Ok(kept)
}

fn by_rule(
    case: &Case<'_>,
    router: Router<'_>,
    logits: &[f32],
    experts: usize,
) -> Result<Vec<OutputReport>> {
    let (ids, weights) = (case.output("topk_ids"), case.output("topk_weights"));
    if ids.is_none() && weights.is_none() {
        return Ok(Vec::new());
    }
    let mut context = Context::new(router, logits, experts)?;
    let mut reports = Vec::new();
    let mut ids_fail = false;
    if let Some(found) = ids {
        let report = ids::judge(&context, found)?;
        ids_fail = report.verdict == Verdict::Fail;
        reports.push(report);
    }
    if let Some(found) = weights {
        reports.push(weights::judge(&mut context, found, ids, ids_fail)?);
    }
    Ok(reports)
}

/// 16-bit or f32 logits as f32, and their type.
pub(in crate::ops) fn widened(logits: &Tensor<'_>) -> Result<(Vec<f32>, ScalarType)> {
    let ty = float_type(logits.dtype())
        .ok_or_else(|| Error::dtype(logits.name(), logits.dtype(), "F32, F16 or BF16"))?;
    let wide = |bits: u32| ty.to_f64(bits) as f32;
    let values = match logits.dtype().bytes() {
        2 => logits.elements::<u16>().iter().map(|&b| wide(b.into())).collect(),
        _ => logits.elements::<f32>().into_owned(),
    };
    Ok((values, ty))
}

/// A passing report on `elements` values.
fn passing(name: &str, elements: usize) -> OutputReport {
    let mut report = OutputReport::unchecked(name, elements, "");
    report.note = None;
    report.verdict = Verdict::Pass;
    report.equal_bits = Some(1.0);
    report
}

/// One wrong 32-bit value of a list or matrix.
fn mismatch(index: Vec<usize>, expert: Option<usize>, expected: u32, found: u32) -> Mismatch {
    Mismatch::element(index, 32, expert, None, expected, found)
}

/// Marks the wrong values of a `rows` × `cols` picture.
fn picture(label: &'static str, rows: usize, cols: usize, wrong: &[usize]) -> Picture {
    let mut picture = Picture::new(label, 1, [rows, cols]);
    for &i in wrong {
        picture.add(0, [rows, cols], i / cols.max(1), i % cols.max(1), i);
    }
    picture
}

/// Judges an integer output exactly. `explain` receives the place of the first mismatch.
fn exact(
    name: &str,
    found: &Tensor<'_>,
    expected: &[i32],
    explain: impl Fn(String) -> String,
) -> Result<OutputReport> {
    let values = found.elements::<i32>();
    let mut report = passing(name, expected.len());
    let [rows, cols] = found.dims2().unwrap_or([1, expected.len()]);
    if values.len() != expected.len() {
        report.verdict = Verdict::Fail;
        report.mismatches = values.len().abs_diff(expected.len());
        let same = values.iter().zip(expected).filter(|(f, e)| f == e).count();
        report.equal_bits = Some(same as f64 / expected.len().max(values.len()).max(1) as f64);
        let text = format!("{} values where {} belong", values.len(), expected.len());
        report.diagnosis = Some(Diagnosis::place("length", text, report.mismatches));
        return Ok(report);
    }
    let wrong: Vec<usize> = (0..values.len()).filter(|&i| values[i] != expected[i]).collect();
    let Some(&first) = wrong.first() else { return Ok(report) };
    report.verdict = Verdict::Fail;
    report.mismatches = wrong.len();
    report.equal_bits = Some(1.0 - wrong.len() as f64 / values.len() as f64);
    let index = crate::formats::unflatten(found.shape(), first);
    let place = format!("{} found at {index:?}, {} expected", values[first], expected[first]);
    report.first_mismatch =
        Some(mismatch(index, None, expected[first] as u32, values[first] as u32));
    let text = explain(place);
    report.diagnosis = Some(Diagnosis::place(format!("{name}-values"), text, wrong.len()));
    report.picture = Some(picture("row", rows, cols, &wrong));
    Ok(report)
}
