//! Integer sums that overflow: int8 products added in 16 bits, or scaled group sums in 32.

use super::Finding;
use super::scene::{Scene, spread_to};
use crate::num::scalar::ScalarType;
use crate::products::{Bounded, Extras, Recipe};
use crate::weight::Weight;

/// Width and overflow of the additions.
#[derive(Debug, Clone, Copy)]
struct Adder {
    /// Number of neighbouring products that are added in 16 bits; 0 if all are added in 32.
    run: usize,
    saturates: bool,
    /// Factor of each product: 16 for codes in the high nibble of a byte.
    factor: i64,
    /// Whether scaled sums of groups are added in 32 bits.
    scaled: bool,
}

const ID: &str = "int8-accumulation-overflow";

/// Number of wrong elements on which every adder is tried.
const TRIED: usize = 24;

/// Finds the adder whose overflows explain the wrong elements.
pub(super) fn explain(scene: &Scene<'_>) -> Option<Finding> {
    if scene.stage.input_dtype != Some(ScalarType::INT8) {
        return None;
    }
    let mut adders = Vec::new();
    for run in [2, 4, 8, 16, 32, 64, 128, 256, usize::MAX] {
        for saturates in [false, true] {
            for factor in [1, 16] {
                adders.push(Adder { run, saturates, factor, scaled: false });
            }
        }
    }
    adders.push(Adder { run: 0, saturates: false, factor: 1, scaled: true });
    adders.push(Adder { run: 0, saturates: true, factor: 1, scaled: true });
    let cost = (adders.len() as f64).log2();
    let sample = spread_to(scene.wrong, TRIED);
    for adder in adders {
        let holds = |&&i: &&usize| {
            let made = element(scene, i, adder);
            made.is_some_and(|b| super::scene::explains(&b, scene.found[i]))
        };
        if sample.iter().filter(holds).count() * 10 < sample.len() * 9 {
            continue;
        }
        let predicted = (0..scene.found.len()).filter_map(|i| Some((i, element(scene, i, adder)?)));
        let Some(outcome) = scene.weigh(predicted, cost) else { continue };
        let what = match adder {
            Adder { scaled: true, .. } => {
                "the scaled sums of groups were added in 32 bits".to_owned()
            }
            Adder { run: usize::MAX, .. } => "all products were added in 16 bits".to_owned(),
            Adder { run, .. } => format!("products of {run} neighbouring k were added in 16 bits"),
        };
        let how = if adder.saturates { "saturate" } else { "wrap around" };
        let text = format!("{what}, where large sums {how}");
        return Some(Finding::of(outcome, ID, &text));
    }
    wrapped_parts(scene, cost)
}

/// Scaled sums of groups in 32 bits, each over an unknown part of K: however a kernel divides K among
/// its threads, the sum is wrong by a multiple of 2^32.
fn wrapped_parts(scene: &Scene<'_>, cost: f64) -> Option<Finding> {
    let sample = spread_to(scene.wrong, TRIED);
    let holding = sample.iter().filter(|&&i| wrapped(scene, i).is_some()).count();
    if holding * 10 < sample.len() * 9 {
        return None;
    }
    let mut cost = cost;
    let mut predicted = Vec::new();
    for &i in scene.wrong {
        let Some((made, most)) = wrapped(scene, i) else { continue };
        cost += (2.0 * most).log2();
        predicted.push((i, made));
    }
    let outcome = scene.weigh(predicted, cost)?;
    let text = "the scaled sums of groups were added in 32 bits in several parts of K, where large sums \
                wrap around: values differ by multiples of 2^32";
    Some(Finding::of(outcome, ID, text))
}

/// Element `i` moved by the multiple of 2^32 that is nearest to what was found, and the largest number of wraps that its
/// terms allow; `None` if it needs none, or more than that.
fn wrapped(scene: &Scene<'_>, i: usize) -> Option<(Bounded, f64)> {
    let sums = Sums::of(scene, i)?;
    // A part wraps once for each 2^31 of its terms' magnitudes, or less often.
    let most = (sums.magnitude / 2f64.powi(31)).floor();
    if most < 1.0 {
        return None;
    }
    let at = |wraps: f64| bounded(scene, i, sums.exact + wraps * 2f64.powi(32), sums.groups);
    let (none, one) = (at(0.0)?, at(1.0)?);
    let wraps = ((scene.found[i] - none.exact) / (one.exact - none.exact)).round();
    let possible = wraps != 0.0 && wraps.abs() <= most;
    if possible { Some((at(wraps)?, most)) } else { None }
}

/// The sum of one element, in units of a product with an int16 scale.
struct Sums {
    exact: f64,
    /// Sum of the terms' magnitudes.
    magnitude: f64,
    groups: usize,
}

