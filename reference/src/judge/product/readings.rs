//! The readings of a product: the conventions that its kernel may follow, tried one after another.

use super::stage::Stage;
use crate::Result;
use crate::judge::power::{self, Accepted, Power};
use crate::num::scalar::ScalarType;
use crate::products::schedule::StepOp;
use crate::products::{Bounded, Class, Convention, Extras, Recipe, Rule};
use crate::weight::Weight;

/// Rows per part in the sample that rules out conventions.
const FIRST_ROWS: usize = 4;

/// Number of elements whose bounds are computed at once.
const AT_ONCE: usize = 1 << 18;

/// One way to read an output. A reading explains an output if it explains every element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Every element is the exact result rounded once; the weights are used as stored, or rounded
    /// to the activation type first.
    Exact { rounded_weights: bool },
    /// Every element is within the bound of a convention.
    Within(Convention),
}

impl Reading {
    /// Its name in reports.
    pub(crate) fn id(self) -> &'static str {
        match self {
            Self::Exact { rounded_weights: false } => "exact",
            Self::Exact { rounded_weights: true } => "exact_rounded_weights",
            Self::Within(convention) => convention.name(),
        }
    }

    /// Narrows the bounds of a convention to the values that the reading accepts.
    pub(super) fn narrow(self, bounded: &mut [Bounded], dtype: ScalarType) {
        if matches!(self, Self::Exact { .. }) {
            bounded.iter_mut().for_each(|b| *b = once_rounded(b, dtype));
        }
    }

    /// What the reading implies about the kernel.
    pub(in crate::judge) fn text(self, dtype: ScalarType) -> String {
        match self {
            Self::Exact { rounded_weights: false } => {
                "every element is the exact result rounded once".to_owned()
            }
            Self::Exact { rounded_weights: true } => format!(
                "every element is the exact result of weights rounded to {dtype}, rounded once"
            ),
            Self::Within(convention) => match convention {
                Convention::Marlin => format!(
                    "group scales are multiplied into weights of {dtype}, and what follows the sum \
                     is rounded step by step"
                ),
                Convention::Stepwise => format!(
                    "weights are rounded to {dtype}, and what follows the sum is rounded step by step"
                ),
                Convention::Canonical => format!(
                    "weights are rounded to {dtype}, and everything after the sum is in f32"
                ),
                Convention::Unrounded => format!(
                    "weights are not rounded to {dtype}, and everything after the sum is in f32"
                ),
                Convention::W8a8 => {
                    "the scales of rows and columns multiply the f32 sum in any order".to_owned()
                }
            },
        }
    }
}

/// The conventions of dequantizing kernels, in the order in which they are tried.
pub(crate) const DEQUANTIZING: &[Convention] =
    &[Convention::Marlin, Convention::Stepwise, Convention::Canonical, Convention::Unrounded];

/// Bounds of all elements under a convention, and the fit of the found elements.
#[derive(Clone)]
struct Tried {
    convention: Convention,
    bounded: Vec<Bounded>,
    /// Elements out of bound.
    wrong: usize,
    /// Whether every element is the exact result rounded once.
    exact: bool,
}

/// The reading of a report, and all readings that explain the output.
pub(super) struct Chosen {
    pub(super) reading: Reading,
    pub(super) convention: Convention,
    pub(super) class: Class,
    pub(super) bounded: Vec<Bounded>,
    /// Of an exact result, the uniform error that the interval of its convention would accept.
    pub(super) interval_error: Option<f64>,
    /// Every reading that explains the output, most specific first.
    pub(super) fits: Vec<Reading>,
}

impl Chosen {
    /// Their names.
    pub(super) fn ids(&self) -> Vec<String> {
        self.fits.iter().map(|reading| reading.id().to_owned()).collect()
    }
}

/// Tries the classes, narrowest first, until a reading explains the output.
pub(super) fn choose(
    stage: &Stage<'_>,
    conventions: &[Convention],
    classes: &[Class],
    found: &[f64],
    or_exact: bool,
) -> Result<Chosen> {
    for (i, class) in classes.iter().enumerate() {
        let last = i + 1 == classes.len();
        let chosen = choose_in(stage, conventions, class, found, (or_exact, last))?;
        if let Some(chosen) = chosen.filter(|chosen| last || !chosen.fits.is_empty()) {
            return Ok(chosen);
        }
    }
    Err(crate::Error::size("readings", 0, "1 or more"))
}

