//! Products whose case declares a schedule: compared bit for bit.

use std::collections::HashMap;

use super::compare::{Mismatch, elements};
use super::mistake::{Comparison, Outcome};
use super::pattern::{self, Values};
use super::power::Power;
use super::{Diagnosis, OutputReport, Verdict};
use crate::Result;
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::products::schedule::{Extras, Related, Schedule, ScheduleChoice, ScheduleError, Stack};
use crate::products::tensor_core::LANES;
use crate::weight::Weight;

/// The inputs of a product `[M, N]`, as recorded by the previous stage.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    /// `[M, K]` codes of type `input`, zero-extended.
    pub(crate) x: &'a [u32],
    /// Type of the activations that enter the product.
    pub(crate) input: ScalarType,
    /// Type of the output.
    pub(crate) dtype: ScalarType,
    /// One matrix, or a stack with an expert for each row.
    pub(crate) weights: &'a [Weight<'a>],
    /// `[M]`, for a stack: each row's expert; `None` gives zeros.
    pub(crate) expert_of: Option<&'a [Option<usize>]>,
    /// For each matrix the permutation that sorts its `g_idx`.
    pub(crate) orders: Option<&'a [Vec<u32>]>,
    /// `[M]`, or `[M, groups]`.
    pub(crate) activation_scales: Option<&'a [f32]>,
    /// `[M]`.
    pub(crate) router_weights: Option<&'a [f32]>,
}

impl<'a> Product<'a> {
    /// The activation scales of row `m`.
    pub(crate) fn scales_of(&self, m: usize) -> Option<&'a [f32]> {
        let all = self.activation_scales?;
        let per = all.len() / (self.x.len() / self.size_k()).max(1);
        all.get(m * per..(m + 1) * per)
    }

    fn size_k(&self) -> usize {
        self.weights.first().map_or(1, |w| w.shape().size_k.max(1))
    }

    /// # Errors
    /// As [`Schedule::expect_applied`], for every matrix.
    pub(crate) fn expect_applied(&self, schedule: &Schedule) -> Result<(), ScheduleError> {
        let extras = Extras {
            activation_scales: self.activation_scales,
            router_weights: self.router_weights,
            order: None,
        };
        self.weights.iter().try_for_each(|weight| schedule.expect_applied(weight, extras))
    }

    pub(crate) fn execute(&self, schedule: &Schedule) -> Result<Vec<u32>> {
        let rows: Vec<usize> = (0..self.x.len() / self.size_k()).collect();
        self.execute_part(schedule, &rows, |_| true)
    }

    /// Computes the outputs of some rows as in the whole product; columns that are not wanted are
    /// 0.
    fn execute_part(
        &self,
        schedule: &Schedule,
        rows: &[usize],
        wanted: impl Fn(usize) -> bool,
    ) -> Result<Vec<u32>> {
        let size_k = self.size_k();
        let all = rows.len() * size_k == self.x.len();
        let x: Vec<u32> = match all {
            true => Vec::new(),
            false => rows.iter().flat_map(|m| &self.x[m * size_k..][..size_k]).copied().collect(),
        };
        let x = if all { self.x } else { &x };
        let scales: Option<Vec<&[f32]>> = rows.iter().map(|&m| self.scales_of(m)).collect();
        let scales = scales.filter(|_| self.activation_scales.is_some()).map(|s| s.concat());
        let router: Option<Vec<f32>> =
            self.router_weights.map(|r| rows.iter().map(|&m| r[m]).collect());
        let extras = Extras {
            activation_scales: scales.as_deref(),
            router_weights: router.as_deref(),
            order: None,
        };
        let expert_of: Vec<Option<usize>> =
            rows.iter().map(|&m| self.expert_of.map_or(Some(0), |e| e[m])).collect();
        let stack = Stack {
            weights: self.weights,
            expert_of: &expert_of,
            orders: self.orders,
            places: Some(rows),
        };
        schedule.execute_columns(x, stack, extras, wanted)
    }
}

