//! Products whose case declares no schedule: known ones are tried bit for bit, then the members of a
//! class. A sample of the output rules most of them out.

use super::compare::elements;
use super::power::Power;
use super::product::{Part, Stage};
use super::scheduled::Product;
use super::{OutputReport, Verdict};
use crate::gemm::schedule::{Extras, Sample, Schedule, known_schedules};
use crate::gemm::tensor_core::LANES;
use crate::gemm::{self, Bounded, Class, Convention, Judge, Recipe};
use crate::tensor::Tensor;
use crate::weight::Weight;
use crate::{Error, Result};

/// Schedules that hold in the sample and are carried out in full.
const WHOLE_CANDIDATES: usize = 16;
/// Rows of the sample; each with its first and its last columns.
const SPOT_ROWS: usize = 4;
/// Parts, and rows of each, that members are tried on.
const SAMPLE_PARTS: usize = 2;
const SAMPLE_ROWS: usize = 2;

/// The verdict on a product of two e4m3 operands of which neither a schedule nor a class is declared:
/// a pass where a known schedule gives every bit, else that of the stage's classes.
pub(crate) fn judge(stage: Stage<'_>, product: &Product<'_>) -> Result<OutputReport> {
    match by_schedule(stage.name, stage.found, product, |s| follows(s, &stage)) {
        Some(report) => Ok(report),
        None => stage.judge(),
    }
}

/// Whether a schedule's weights and the steps after its sums are those of the declared convention,
/// which is strict. `scaled_mm` admits its scales in any order.
fn follows(schedule: &Schedule, stage: &Stage<'_>) -> bool {
    let declared = stage.declared.convention.filter(|c| c.dequantizes());
    let (Some(convention), Some(part)) = (declared, stage.parts.first()) else { return true };
    let own = Recipe::of_schedule(schedule, stage.dtype);
    let recipe = stage.recipe(part.weight, convention, stage.extras);
    recipe.is_ok_and(|r| (r.rule, &r.steps) == (own.rule, &own.steps))
}

/// A pass where a known schedule that `may` gives every bit of `found`.
fn by_schedule(
    name: &str,
    found: &Tensor<'_>,
    product: &Product<'_>,
    may: impl Fn(&Schedule) -> bool,
) -> Option<OutputReport> {
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

/// Outputs here and there that a schedule has to give before it is carried out in full.
struct Spots<'p> {
    spots: Vec<(Sample<'p>, &'p [u32])>,
}

impl<'p> Spots<'p> {
    fn new(product: &Product<'p>, bits: &'p [u32]) -> Option<Self> {
        let shape = product.weights.first()?.shape();
        let (size_k, size_n) = (shape.size_k, shape.size_n);
        let expert = |m: usize| product.expert_of.map_or(Some(0), |e| e[m]);
        let row = |m: usize| &bits[m * size_n..][..size_n];
        // Zeros are every schedule's.
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
                let one = |all: Option<&'p [f32]>| all.map(|all| &all[m..=m]);
                let extras = Extras {
                    activation_scales: one(product.activation_scales),
                    router_weights: one(product.router_weights),
                    order: product.orders.and_then(|o| o.get(e)).map(Vec::as_slice),
                };
                let (x, weight) = (&product.x[m * size_k..][..size_k], product.weights.get(e)?);
                let found = &row(m)[n..size_n.min(n + LANES)];
                spots.push((Sample::new(x, weight, scale_max, extras, [m, n]), found));
            }
        }
        Some(Self { spots })
    }

    fn hold(&mut self, schedule: &Schedule) -> bool {
        let mut spots = self.spots.iter_mut();
        spots.all(|(sample, found)| sample.outputs(schedule).is_ok_and(|made| made == *found))
    }
}

/// Ascending numbers without those that repeat.
fn distinct(numbers: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let mut numbers: Vec<usize> = numbers.into_iter().collect();
    numbers.dedup();
    numbers
}

/// The members of a class, compared with a sample of an output.
pub(super) struct Members {
    /// Those whose intervals hold the sample under one of the conventions, in the class's order.
    pub(super) holding: Vec<Class>,
    /// The one that comes nearest.
    pub(super) nearest: Class,
}

