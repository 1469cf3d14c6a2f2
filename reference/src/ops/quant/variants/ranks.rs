//! Scales of a rank with the rows of all ranks, or of one rank where all are required.

use super::Context;
use crate::judge::compare::elements;
use crate::judge::{Diagnosis, OutputReport, Verdict};
use crate::num::tensor::Tensor;
use crate::ops::quant::QuantConfig;

/// The report on scales with a wrong number of groups, if their values identify the groups;
/// otherwise `None`.
pub(in crate::ops) fn scales_of_a_rank(
    c: &Context<'_>,
    quant: &QuantConfig,
    name: &str,
    found: &Tensor<'_>,
) -> Option<OutputReport> {
    let (experts, cols) = (c.prepared.experts, c.prepared.scales.cols());
    let rows = c.prepared.groups();
    let found_rows = found.len() / (experts * cols).max(1);
    let fits = found_rows * experts * cols == found.len() && found.shape().last() == Some(&cols);
    if !fits || found_rows == rows || found_rows == 0 {
        return None;
    }
    let values = elements(found);
    let right: Vec<u32> = c.prepared.scales.iter_bits().collect();
    let slice = |of: &[u32], per: usize, expert: usize, from: usize, count: usize| {
        of[(expert * per + from) * cols..][..count * cols].to_vec()
    };
    // The rows of the larger table that equal the smaller one, for every expert.
    let (less, more) = (rows.min(found_rows), rows.max(found_rows));
    let at = (0..=more - less).find(|&from| {
        (0..experts).all(|e| match found_rows < rows {
            true => slice(&right, rows, e, from, less) == slice(&values, found_rows, e, 0, less),
            false => slice(&values, found_rows, e, from, less) == slice(&right, rows, e, 0, less),
        })
    })?;
    let range = format!("{at} to {}", at + less - 1);
    let diagnosis = if found_rows < rows {
        let text = format!(
            "the scales are groups {range} of {rows}, a rank's share of K; with act-order its rows may \
             belong to any group, so that every rank needs all of them"
        );
        Diagnosis::explains("scales-sharded", text)
    } else {
        let rank =
            quant.tensor_parallel.map_or(String::new(), |tp| format!(" of rank {}", tp.rank));
        let text = format!(
            "the scales have {found_rows} groups, and only groups {range} are those{rank}: they were \
             not cut along K as the weight was"
        );
        Diagnosis::explains("scales-not-sharded", text)
    };
    let mut report = OutputReport::unchecked(name, right.len(), "");
    report.note = Some(format!(
        "{found_rows} groups for each of {experts} matrices, expected {rows}; found shape {:?}",
        found.shape()
    ));
    report.verdict = Verdict::Fail;
    report.mismatches = values.len().abs_diff(right.len());
    report.equal_bits = Some(0.0);
    report.diagnosis = Some(diagnosis);
    Some(report)
}