/// Compares `found` `[M, N]` bit for bit with the declared schedule. An output that differs is
/// compared with related schedules; if none explains it, `bounded` judges it by its bounds.
///
/// # Errors
/// Returns an error if the schedule does not fit the product, as [`Schedule::execute_stack`], or drops
/// one of its operands.
pub(crate) fn judge(
    name: &str,
    found: &Tensor<'_>,
    product: Product<'_>,
    choice: &ScheduleChoice,
    bounded: impl FnOnce() -> Result<Option<OutputReport>>,
) -> Result<OutputReport> {
    let schedule = choice.resolve(product.weights, product.dtype, product.input)?;
    if schedule.output_type() != product.dtype {
        let (gives, says) = (schedule.output_type(), product.dtype);
        return Err(ScheduleError::Value {
            key: "epilogue".to_owned(),
            found: format!("an output of {gives}"),
            expected: format!("{says}, the type of `{}`", found.name()),
        }
        .into());
    }
    product.expect_applied(&schedule)?;
    let expected = product.execute(&schedule)?;
    let bits = elements(found);
    let size_n = product.weights.first().map_or(1, |w| w.shape().size_n.max(1));
    let mut report = OutputReport::unchecked(name, bits.len(), "");
    report.note = Some("compared for every bit with the declared schedule".to_owned());
    report.verdict = Verdict::Pass;
    report.equal_bits = Some(1.0);
    report.max_ulp = Some(0.0);
    report.power = Some(Power::every_bit());
    if bits == expected {
        return Ok(report);
    }
    let ulps = |i: usize| product.dtype.steps(bits[i], expected[i]);
    let differing: Vec<usize> = (0..bits.len()).filter(|&i| bits[i] != expected[i]).collect();
    let first = differing[0];
    let (m, n) = (first / size_n, first % size_n);
    report.verdict = Verdict::Fail;
    report.mismatches = differing.len();
    report.equal_bits = Some((bits.len() - differing.len()) as f64 / bits.len() as f64);
    report.max_ulp = Some(differing.iter().map(|&i| ulps(i)).fold(0.0, f64::max));
    let expert = product.expert_of.and_then(|e| e[m]);
    let width = product.dtype.size_bits();
    report.first_mismatch =
        Some(Mismatch::element(vec![m, n], width, expert, Some(n), expected[first], bits[first]));
    report.diagnosis = diagnose(&product, &schedule, &expected, &bits, &differing, size_n);
    if report.diagnosis.is_none() {
        let (ty, cols) = (product.dtype, size_n);
        let values = Values { ty, cols, found: &bits, expected: &expected, wrong: &differing };
        pattern::explain(&mut report, &values, bounded()?);
        if report.diagnosis.as_ref().is_some_and(|d| d.id == "within-bound")
            && let Some(text) = rows_differ(&product, &bits, size_n)
        {
            report.diagnosis = Some(Diagnosis::explains("rows-differ", text));
        }
    }
    Ok(report)
}

/// Everything that determines a row's results: activations, expert, bits of its scales and router
/// weight.
type RowInputs<'a> = (&'a [u32], Option<usize>, Vec<u32>, u32);

/// Two rows of the same activations, expert and factors whose results differ.
fn rows_differ(product: &Product<'_>, found: &[u32], size_n: usize) -> Option<String> {
    let size_k = product.size_k();
    let mut seen: HashMap<RowInputs<'_>, usize> = HashMap::new();
    for (row, x) in product.x.chunks_exact(size_k).enumerate() {
        let expert = product.expert_of.and_then(|e| e[row]);
        let scales = product.scales_of(row).unwrap_or_default();
        let scales = scales.iter().map(|s| s.to_bits()).collect();
        let router = product.router_weights.map_or(0, |r| r[row].to_bits());
        let first = *seen.entry((x, expert, scales, router)).or_insert(row);
        let of = |row: usize| &found[row * size_n..][..size_n];
        if let Some(n) = (0..size_n).find(|&n| of(first)[n] != of(row)[n]) {
            return Some(format!(
                "rows {first} and {row} have the same activations and different results, first at n \
                 {n}, all of them right numbers: sums are added in an order that depends on the row or \
                 on time (not batch-invariant, or atomics)"
            ));
        }
    }
    None
}