/// Tries the conventions of one class, first on a sample. If one explains the output, those that
/// fail on the sample are not computed further; if none does, the first with the fewest wrong
/// elements is chosen. Unless `whole`, conventions that explain nothing are not computed
/// completely.
fn choose_in(
    stage: &Stage<'_>,
    conventions: &[Convention],
    class: &Class,
    found: &[f64],
    (or_exact, whole): (bool, bool),
) -> Result<Option<Chosen>> {
    let (distinct, same) = distinct(stage, conventions);
    let mut tried = vec![None; distinct.len()];
    if distinct.len() > 1 || !whole {
        let candidates = in_sample(stage, &distinct, class, found)?;
        fill(&mut tried, &distinct, candidates, |list| attempt(stage, list, class, found, true))?;
    }
    // `marlin` reads NaN codes as numbers, so its exact result differs from that of the others.
    let is_exact = |c: Convention, t: &Tried| or_exact && t.exact && c != Convention::Marlin;
    let mut pairs = conventions.iter().zip(&same);
    if !pairs.any(|(c, &at)| tried[at].as_ref().is_some_and(|t| t.wrong == 0 || is_exact(*c, t))) {
        if !whole {
            return Ok(None);
        }
        let missing = (0..distinct.len()).filter(|&i| tried[i].is_none()).collect();
        fill(&mut tried, &distinct, missing, |l| attempt(stage, l, class, found, false))?;
    }
    let (mut fits, mut exact, mut exact_rounded) = (Vec::new(), None, None);
    for (&convention, &at) in conventions.iter().zip(&same) {
        let Some(tried) = &tried[at] else { continue };
        if tried.wrong == 0 {
            fits.push(Reading::Within(convention));
        }
        if is_exact(convention, tried) {
            let slot = match rounds_weights(stage, convention)? {
                true => &mut exact_rounded,
                false => &mut exact,
            };
            slot.get_or_insert(at);
        }
    }
    let once = [(exact, false), (exact_rounded, true)];
    for (at, rounded_weights) in once.into_iter().rev() {
        if at.is_some() {
            fits.insert(0, Reading::Exact { rounded_weights });
        }
    }
    let chosen = once.into_iter().find_map(|(at, r)| Some((at?, r)));
    let Some(at) = chosen.map(|c| c.0).or_else(|| fewest(&tried)) else { return Ok(None) };
    let Some(Tried { convention, mut bounded, .. }) = tried.swap_remove(at) else {
        return Ok(None);
    };
    let reading = match chosen {
        Some((_, rounded_weights)) => Reading::Exact { rounded_weights },
        None => Reading::Within(convention),
    };
    let interval = match reading {
        Reading::Within(_) => None,
        Reading::Exact { .. } => {
            Some(Power::of(&accepted(&bounded), stage.size_n(), stage.dtype).uniform_error)
        }
    };
    let interval_error = interval.flatten();
    reading.narrow(&mut bounded, stage.dtype);
    let class = class.clone();
    Ok(Some(Chosen { reading, convention, class, bounded, interval_error, fits }))
}

/// The distinct conventions, and for each convention the index of its equivalent among them.
pub(super) fn distinct(
    stage: &Stage<'_>,
    conventions: &[Convention],
) -> (Vec<Convention>, Vec<usize>) {
    let mut distinct: Vec<Convention> = Vec::new();
    let place = |convention: &Convention| {
        let same = distinct.iter().position(|&d| same_numbers(stage, d, *convention));
        same.unwrap_or_else(|| {
            distinct.push(*convention);
            distinct.len() - 1
        })
    };
    let same = conventions.iter().map(place).collect();
    (distinct, same)
}

/// Stores the results of `attempt` for the conventions `which`.
fn fill(
    tried: &mut [Option<Tried>],
    distinct: &[Convention],
    which: Vec<usize>,
    attempt: impl FnOnce(&[Convention]) -> Result<Vec<Option<Tried>>>,
) -> Result<()> {
    let list: Vec<Convention> = which.iter().map(|&i| distinct[i]).collect();
    for (i, made) in which.into_iter().zip(attempt(&list)?) {
        tried[i] = made;
    }
    Ok(())
}

/// The reading with the fewest wrong elements. A later reading must have a tenth fewer, since
/// smaller differences are chance if the whole output is wrong.
fn fewest(tried: &[Option<Tried>]) -> Option<usize> {
    let wrong: Vec<(usize, usize)> =
        tried.iter().enumerate().filter_map(|(at, t)| Some((t.as_ref()?.wrong, at))).collect();
    let (first, least) = (wrong.first()?, wrong.iter().min()?);
    let clear = least.0 == 0 || least.0 * 10 <= first.0 * 9;
    Some(if clear { least.1 } else { first.1 })
}

/// The conventions that may explain a sample of the output.
fn in_sample(
    stage: &Stage<'_>,
    conventions: &[Convention],
    class: &Class,
    found: &[f64],
) -> Result<Vec<usize>> {
    let mut left: Vec<usize> = (0..conventions.len()).collect();
    for sample in stage.spread_samples(FIRST_ROWS)? {
        let list: Vec<Convention> = left.iter().map(|&i| conventions[i]).collect();
        let made = sample.bounds(stage, (&list, class))?;
        let places = &sample.places;
        let fits = |all: &Vec<Bounded>| {
            let pairs = || all.iter().zip(places).map(|(b, &i)| (b, found[i]));
            pairs().all(|(b, x)| b.ratio(x) <= 1.0)
                || pairs().all(|(b, x)| is_exact(b, x, stage.dtype))
        };
        let mut fits = made.iter().map(fits);
        left.retain(|_| fits.next().unwrap_or(false));
    }
    Ok(left)
}

