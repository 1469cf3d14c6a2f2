//! Products whose case declares no schedule: known ones are tried bit for bit, then the members of a
//! class. A sample of the output rules most of them out.

use super::compare::elements;
use super::product::{Part, Stage};
use super::scheduled::Product;
use super::power::Power;
use super::{OutputReport, Verdict};
use crate::gemm::schedule::{Schedule, known_schedules};
use crate::gemm::tensor_core::LANES;
use crate::gemm::{Bounded, Class, Convention, Extras, Judge};
use crate::tensor::Tensor;
use crate::weight::Weight;
use crate::{Error, Result};

/// Schedules that hold in the sample and are carried out in full.
const WHOLE_CANDIDATES: usize = 6;
/// Parts, and rows of each, that members are tried on.
const SAMPLE_PARTS: usize = 2;
const SAMPLE_ROWS: usize = 2;

/// The verdict on a product of two e4m3 operands of which neither a schedule nor a class is declared:
/// a pass where a known schedule gives every bit, else that of the stage's classes.
pub(super) fn judge(stage: Stage<'_>, product: &Product<'_>) -> Result<OutputReport> {
    match by_schedule(stage.name, stage.found, product) {
        Some(report) => Ok(report),
        None => stage.judge(),
    }
}

/// A pass where a known schedule gives every bit of `found`.
pub(super) fn by_schedule(
    name: &str,
    found: &Tensor<'_>,
    product: &Product<'_>,
) -> Option<OutputReport> {
    let bits = elements(found);
    let size_n = product.weights.first()?.shape().size_n;
    let expert = |m: usize| product.expert_of.map_or(Some(0), |e| e[m]);
    let rows = bits.chunks_exact(size_n.max(1)).enumerate();
    // The first row that says something: zeros are every schedule's.
    let says = |(m, row): &(usize, &[u32])| {
        expert(*m).is_some() && row.iter().any(|&b| product.dtype.to_f64(b) != 0.0)
    };
    let (m, row) = rows.clone().find(says).or_else(|| rows.clone().next())?;
    let n = row.iter().position(|&b| product.dtype.to_f64(b) != 0.0).unwrap_or(0) / LANES * LANES;
    let e = expert(m).unwrap_or(0);
    let sample = Product {
        weights: std::slice::from_ref(product.weights.get(e)?),
        expert_of: None,
        orders: product.orders.and_then(|o| o.get(e)).map(std::slice::from_ref),
        ..*product
    };
    let width = LANES.min(size_n - n);
    let holds = |schedule: &Schedule| {
        let made = sample.execute_part(schedule, &[m], |first| first == n);
        made.is_ok_and(|made| made[n..n + width] == row[n..n + width])
    };
    let all = known_schedules(product.weights, product.dtype, product.input);
    let left = all.into_iter().filter(|(_, schedule)| holds(schedule)).take(WHOLE_CANDIDATES);
    for (text, schedule) in left {
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
        let extras =
            Extras { activation_scales: scales.as_deref(), router_weights: routers.as_deref() };
        let weight = &self.weight;
        let recipe = stage.recipe(weight, convention, extras)?;
        let judge = Judge { weight, order: self.order, recipe: &recipe, class, extras };
        judge.bounds(&rows, radius.as_ref())
    }
}
