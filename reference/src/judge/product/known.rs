//! Products whose case declares no schedule: tries known schedules bit for bit, then the members of
//! a class. A sample of the output rules most of them out first.

use std::collections::BTreeMap;

use super::stage::Stage;
use crate::Result;
use crate::judge::compare::elements;
use crate::judge::power::{Accepted, Power, attainable, reach};
use crate::judge::scheduled::Product;
use crate::judge::{OutputReport, Verdict};
use crate::num::dims::Shape;
use crate::num::scalar::ScalarType;
use crate::products::schedule::{
    self, Chunks, Extras, FP8_UNIT, Order, PROMOTIONS, Schedule, known_schedules,
};
use crate::products::tensor_core::LANES;
use crate::products::{self, Convention, Recipe};
use crate::weight::Weight;

/// The largest number of schedules that match the sample and are executed in full.
const WHOLE_CANDIDATES: usize = 16;
/// Rows of the sample; each contributes its first and last columns.
const SPOT_ROWS: usize = 4;
/// The largest number of schedules that give most of the sample's bits and are executed in full.
const NEAREST: usize = 3;

/// The verdict on a product of two e4m3 operands that declares neither a schedule nor a class: a
/// pass if a known schedule gives every bit, otherwise the verdict of the stage's classes. Its power
/// is that of both.
pub(crate) fn judge(stage: Stage<'_>, product: &Product<'_>) -> Result<OutputReport> {
    let bits = elements(stage.found);
    let filled = Filled::new(product)?;
    let product = &filled.as_ref().map_or(*product, |filled| filled.product(product));
    let known = Known::search(product, &bits, stage.declared.convention);
    match known.report(stage.name, bits.len()) {
        Some(mut report) => {
            let power = stage.power_beside(&known)?;
            report.power = report.power.map(|own| own.or(&power));
            let values = bits.iter().map(|&b| product.dtype.to_f64(b));
            let exact: Vec<_> = values.map(|value| Accepted::only(value, value)).collect();
            report.attainable = attainable(product.dtype, &exact);
            Ok(report)
        }
        None => stage.judge_beside(Some(&known)),
    }
}

/// The operands of a product whose k no unit divides, with zeros for the rest of the last
/// instruction, as kernels load them.
struct Filled {
    x: Vec<u32>,
    weights: Vec<Weight<'static>>,
}

impl Filled {
    /// `None` for a product that needs no zeros, or has groups of k.
    fn new(product: &Product<'_>) -> Result<Option<Self>> {
        let Some(first) = product.weights.first() else { return Ok(None) };
        let size_k = first.shape().size_k;
        let filled = size_k.next_multiple_of(FP8_UNIT.size_k);
        let whole = |w: &Weight<'_>| w.ty == product.input && w.scales.rows() == 1;
        if filled == size_k || product.orders.is_some() || !product.weights.iter().all(whole) {
            return Ok(None);
        }
        let mut x = Vec::with_capacity(product.x.len() / size_k * filled);
        for row in product.x.chunks_exact(size_k) {
            x.extend_from_slice(row);
            x.resize(x.len() + filled - size_k, 0);
        }
        let weight = |w: &Weight<'_>| {
            let codes = w.codes.resized(Shape::new(filled, w.shape().size_n))?;
            Ok(Weight { codes, ..w.clone().into_owned() })
        };
        let weights = product.weights.iter().map(weight).collect::<Result<_>>()?;
        Ok(Some(Self { x, weights }))
    }

    fn product<'f>(&'f self, of: &Product<'f>) -> Product<'f> {
        Product { x: &self.x, weights: &self.weights, ..*of }
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

/// What the known schedules say about an output.
pub(crate) struct Known<'p> {
    product: &'p Product<'p>,
    /// The schedule that gives every bit.
    matched: Option<String>,
    /// The largest uniform error that turns the output into that of another known schedule.
    pub(in crate::judge) scaled: Option<f64>,
    /// Schedules that give most bits of the sample, best first.
    nearest: Vec<(String, Schedule)>,
    /// Elements of the sample, each with the distance between the outputs of all known schedules.
    pub(in crate::judge) spread: Vec<(usize, f64)>,
}

