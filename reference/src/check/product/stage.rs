//! One product of a case, judged.

use super::Declared;
use super::diagnose::{self, Hints, Scene};
use crate::Result;
use crate::check::compare::{Mismatch, elements};
use crate::check::picture::{Cause, ErrorMap, Picture};
use crate::check::{OutputReport, Verdict};
use crate::gemm::{Bounded, Extras, Judge, Recipe, Rows};
use crate::scalar::ScalarType;
use crate::tensor::Tensor;
use crate::weight::Weight;

/// Rows that are multiplied with one matrix.
pub(in crate::check) struct Part<'c> {
    pub(in crate::check) weight: &'c Weight<'c>,
    /// Which rows of the output.
    pub(in crate::check) rows: Vec<usize>,
    /// The expert's place among the rank's, in a layer.
    pub(in crate::check) expert: Option<usize>,
    /// The expert's id among all.
    pub(in crate::check) global: usize,
}

/// A product of a case.
pub(in crate::check) struct Stage<'c> {
    /// Output.
    pub(in crate::check) name: &'static str,
    pub(in crate::check) found: &'c Tensor<'c>,
    /// Activations of each output row.
    pub(in crate::check) rows: Rows,
    pub(in crate::check) radius: Option<Rows>,
    /// Rows that no part has are zero.
    pub(in crate::check) parts: &'c [Part<'c>],
    /// Row order of each part's matrix (act-order).
    pub(in crate::check) orders: Option<&'c [Vec<u32>]>,
    pub(in crate::check) extras: Extras<'c>,
    pub(in crate::check) dtype: ScalarType,
    /// Type of 8-bit activations.
    pub(in crate::check) input_dtype: Option<ScalarType>,
    pub(in crate::check) declared: &'c Declared,
    /// The case's `provenance`: what made the output.
    pub(in crate::check) producer: &'c str,
    /// Slots per token in a layer, whose rows are token · top_k + slot.
    pub(in crate::check) top_k: Option<usize>,
    /// What else the case says, for a diagnosis.
    pub(in crate::check) hints: Hints<'c>,
}