/// Number of differing rows, and of column runs in them, that are recomputed with every related
/// schedule.
const SAMPLE_ROWS: usize = 4;
const SAMPLE_COLUMNS: usize = 4;
/// Largest number of candidates that are recomputed completely.
const WHOLE_CANDIDATES: usize = 24;

/// The related schedule that gives the found bits, or nine tenths of the differing values and every
/// equal one.
fn diagnose(
    product: &Product<'_>,
    declared: &Schedule,
    expected: &[u32],
    found: &[u32],
    differing: &[usize],
    size_n: usize,
) -> Option<Diagnosis> {
    let mut rows: Vec<usize> = differing.iter().map(|i| i / size_n).collect();
    rows.dedup();
    rows.truncate(SAMPLE_ROWS);
    let column = |n: usize| n / LANES * LANES;
    let mut columns: Vec<usize> = Vec::new();
    for i in differing.iter().filter(|&i| rows.contains(&(i / size_n))) {
        let n = column(i % size_n);
        if columns.len() < SAMPLE_COLUMNS && !columns.contains(&n) {
            columns.push(n);
        }
    }
    let sample: Vec<u32> =
        rows.iter().flat_map(|m| &found[m * size_n..][..size_n]).copied().collect();
    let unexplained = |made: &[u32], found: &[u32], columns: Option<&[usize]>| {
        let wanted = |i: usize| columns.is_none_or(|c| c.contains(&column(i % size_n)));
        let pairs = made.iter().zip(found).enumerate();
        pairs.filter(|(i, (a, b))| a != b && wanted(*i)).count()
    };
    let mut candidates = declared.related(product.size_k());
    if let Some(weight) = product.weights.first() {
        candidates.extend(Schedule::upstream(weight, product.dtype, product.input));
    }
    // Candidates that explain the sample best are compared completely.
    let mut left: Vec<(usize, &Related)> = Vec::new();
    for candidate in &candidates {
        let wanted = |n| columns.contains(&n);
        if let Ok(made) = product.execute_part(&candidate.schedule, &rows, wanted) {
            left.push((unexplained(&made, &sample, Some(&columns)), candidate));
        }
    }
    let cost = (left.len().max(1) as f64).log2();
    let in_sample =
        |i: &&usize| rows.contains(&(*i / size_n)) && columns.contains(&column(*i % size_n));
    let sampled = differing.iter().filter(in_sample).count();
    left.retain(|&(left, _)| left * 10 <= sampled);
    left.sort_by_key(|&(left, _)| left);
    let mut best: Option<(Outcome, &Related)> = None;
    for &(_, candidate) in left.iter().take(WHOLE_CANDIDATES) {
        let made = product.execute(&candidate.schedule).ok()?;
        let Some(outcome) = compared(product.dtype, expected, &made, found).outcome(cost) else {
            continue;
        };
        if outcome.beats(best.map(|b| b.0)) {
            best = Some((outcome, candidate));
        }
        if outcome.is_final() {
            break;
        }
    }
    best.map(|(outcome, related)| outcome.named(related.id, &related.text))
}

/// Compares the output with another schedule bit for bit. Another order of additions moves a result
/// by a few units in the last place, so a match is worth one bit, plus one for each doubling of the
/// distance.
fn compared(ty: ScalarType, expected: &[u32], made: &[u32], found: &[u32]) -> Comparison {
    let mut all = Comparison { total: found.len(), ..Comparison::default() };
    for ((&e, &m), &f) in expected.iter().zip(made).zip(found) {
        all.changed += usize::from(m != e);
        match (f == e, m == f) {
            (true, _) => all.broken += usize::from(m != e),
            (false, true) => {
                all.explained += 1;
                all.evidence += 1.0 + ty.steps(f, e).max(1.0).log2().min(10.0);
            }
            (false, false) => all.unexplained += 1,
        }
    }
    all
}