impl<'p> Known<'p> {
    /// Compares the output's `bits` with every known schedule that follows the declared
    /// `convention`. The convention is strict, except that `scaled_mm` admits its scales in any order.
    pub(crate) fn search(
        product: &'p Product<'p>,
        bits: &[u32],
        convention: Option<Convention>,
    ) -> Self {
        let mut known =
            Self { product, matched: None, scaled: None, nearest: Vec::new(), spread: Vec::new() };
        let Some(mut spots) = Spots::new(product, bits) else { return known };
        let strict = convention.filter(|c| c.dequantizes());
        let may = |s: &Schedule| {
            product.expect_applied(s).is_ok()
                && strict.is_none_or(|convention| follows(s, product, convention))
        };
        let mut matched: Option<Schedule> = None;
        let mut near: Vec<(usize, String, Schedule)> = Vec::new();
        let mut whole = WHOLE_CANDIDATES;
        let all = known_schedules(product.weights, product.dtype, product.input);
        let all: Vec<_> = all.into_iter().filter(|(_, schedule)| may(schedule)).collect();
        for (text, schedule) in &all {
            if matched.as_ref().is_some_and(|matched| !represents(schedule, matched)) {
                continue;
            }
            let Some(probe) = spots.probe(schedule, 0) else { continue };
            if probe.all && matched.is_none() && whole > 0 {
                whole -= 1;
                let Ok(made) = product.execute(schedule) else { continue };
                if made == bits {
                    known.matched = Some(text.clone());
                    matched = Some(schedule.clone());
                    continue;
                }
                let value = |b: &u32| product.dtype.to_f64(*b);
                let only = |made| Accepted::only(value(made), value(made));
                let pairs = bits.iter().zip(&made).map(|(y, made)| (value(y), only(made)));
                known.scaled = larger(known.scaled, reach(product.dtype, pairs));
            } else if !probe.all {
                known.scaled = larger(known.scaled, probe.scaled);
            }
            if 2 * probe.equal >= probe.compared {
                near.push((probe.equal, text.clone(), schedule.clone()));
            }
        }
        if matched.is_none() && near.is_empty() {
            near = spots.near_elsewhere(&all);
        }
        near.sort_by_key(|(equal, ..)| std::cmp::Reverse(*equal));
        let near = near.into_iter().take(NEAREST);
        known.nearest = near.map(|(_, text, schedule)| (text, schedule)).collect();
        known.spread = spots.spread();
        known
    }

    /// The pass of an output of `count` values that has every bit of a known schedule.
    fn report(&self, name: &str, count: usize) -> Option<OutputReport> {
        let text = self.matched.as_ref()?;
        let mut report = OutputReport::unchecked(name, count, "");
        report.verdict = Verdict::Pass;
        report.power = Some(Power::every_bit().or_scaled(self.scaled));
        report.equal_bits = Some(1.0);
        report.max_ulp = Some(0.0);
        report.note = Some(format!("every bit as a known schedule gives it: {text}"));
        Some(report)
    }

    /// The outputs of the known schedules that give most bits of the sample, each with its name.
    pub(in crate::judge) fn nearest(&self) -> impl Iterator<Item = (&str, Vec<u32>)> {
        let made = |near: &(String, Schedule)| self.product.execute(&near.1).ok();
        self.nearest.iter().filter_map(move |near| Some((near.0.as_str(), made(near)?)))
    }
}

/// Whether a schedule represents those of its unit that differ from it, as from `matched`, only in
/// how k is split: truncation moves the sums of a chain over all of k farthest, and those of a chain
/// that is promoted most often least.
fn represents(schedule: &Schedule, matched: &Schedule) -> bool {
    let is_extreme = match schedule.chunks {
        Chunks::Whole => true,
        Chunks::Size(n) => PROMOTIONS.contains(&n),
        _ => false,
    };
    let sum = |s: &Schedule| s.group_sum.map(|g| (g.row_scale, g.multiply_add));
    is_extreme
        && schedule.stripes.is_none()
        && schedule.chunk_sum.order == Order::Ascending
        && schedule.epilogue == matched.epilogue
        && sum(schedule) == sum(matched)
}