impl Stage<'_> {
    /// Exact results and bounds of all elements.
    pub(in crate::check) fn bounds(&self) -> Result<Vec<Bounded>> {
        let size_n = self.found.shape().last().copied().unwrap_or(0);
        let mut all = vec![Bounded::ZERO; self.found.len()];
        for part in self.parts {
            if part.rows.is_empty() {
                continue;
            }
            let bounded = self.part(part)?;
            for (row, bounded) in part.rows.iter().zip(bounded.chunks_exact(size_n)) {
                all[row * size_n..][..size_n].copy_from_slice(bounded);
            }
        }
        Ok(all)
    }

    fn part(&self, part: &Part<'_>) -> Result<Vec<Bounded>> {
        let missing = || crate::Error::size("rows", self.rows.rows(), "one for each output row");
        let rows = self.rows.select(&part.rows).ok_or_else(missing)?;
        let radius = match &self.radius {
            Some(radius) => Some(radius.select(&part.rows).ok_or_else(missing)?),
            None => None,
        };
        let pick = |values: Option<&[f32]>| -> Option<Vec<f32>> {
            values.map(|v| part.rows.iter().map(|&r| v[r]).collect())
        };
        let (scales, routers) =
            (pick(self.extras.activation_scales), pick(self.extras.router_weights));
        let extras =
            Extras { activation_scales: scales.as_deref(), router_weights: routers.as_deref() };
        let recipe = Recipe::new(self.declared.convention, part.weight, self.dtype, extras)?;
        let order = match (self.orders, part.expert) {
            (Some(orders), expert) => orders.get(expert.unwrap_or(0)).map(Vec::as_slice),
            (None, _) => None,
        };
        let class = self.declared.class_for(part.weight, self.input_dtype);
        let judge = Judge { weight: part.weight, order, recipe: &recipe, class: &class, extras };
        judge.bounds(&rows, radius.as_ref())
    }

    /// The verdict, and what explains it where it is not a pass.
    pub(in crate::check) fn judge(&self) -> Result<OutputReport> {
        let bounded = self.bounds()?;
        let bits = elements(self.found);
        let found: Vec<f64> = bits.iter().map(|&b| self.dtype.to_f64(b)).collect();
        let class = &self.declared.class.name;
        let measure =
            |bounded: &[Bounded]| measure((self.name, self.dtype), class, bounded, &found, &bits);
        let (mut report, wrong) = measure(&bounded);
        let Some(&first) = wrong.first() else { return Ok(report) };
        let scene = Scene::new(self, &bounded, &found, &wrong);
        if let Some(accepted) = diagnose::accepted(&scene) {
            let far = report.max_error_over_bound.unwrap_or(f64::INFINITY);
            report = measure(&accepted.bounded).0;
            report.diagnosis = Some(accepted.diagnosis);
            report.note = Some(format!(
                "{}; accepted, since it is what {} computes: {}; against the right product {} \
                 elements are wrong, by up to {far:.3} bounds",
                report.note.unwrap_or_default(),
                accepted.deviation.producer,
                accepted.deviation.reason,
                wrong.len(),
            ));
            return Ok(report);
        }
        let finding = diagnose::explain(&scene);
        report.first_mismatch = Some(self.mismatch(first, &bounded, &bits));
        report.picture = Some(self.picture(&scene, finding.as_ref().and_then(|f| f.cause.clone())));
        report.diagnosis = finding.map(|f| f.diagnosis);
        Ok(report)
    }

    fn mismatch(&self, i: usize, bounded: &[Bounded], bits: &[u32]) -> Mismatch {
        let size_n = self.found.shape().last().copied().unwrap_or(1).max(1);
        let (row, n) = (i / size_n, i % size_n);
        let part = self.parts.iter().find(|p| p.rows.contains(&row));
        let expert = part.and_then(|p| p.expert.map(|_| p.global));
        let width = self.found.dtype().bits() as u32;
        Mismatch::element(vec![row, n], width, expert, Some(n), bounded[i].rounded, bits[i])
    }

    fn picture(&self, scene: &Scene<'_>, cause: Option<Cause>) -> Picture {
        let shape = [self.found.len() / scene.size_n, scene.size_n];
        let mut picture = Picture::new("row", 1, shape);
        for &i in scene.wrong {
            picture.add(0, shape, i / scene.size_n, i % scene.size_n, i);
        }
        let mut errors = ErrorMap::new(shape, |row| scene.row_name(row));
        for (i, (b, &x)) in scene.bounded.iter().zip(scene.found).enumerate() {
            errors.add(i / scene.size_n, i % scene.size_n, b.ratio(x));
        }
        errors.cause = cause;
        picture.errors = Some(errors);
        picture
    }
}

/// The figures of a comparison, and the elements out of bound.
pub(in crate::check) fn measure(
    (name, dtype): (&str, ScalarType),
    class: &str,
    bounded: &[Bounded],
    found: &[f64],
    bits: &[u32],
) -> (OutputReport, Vec<usize>) {
    let mut report = OutputReport::unchecked(name, found.len(), "");
    let (mut equal, mut unbounded, mut max_ratio, mut max_ulp) = (0, 0, 0f64, 0f64);
    let mut wrong = Vec::new();
    for (i, (b, (&x, &bits))) in bounded.iter().zip(found.iter().zip(bits)).enumerate() {
        let ratio = b.ratio(x);
        if ratio > 1.0 {
            wrong.push(i);
        }
        max_ratio = max_ratio.max(ratio);
        max_ulp = max_ulp.max(b.ulps(dtype, x));
        equal += usize::from(bits == b.rounded);
        unbounded += usize::from(b.is_unbounded());
    }
    report.equal_bits = Some(equal as f64 / found.len().max(1) as f64);
    report.max_ulp = Some(max_ulp);
    report.max_error_over_bound = Some(max_ratio);
    report.mismatches = wrong.len();
    let mut note = format!("bound: {class}");
    if unbounded > 0 {
        note += &format!("; {unbounded} elements have no bound, since partial sums may overflow");
    }
    report.note = Some(note);
    report.verdict = if wrong.is_empty() { Verdict::Pass } else { Verdict::Fail };
    (report, wrong)
}
