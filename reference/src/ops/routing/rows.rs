//! Rows of a routing that are not compared as they stand: padding, whose logits order no experts, and
//! tokens whose entries may be in any order.

use std::borrow::Cow;

use crate::judge::{Diagnosis, OutputReport, Verdict};
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::{Error, Result};

/// The order of a token's entries in `topk_ids` and `topk_weights`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TopkOrder {
    /// By falling score.
    #[default]
    Sorted,
    /// Any order, the same in both: `torch.topk(sorted=False)`.
    Any,
}

impl TopkOrder {
    /// Every order with its name.
    pub const NAMED: &'static [(&'static str, Self)] =
        &[("sorted", Self::Sorted), ("any", Self::Any)];
}

/// The rows whose logits order no experts: with NaN or +∞, or −∞ only where that has no score. CUDA
/// graphs leave such rows as padding. `masks` states whether a row of −∞ has scores.
pub(super) fn padding(logits: &[f32], experts: usize, masks: bool) -> Vec<usize> {
    let unordered = |row: &[f32]| {
        let masked = || row.iter().all(|x| *x == f32::NEG_INFINITY);
        row.iter().any(|x| x.is_nan() || *x == f32::INFINITY) || !masks && masked()
    };
    let rows = logits.chunks_exact(experts.max(1)).enumerate();
    rows.filter(|(_, row)| unordered(row)).map(|(t, _)| t).collect()
}

/// `logits` whose `padding` is zero.
pub(super) fn without_padding<'l>(
    logits: &'l [f32],
    experts: usize,
    padding: &[usize],
) -> Cow<'l, [f32]> {
    if padding.is_empty() {
        return Cow::Borrowed(logits);
    }
    let mut logits = logits.to_vec();
    padding.iter().for_each(|&t| logits[t * experts..][..experts].fill(0.0));
    Cow::Owned(logits)
}

/// Ids and weights of a case's rows, arranged so that they can be compared.
pub(super) struct Arranged<'c> {
    /// The case whose padding has the expected entries, and whose other rows are in order.
    pub(super) case: Case<'c>,
    /// The place in the file of each entry.
    places: Vec<usize>,
    padding: Vec<usize>,
    top_k: usize,
    order: TopkOrder,
}

impl<'c> Arranged<'c> {
    /// `expected` are the ids and weights of the logits without padding.
    ///
    /// # Errors
    /// [`Error::Shape`] for outputs of another shape.
    pub(super) fn new(
        case: &Case<'c>,
        padding: Vec<usize>,
        order: TopkOrder,
        expected: (&[i32], &[f32]),
        top_k: usize,
    ) -> Result<Self> {
        let (right_ids, right_weights) = expected;
        let shape = [right_ids.len() / top_k.max(1), top_k];
        let expect = |t: &Tensor<'_>| t.expect_shape(&shape).map(|_| ());
        let (ids, weights) = (case.output("topk_ids"), case.output("topk_weights"));
        ids.map_or(Ok(()), expect)?;
        weights.map_or(Ok(()), expect)?;
        let mut ids = ids.map(|t| t.elements::<i32>().into_owned());
        let mut weights = weights.map(|t| t.elements::<f32>().into_owned());
        let mut places: Vec<usize> = (0..right_ids.len()).collect();
        for t in 0..shape[0] {
            let row = t * top_k..(t + 1) * top_k;
            if padding.contains(&t) {
                if let Some(ids) = &mut ids {
                    ids[row.clone()].copy_from_slice(&right_ids[row.clone()]);
                }
                if let Some(weights) = &mut weights {
                    weights[row.clone()].copy_from_slice(&right_weights[row]);
                }
                continue;
            }
            if order == TopkOrder::Sorted {
                continue;
            }
            let from = match (&ids, &weights) {
                (Some(ids), _) => by_id(&ids[row.clone()], &right_ids[row.clone()]),
                (None, Some(found)) => by_size(&found[row.clone()], &right_weights[row.clone()]),
                (None, None) => continue,
            };
            if let Some(ids) = &mut ids {
                permute(&mut ids[row.clone()], &from);
            }
            if let Some(weights) = &mut weights {
                permute(&mut weights[row.clone()], &from);
            }
            permute(&mut places[row], &from);
        }
        let mut case = case.clone();
        let shape = shape.to_vec();
        if let Some(ids) = ids {
            case.add_output("topk_ids", Tensor::from_vec("", DType::I32, shape.clone(), ids)?);
        }
        if let Some(weights) = weights {
            case.add_output("topk_weights", Tensor::from_vec("", DType::F32, shape, weights)?);
        }
        Ok(Self { case, places, padding, top_k, order })
    }