/// The larger of two numbers that may be absent.
fn larger(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.max(b)),
        (a, b) => a.or(b),
    }
}

/// Scattered runs of columns that a schedule must reproduce before it is executed in full.
struct Spots<'p> {
    spots: Vec<Spot<'p>>,
    dtype: ScalarType,
    /// The smallest and the largest output of all schedules, by element.
    ranges: BTreeMap<usize, (f64, f64)>,
}

struct Spot<'p> {
    sample: schedule::Sample<'p>,
    /// The index of its first element in the output.
    first: usize,
    found: &'p [u32],
}

/// A schedule's outputs compared with those of the sample.
struct Probe {
    equal: usize,
    compared: usize,
    /// Whether all of the sample are equal.
    all: bool,
    /// The largest uniform error that turns the sample into the schedule's outputs.
    scaled: Option<f64>,
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
                let sample = schedule::Sample::new(x, weight, scale_max, extras, [m, n]);
                spots.push(Spot { sample, first: m * size_n + n, found });
            }
        }
        // The first two differ in rows and columns, so that one wrong row or column is not in both.
        if spots.len() > 2 {
            let last = spots.len() - 1;
            spots.swap(1, last);
        }
        Some(Self { spots, dtype: product.dtype, ranges: BTreeMap::new() })
    }

    /// Compares the outputs of a schedule from spot `first` on; `None` if it cannot compute them. Ends
    /// where they are neither equal nor a multiple.
    fn probe(&mut self, schedule: &Schedule, first: usize) -> Option<Probe> {
        let mut probe = Probe { equal: 0, compared: 0, all: true, scaled: None };
        let mut pairs: Vec<(f64, Accepted)> = Vec::new();
        for (i, spot) in self.spots.iter_mut().enumerate().skip(first) {
            let made = spot.sample.outputs(schedule).ok()?;
            for (lane, (&made, &found)) in made.iter().zip(spot.found).enumerate() {
                let (value, y) = (self.dtype.to_f64(made), self.dtype.to_f64(found));
                if i == first {
                    let range = self.ranges.entry(spot.first + lane).or_insert((value, value));
                    *range = (range.0.min(value), range.1.max(value));
                }
                pairs.push((y, Accepted::only(value, value)));
                probe.equal += usize::from(made == found);
            }
            probe.compared += spot.found.len();
            probe.all &= made == spot.found;
            if !probe.all {
                probe.scaled = reach(self.dtype, pairs.iter().copied());
                if probe.scaled.is_none() {
                    break;
                }
            }
        }
        Some(probe)
    }

    /// Schedules that represent others and give most bits of the second spot, whose row and columns
    /// are not those of the first.
    fn near_elsewhere(&mut self, all: &[(String, Schedule)]) -> Vec<(usize, String, Schedule)> {
        let mut near = Vec::new();
        let Some((_, first)) = all.first() else { return near };
        if self.spots.len() < 2 {
            return near;
        }
        for (text, schedule) in all.iter().filter(|(_, schedule)| represents(schedule, first)) {
            let Some(probe) = self.probe(schedule, 1) else { continue };
            if 2 * probe.equal >= probe.compared {
                near.push((probe.equal, text.clone(), schedule.clone()));
            }
        }
        near
    }

    /// Elements, each with the distance between the largest and the smallest output.
    fn spread(&self) -> Vec<(usize, f64)> {
        self.ranges.iter().map(|(&i, (least, most))| (i, most - least)).collect()
    }
}

/// Sorts numbers and removes duplicates.
fn distinct(numbers: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let mut numbers: Vec<usize> = numbers.into_iter().collect();
    numbers.dedup();
    numbers
}