/// The bounds of each convention. With `stop`, `None` for conventions that fail on some rows, both
/// by their bounds and as the exact result.
fn attempt(
    stage: &Stage<'_>,
    conventions: &[Convention],
    class: &Class,
    found: &[f64],
    stop: bool,
) -> Result<Vec<Option<Tried>>> {
    let size_n = stage.size_n();
    let zero = |&convention: &Convention| {
        let bounded = vec![Bounded::ZERO; found.len()];
        Some(Tried { convention, bounded, wrong: 0, exact: true })
    };
    let mut tried: Vec<Option<Tried>> = conventions.iter().map(zero).collect();
    let mut in_part = vec![false; found.len() / size_n];
    let at_once = (AT_ONCE / size_n).max(64);
    let parts = stage.parts.iter();
    for (part, rows) in parts.flat_map(|p| p.rows.chunks(at_once).map(move |rows| (p, rows))) {
        rows.iter().for_each(|&row| in_part[row] = true);
        let list: Vec<Convention> = tried.iter().flatten().map(|t| t.convention).collect();
        let mut made = stage.part(part, rows, (&list, class))?.into_iter();
        for slot in &mut tried {
            let Some(tried) = slot else { continue };
            let Some(bounded) = made.next() else { break };
            let (before, mut exact) = (tried.wrong, true);
            for (row, bounded) in rows.iter().zip(bounded.chunks_exact(size_n)) {
                let at = row * size_n;
                tried.bounded[at..][..size_n].copy_from_slice(bounded);
                for (b, &x) in bounded.iter().zip(&found[at..]) {
                    tried.wrong += usize::from(b.ratio(x) > 1.0);
                    exact = exact && is_exact(b, x, stage.dtype);
                }
            }
            tried.exact &= exact;
            if stop && tried.wrong > before && !exact {
                *slot = None;
            }
        }
    }
    for row in (0..in_part.len()).filter(|&row| !in_part[row]) {
        for &x in &found[row * size_n..][..size_n] {
            for tried in tried.iter_mut().flatten() {
                tried.wrong += usize::from(Bounded::ZERO.ratio(x) > 1.0);
                tried.exact &= is_exact(&Bounded::ZERO, x, stage.dtype);
            }
        }
    }
    Ok(tried)
}

/// Whether `found` is the exact result rounded once.
fn is_exact(b: &Bounded, found: f64, dtype: ScalarType) -> bool {
    match b.exact.is_nan() {
        true => found.is_nan(),
        false => found == dtype.to_f64(b.rounded),
    }
}

/// The bound of an element that must be the exact result rounded once.
fn once_rounded(b: &Bounded, dtype: ScalarType) -> Bounded {
    let value = dtype.to_f64(b.rounded);
    let error = (value - b.exact).abs();
    // An infinite result has no error.
    let half = if error.is_finite() { error.max(half_unit(dtype, value)) } else { 0.0 };
    Bounded { lo: value, hi: value, below: half, above: half, ..*b }
}

/// Half a unit in the last place of `dtype` at `value`.
fn half_unit(dtype: ScalarType, value: f64) -> f64 {
    power::unit(dtype, value) / 2.0
}

/// Whether the weights of the product are rounded to the activation type.
fn rounds_weights(stage: &Stage<'_>, convention: Convention) -> Result<bool> {
    match stage.parts.first() {
        None => Ok(false),
        Some(part) => {
            let recipe = stage.recipe(part.weight, convention, Extras::default())?;
            Ok(matches!(recipe.rule, Rule::Rounded(_)))
        }
    }
}

/// Whether two conventions compute the same numbers for all matrices of a product.
fn same_numbers(stage: &Stage<'_>, a: Convention, b: Convention) -> bool {
    let recipe = |weight, c| stage.recipe(weight, c, stage.extras);
    a == b
        || stage.parts.iter().all(|part| {
            let (Ok(x), Ok(y)) = (recipe(part.weight, a), recipe(part.weight, b)) else {
                return false;
            };
            let float_codes = part.weight.ty == ScalarType::FLOAT8_E4M3FN;
            x.rule == y.rule
                && x.power == y.power
                && x.any_order == y.any_order
                && (x.moves_bits == y.moves_bits || !float_codes)
                && effective(part.weight, &x, stage.extras)
                    == effective(part.weight, &y, stage.extras)
        })
}

/// The steps of a recipe that have an operand.
fn effective(
    weight: &Weight<'_>,
    recipe: &Recipe,
    extras: Extras<'_>,
) -> Vec<crate::products::schedule::Step> {
    let has_operand = |op| match op {
        StepOp::GlobalScale => weight.global_scale.is_some(),
        StepOp::Bias => weight.bias.is_some(),
        StepOp::RouterWeight => extras.router_weights.is_some(),
        StepOp::ActivationScale => extras.activation_scales.is_some(),
        _ => true,
    };
    recipe.steps.iter().copied().filter(|s| has_operand(s.op)).collect()
}

/// The intervals that a reading accepts.
pub(super) fn accepted(bounded: &[Bounded]) -> Vec<Accepted> {
    bounded.iter().map(Accepted::from).collect()
}