    /// The reports on the arranged case as reports on `case`: places as in the file, and ids of padding
    /// that are no `experts`, or twice in a row, are wrong.
    pub(super) fn restore(&self, case: &Case<'_>, experts: usize, reports: &mut [OutputReport]) {
        let k = self.top_k.max(1);
        for report in reports {
            if self.order == TopkOrder::Any {
                report.add_note("entries are compared in the order of their scores");
                if let Some(first) = &mut report.first_mismatch
                    && let [t, j] = first.index[..]
                {
                    first.index = vec![t, self.places[t * k + j] % k];
                }
            }
            let rows = self.padding.len();
            if rows == 0 {
                continue;
            }
            let what = match report.name.as_str() {
                "topk_ids" => "their ids are any distinct experts",
                _ => "their weights are not compared",
            };
            report.add_note(&format!("{rows} padding rows, whose logits order no experts: {what}"));
            let found = case.output("topk_ids").filter(|_| report.name == "topk_ids");
            let Some(found) = found.map(|t| t.elements::<i32>()) else { continue };
            self.judge_padding(&found, experts, report);
        }
    }

    /// Adds the wrong ids of padding rows to the report.
    fn judge_padding(&self, found: &[i32], experts: usize, report: &mut OutputReport) {
        let k = self.top_k;
        let mut wrong = Vec::new();
        for &t in &self.padding {
            let row = &found[t * k..][..k];
            for (j, id) in row.iter().enumerate() {
                let in_range = usize::try_from(*id).is_ok_and(|id| id < experts);
                if !in_range || row[..j].contains(id) {
                    wrong.push((t, j, *id, in_range));
                }
            }
        }
        let Some(&(t, j, id, in_range)) = wrong.first() else { return };
        report.verdict = Verdict::Fail;
        report.mismatches += wrong.len();
        if report.first_mismatch.is_none() {
            let expected = (0..experts as i32).find(|e| !found[t * k..][..j].contains(e));
            let expected = expected.unwrap_or_default() as u32;
            report.first_mismatch = Some(super::mismatch(vec![t, j], None, expected, id as u32));
        }
        let what = match in_range {
            true => format!("expert {id} is chosen twice"),
            false => format!("{id} is no expert of {experts}"),
        };
        let text = format!("padding row {t}, entry {j}: {what}; {} wrong ids", wrong.len());
        let place = || Diagnosis::place("padding-row-ids", text, wrong.len());
        report.diagnosis.get_or_insert_with(place);
    }
}

/// For each entry of `right` the entry of `found` with its id; entries without one keep their order.
fn by_id(found: &[i32], right: &[i32]) -> Vec<usize> {
    let mut free: Vec<Option<usize>> = (0..found.len()).map(Some).collect();
    let mut from: Vec<Option<usize>> = vec![None; right.len()];
    for (to, id) in right.iter().enumerate() {
        let place = found.iter().position(|f| f == id).filter(|&p| free[p].is_some());
        from[to] = place.and_then(|p| free[p].take());
    }
    let mut rest = free.into_iter().flatten();
    from.into_iter().map(|place| place.or_else(|| rest.next()).unwrap_or_default()).collect()
}

/// For each entry of `right` the entry of `found` with the same rank by size.
fn by_size(found: &[f32], right: &[f32]) -> Vec<usize> {
    let ranked = |values: &[f32]| {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
        order
    };
    let mut from = vec![0; right.len()];
    for (to, place) in ranked(right).into_iter().zip(ranked(found)) {
        from[to] = place;
    }
    from
}

fn permute<T: Copy>(values: &mut [T], from: &[usize]) {
    let old = values.to_vec();
    values.iter_mut().zip(from).for_each(|(value, &place)| *value = old[place]);
}

/// Refuses padding where a block's own outputs depend on every row.
pub(super) fn refuse_padding(logits: &[f32], experts: usize, padding: &[usize]) -> Result<()> {
    let Some(&t) = padding.first() else { return Ok(()) };
    let row = &logits[t * experts..][..experts];
    let e = row.iter().position(|x| !x.is_finite()).unwrap_or_default();
    Err(Error::value(
        "router_logits",
        &[t, e],
        row[e],
        "a finite number, as the case has a `block`",
    ))
}