/// Compares the members of `class` with a sample of the stage's output; `None` where the class has
/// no members but itself, or the stage no rows.
pub(super) fn members(
    stage: &Stage<'_>,
    class: &Class,
    conventions: &[Convention],
) -> Result<Option<Members>> {
    let Some(part) = stage.parts.iter().find(|p| !p.rows.is_empty()) else { return Ok(None) };
    let members = class.members(part.weight.shape().size_k);
    if members.len() < 2 {
        return Ok(None);
    }
    let bits = elements(stage.found);
    let found: Vec<f64> = bits.iter().map(|&b| stage.dtype.to_f64(b)).collect();
    let probes = probes(stage, &found)?;
    let mut holding = Vec::new();
    let mut nearest: Option<(usize, f64, Class)> = None;
    for member in members {
        let (mut fewest, mut least) = (usize::MAX, f64::INFINITY);
        for &convention in conventions {
            let (outside, worst) = distance(stage, &probes, (convention, &member))?;
            if (outside, worst) < (fewest, least) {
                (fewest, least) = (outside, worst);
            }
        }
        if nearest.as_ref().is_none_or(|n| (fewest, least) < (n.0, n.1)) {
            nearest = Some((fewest, least, member.clone()));
        }
        if fewest == 0 {
            holding.push(member);
        }
    }
    Ok(nearest.map(|(_, _, nearest)| Members { holding, nearest }))
}

/// Elements of the probes outside their bounds, and the largest error over its bound.
fn distance(
    stage: &Stage<'_>,
    probes: &[Probe<'_>],
    how: (Convention, &Class),
) -> Result<(usize, f64)> {
    let (mut outside, mut worst) = (0, 0f64);
    for probe in probes {
        for (bound, &found) in probe.bounds(stage, how)?.iter().zip(&probe.found) {
            let ratio = bound.ratio(found);
            outside += usize::from(ratio > 1.0);
            worst = worst.max(ratio);
        }
    }
    Ok((outside, worst))
}

/// Some rows and columns of one part.
struct Probe<'p> {
    weight: Weight<'p>,
    order: Option<&'p [u32]>,
    rows: Vec<usize>,
    found: Vec<f64>,
}

fn probes<'p>(stage: &'p Stage<'_>, found: &[f64]) -> Result<Vec<Probe<'p>>> {
    let size_n = stage.found.shape().last().copied().unwrap_or(0);
    let filled = |part: &&Part<'_>| !part.rows.is_empty();
    let one = |part: &'p Part<'p>| {
        let columns: Vec<usize> = (0..size_n.min(LANES)).map(|i| spread(i, size_n)).collect();
        let rows: Vec<usize> = (0..part.rows.len().min(SAMPLE_ROWS))
            .map(|i| part.rows[i * (part.rows.len() - 1) / (SAMPLE_ROWS - 1)])
            .collect();
        let at = |&row: &usize| columns.iter().map(move |n| (row, *n));
        let found = rows.iter().flat_map(at).map(|(m, n)| found[m * size_n + n]).collect();
        let order = stage.orders.and_then(|o| o.get(part.expert.unwrap_or(0)));
        let weight = part.weight.gather_columns(&columns)?;
        Ok(Probe { weight, order: order.map(Vec::as_slice), rows, found })
    };
    stage.parts.iter().filter(filled).take(SAMPLE_PARTS).map(one).collect()
}

/// The column of place `i` in a sample of [`LANES`] from first to last.
fn spread(i: usize, size_n: usize) -> usize {
    if size_n <= LANES { i } else { i * (size_n - 1) / (LANES - 1) }
}

impl Probe<'_> {
    fn bounds(
        &self,
        stage: &Stage<'_>,
        (convention, class): (Convention, &Class),
    ) -> Result<Vec<Bounded>> {
        let missing = || Error::size("rows", stage.rows.rows(), "one for each output row");
        let rows = stage.rows.select(&self.rows).ok_or_else(missing)?;
        let radius = match &stage.radius {
            Some(radius) => Some(radius.select(&self.rows).ok_or_else(missing)?),
            None => None,
        };
        let pick = |values: Option<&[f32]>| -> Option<Vec<f32>> {
            values.map(|v| self.rows.iter().map(|&r| v[r]).collect())
        };
        let scales = pick(stage.extras.activation_scales);
        let routers = pick(stage.extras.router_weights);
        let extras = gemm::Extras {
            activation_scales: scales.as_deref(),
            router_weights: routers.as_deref(),
        };
        let weight = &self.weight;
        let recipe = stage.recipe(weight, convention, extras)?;
        let judge = Judge { weight, order: self.order, recipe: &recipe, class, extras };
        judge.bounds(&rows, radius.as_ref())
    }
}