impl Sums {
    fn of(scene: &Scene<'_>, i: usize) -> Option<Self> {
        let (row, n) = (i / scene.size_n, i % scene.size_n);
        let weight = stage_weight(scene, row)?;
        let (size_k, groups) = (weight.shape().size_k, weight.scales.rows());
        if groups == 1 {
            return None;
        }
        let x = scene.stage.rows.row(row);
        let (mut exact, mut magnitude) = (0.0, 0.0);
        for (k, &x) in x.iter().enumerate().take(size_k) {
            let scale = weight.scales.value(weight.groups.group_of(k), n);
            let term = x * code(weight, k, n) as f64 * scale;
            exact += term;
            magnitude += term.abs();
        }
        Some(Self { exact, magnitude, groups })
    }
}

/// Element `i` under an adder; `None` if it equals the right one.
fn element(scene: &Scene<'_>, i: usize, adder: Adder) -> Option<Bounded> {
    let (row, n) = (i / scene.size_n, i % scene.size_n);
    let weight = stage_weight(scene, row)?;
    let size_k = weight.shape().size_k;
    let x = scene.stage.rows.row(row);
    let groups = weight.scales.rows();
    let by_column = groups == 1;
    let products = |k: usize| x[k] as i64 * code(weight, k, n);
    let group_size = size_k.div_ceil(groups);
    let (mut sum, mut right) = (0f64, 0f64);
    let mut accumulator = 0i64;
    for g in 0..groups {
        let scale = if by_column { 1.0 } else { weight.scales.value(g, n) };
        let range = g * group_size..size_k.min((g + 1) * group_size);
        let exact: i64 = range.clone().map(products).sum();
        right += exact as f64 * scale;
        if adder.scaled {
            let next = accumulator + exact * scale as i64;
            accumulator = match adder.saturates {
                true => next.clamp(i32::MIN.into(), i32::MAX.into()),
                false => i64::from(next as i32),
            };
            sum = accumulator as f64;
        } else {
            sum += narrow_sum(range, products, adder) * scale;
        }
    }
    if sum == right {
        return None;
    }
    bounded(scene, i, sum, groups)
}

/// The matrix of a row's product.
fn stage_weight<'s>(scene: &Scene<'s>, row: usize) -> Option<&'s Weight<'s>> {
    Some(scene.stage.parts[scene.home[row]?].weight)
}

/// The output for a `sum` of `groups`, with an error of one f32 addition for each group.
fn bounded(scene: &Scene<'_>, i: usize, sum: f64, groups: usize) -> Option<Bounded> {
    let (row, n) = (i / scene.size_n, i % scene.size_n);
    let (stage, weight) = (scene.stage, stage_weight(scene, row)?);
    let extras = Extras {
        activation_scales: stage.extras.activation_scales.map(|s| &s[row..=row]),
        router_weights: stage.extras.router_weights.map(|s| &s[row..=row]),
    };
    let recipe = Recipe::new(scene.convention, weight, stage.dtype, extras).ok()?;
    let chain = recipe.chain(weight, extras, 0, n);
    let error = sum.abs() * (groups + 1) as f64 * 2f64.powi(-24);
    let narrow = |x: f64| f64::from(x as f32);
    let ends = chain.interval(narrow(sum - error), narrow(sum + error));
    let unit = if stage.dtype == ScalarType::FLOAT16 { 2f64.powi(-11) } else { 2f64.powi(-8) };
    let exact = (ends.before.0 + ends.before.1) / 2.0;
    let radius = (ends.before.1 - ends.before.0).abs() / 2.0 + exact.abs() * unit;
    let rounded = scene.bounded[i].rounded;
    let (lo, hi, centre) = (ends.lo, ends.hi, exact);
    Some(Bounded { exact, rounded, centre, lo, hi, below: radius, above: radius })
}

/// q - z of one weight.
fn code(weight: &Weight<'_>, k: usize, n: usize) -> i64 {
    let value = weight.ty.to_f64(u32::from(weight.codes.get(k, n))) as i64;
    let zero = weight.zeros.as_ref().map_or(0, |z| z.bits(weight.groups.group_of(k), n));
    value - i64::from(zero)
}

/// Products in runs of 16-bit sums, which are added in 32 bits.
fn narrow_sum(range: std::ops::Range<usize>, product: impl Fn(usize) -> i64, adder: Adder) -> f64 {
    let (mut sum, mut run, mut count) = (0i64, 0i64, 0usize);
    for k in range {
        let next = run + product(k) * adder.factor;
        run = match adder.saturates {
            true => next.clamp(i16::MIN.into(), i16::MAX.into()),
            false => i64::from(next as i16),
        };
        count += 1;
        if count == adder.run {
            (sum, run, count) = (sum + run, 0, 0);
        }
    }
    (sum + run) as f64 / adder.factor as f64
}
