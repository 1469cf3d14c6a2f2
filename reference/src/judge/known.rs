//! Products whose case declares no schedule: tries known schedules bit for bit, then the members of
//! a class. A sample of the output rules most of them out first.

use super::compare::elements;
use super::power::Power;
use super::product::Stage;
use super::scheduled::Product;
use super::{OutputReport, Verdict};
use crate::Result;
use crate::num::tensor::Tensor;
use crate::products::schedule::{self, Extras, Schedule, known_schedules};
use crate::products::tensor_core::LANES;
use crate::products::{self, Convention, Recipe};

/// The largest number of schedules that match the sample and are executed in full.
const WHOLE_CANDIDATES: usize = 16;
/// Rows of the sample; each contributes its first and last columns.
const SPOT_ROWS: usize = 4;

/// The verdict on a product of two e4m3 operands that declares neither a schedule nor a class: a
/// pass if a known schedule gives every bit, otherwise the verdict of the stage's classes.
pub(crate) fn judge(stage: Stage<'_>, product: &Product<'_>) -> Result<OutputReport> {
    match by_schedule(stage.name, stage.found, product, stage.declared.convention) {
        Some(report) => Ok(report),
        None => stage.judge(),
    }
}

/// Whether a schedule's weights and the steps after its sums are those of `convention`.
fn follows(schedule: &Schedule, product: &Product<'_>, convention: Convention) -> bool {
    let Some(weight) = product.weights.first() else { return true };
    let own = Recipe::of_schedule(schedule, product.dtype);
    let extras = products::Extras {
        activation_scales: product.activation_scales,
        router_weights: product.router_weights,
    };
    let recipe = Recipe::new(convention, weight, product.dtype, extras);
    recipe.is_ok_and(|r| (r.rule, &r.steps) == (own.rule, &own.steps))
}

/// A pass if a known schedule that follows the declared `convention` gives every bit of `found`.
/// The convention is strict, except that `scaled_mm` admits its scales in any order.
pub(crate) fn by_schedule(
    name: &str,
    found: &Tensor<'_>,
    product: &Product<'_>,
    convention: Option<Convention>,
) -> Option<OutputReport> {
    let strict = convention.filter(|c| c.dequantizes());
    let may = |s: &Schedule| {
        product.expect_applied(s).is_ok()
            && strict.is_none_or(|convention| follows(s, product, convention))
    };
    let bits = elements(found);
    let mut spots = Spots::new(product, &bits)?;
    let all = known_schedules(product.weights, product.dtype, product.input);
    let left = all.into_iter().filter(|(_, schedule)| may(schedule) && spots.hold(schedule));
    for (text, schedule) in left.take(WHOLE_CANDIDATES) {
        if product.execute(&schedule).is_ok_and(|made| made == bits) {
            let mut report = OutputReport::unchecked(name, bits.len(), "");
            report.verdict = Verdict::Pass;
            report.power = Some(Power::every_bit());
            report.equal_bits = Some(1.0);
            report.max_ulp = Some(0.0);
            report.note = Some(format!("every bit as a known schedule gives it: {text}"));
            return Some(report);
        }
    }
    None
}

/// Scattered elements that a schedule must reproduce before it is executed in full.
struct Spots<'p> {
    spots: Vec<(schedule::Sample<'p>, &'p [u32])>,
}

impl<'p> Spots<'p> {
    fn new(product: &Product<'p>, bits: &'p [u32]) -> Option<Self> {
        let shape = product.weights.first()?.shape();
        let (size_k, size_n) = (shape.size_k, shape.size_n);
        let expert = |m: usize| product.expert_of.map_or(Some(0), |e| e[m]);
        let row = |m: usize| &bits[m * size_n..][..size_n];
        // Every schedule gives zeros, so they do not distinguish.
        let says = |b: &u32| product.dtype.to_f64(*b) != 0.0;
        let some = |m: &usize| expert(*m).is_some() && row(*m).iter().any(says);
        let rows: Vec<usize> = (0..bits.len() / size_n.max(1)).filter(some).collect();
        let scales = product.weights.iter().map(|w| &w.scales);
        let scales = scales.flat_map(|s| s.iter_bits().map(|b| s.ty().to_f64(b) as f32));
        let scale_max = scales.fold(f32::NEG_INFINITY, f32::max);
        let last = rows.len().checked_sub(1)?;
        let mut spots = Vec::new();
        for i in distinct((0..SPOT_ROWS).map(|i| i * last / (SPOT_ROWS - 1))) {
            let m = rows[i];
            let e = expert(m)?;
            let ends = [row(m).iter().position(says)?, row(m).iter().rposition(says)?];
            for n in distinct(ends.map(|n| n / LANES * LANES)) {
                let extras = Extras {
                    activation_scales: product.scales_of(m),
                    router_weights: product.router_weights.map(|all| &all[m..=m]),
                    order: product.orders.and_then(|o| o.get(e)).map(Vec::as_slice),
                };
                let (x, weight) = (&product.x[m * size_k..][..size_k], product.weights.get(e)?);
                let found = &row(m)[n..size_n.min(n + LANES)];
                spots.push((schedule::Sample::new(x, weight, scale_max, extras, [m, n]), found));
            }
        }
        Some(Self { spots })
    }

    fn hold(&mut self, schedule: &Schedule) -> bool {
        let mut spots = self.spots.iter_mut();
        spots.all(|(sample, found)| sample.outputs(schedule).is_ok_and(|made| made == *found))
    }
}

/// Sorts numbers and removes duplicates.
fn distinct(numbers: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let mut numbers: Vec<usize> = numbers.into_iter().collect();
    numbers.dedup();
    numbers
}
