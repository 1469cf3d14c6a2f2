//! The verdict on a product whose bounds its operation computes.

use crate::Result;
use crate::judge::compare::{Mismatch, elements};
use crate::judge::mistake::{Comparison, search};
use crate::judge::pattern::Values;
use crate::judge::power::{Accepted, Power};
use crate::judge::product::{REMEDY, measure};
use crate::judge::{Diagnosis, OutputReport, Verdict, place, plain};
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::ops::computation::Computation;
use crate::products::Bounded;

/// A product `[M, N]` with bounds.
pub(super) trait BoundedProduct: Computation {
    /// Name of the class of kernels in reports.
    const CLASS: &'static str;

    /// What to declare if the bound is too weak.
    const REMEDY: &'static str = REMEDY;

    /// Name of the output.
    fn name(&self) -> &'static str {
        "y"
    }

    /// Type of the output.
    fn dtype(&self) -> ScalarType;

    /// N.
    fn size_n(&self) -> usize;

    /// The bounds of every output.
    ///
    /// # Errors
    /// Returns an error for inputs that the operation refuses.
    fn bounds(&self) -> Result<Vec<Bounded>>;

    /// Whether the output without the first half of k would be rejected, on a sample of rows.
    ///
    /// # Errors
    /// As [`BoundedProduct::bounds`].
    fn rejects_half_k(&self, accepted: &[Accepted]) -> Result<Option<bool>>;
}

/// The report on `elements` values of `y` that a known order gives bit for bit; `how` names it.
pub(super) fn every_bit(elements: usize, how: &str) -> OutputReport {
    let mut report = OutputReport::unchecked("y", elements, "");
    report.verdict = Verdict::Pass;
    report.equal_bits = Some(1.0);
    report.power = Some(Power::every_bit());
    report.max_ulp = Some(0.0);
    report.note = Some(format!("every bit as {how}"));
    report
}

/// Judges `found` by its bounds.
///
/// # Errors
/// As [`BoundedProduct::bounds`].
pub(super) fn judge<C: BoundedProduct>(right: &C, found: &Tensor<'_>) -> Result<OutputReport> {
    let (ty, n, bits) = (right.dtype(), right.size_n(), elements(found));
    let bounded = right.bounds()?;
    let values: Vec<f64> = bits.iter().map(|&b| ty.to_f64(b)).collect();
    let (mut report, wrong) = measure((right.name(), ty), C::CLASS, &bounded, &values, &bits);
    let accepted: Vec<Accepted> = bounded.iter().map(Accepted::from).collect();
    let mut power = Power::of(&accepted, n, ty);
    power.rejects.half_k_missing = right.rejects_half_k(&accepted)?;
    report.settle(power, C::REMEDY);
    if let Some(&first) = wrong.first() {
        let at = vec![first / n, first % n];
        let (expected, found) = (bounded[first].rounded, bits[first]);
        report.first_mismatch =
            Some(Mismatch::element(at, 16, None, Some(first % n), expected, found));
        let expected: Vec<u32> = bounded.iter().map(|b| b.rounded).collect();
        let (found, wrong) = (&bits, &wrong);
        let pattern = Values { ty, cols: n, found, expected: &expected, wrong };
        let place = || place::diagnosis(wrong, [values.len() / n, n]);
        let known = diagnose(right, &bounded, &values, wrong).or_else(|| pattern.explain());
        report.diagnosis = Some(known.unwrap_or_else(place));
    }
    Ok(report)
}

/// The mistake whose bounds contain all elements, including the right ones.
fn diagnose<C: BoundedProduct>(
    product: &C,
    right: &[Bounded],
    found: &[f64],
    wrong: &[usize],
) -> Option<Diagnosis> {
    let of = |i: &usize| (found[*i], right[*i].exact);
    let wrong_values: Vec<(f64, f64)> = wrong.iter().map(of).collect();
    if let Some((id, text)) = plain::floats(&wrong_values, found.iter().all(|x| *x == 0.0)) {
        return Some(Diagnosis::explains(id, text));
    }
    let mistakes = C::mistakes();
    search(mistakes.iter(), |mistake| {
        let bounded = (mistake.make)(product.clone())?.bounds().ok()?;
        let predicted = bounded.iter().copied().enumerate();
        let all = Comparison::of_bounds(right, predicted, found, wrong, product.dtype());
        Some(Comparison { total: found.len(), ..all })
    })
}
