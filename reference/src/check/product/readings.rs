//! The readings of a product: the conventions that its kernel may follow, tried one after another.

use super::stage::Stage;
use crate::Result;
use crate::check::power::{self, Accepted};
use crate::gemm::schedule::StepOp;
use crate::gemm::{Bounded, Class, Convention, Extras, Recipe, Rule};
use crate::scalar::ScalarType;
use crate::weight::Weight;

/// Rows of each part that decide whether the others are looked at.
const FIRST_ROWS: usize = 2;

/// One way to read an output. A reading explains an output if it explains every element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::check) enum Reading {
    /// Every element is the exact result rounded once; of the weights as they are, or rounded to
    /// the activation type first.
    Exact { rounded_weights: bool },
    /// Every element is within the bound of a convention.
    Within(Convention),
}

impl Reading {
    /// Its name in reports.
    pub(in crate::check) fn id(self) -> &'static str {
        match self {
            Self::Exact { rounded_weights: false } => "exact",
            Self::Exact { rounded_weights: true } => "exact_rounded_weights",
            Self::Within(convention) => name(convention),
        }
    }

    /// Leaves of the bounds of a convention what the reading accepts.
    pub(super) fn narrow(self, bounded: &mut [Bounded], dtype: ScalarType) {
        if matches!(self, Self::Exact { .. }) {
            bounded.iter_mut().for_each(|b| *b = once_rounded(b, dtype));
        }
    }

    /// What it says of the kernel.
    pub(in crate::check) fn text(self, dtype: ScalarType) -> String {
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
                Convention::ScaledMm => {
                    "the scales of rows and columns multiply the f32 sum in any order".to_owned()
                }
            },
        }
    }
}

/// The name of a convention.
fn name(convention: Convention) -> &'static str {
    let named = Convention::NAMED.iter().find(|(_, c)| *c == convention);
    named.map_or("unnamed", |(name, _)| name)
}

/// The conventions of kernels that make numbers of codes, first to last as they are tried.
pub(in crate::check) const DEQUANTIZING: &[Convention] =
    &[Convention::Marlin, Convention::Stepwise, Convention::Canonical, Convention::Unrounded];

/// Bounds of all elements under a convention, and how the found elements fit them.
pub(super) struct Tried {
    pub(super) convention: Convention,
    pub(super) bounded: Vec<Bounded>,
    /// Elements out of bound.
    pub(super) wrong: usize,
    /// Whether every element is the exact result rounded once.
    exact: bool,
}

/// The reading that a report is of, and all that explain the output.
pub(super) struct Chosen {
    pub(super) reading: Reading,
    pub(super) convention: Convention,
    pub(super) class: Class,
    pub(super) bounded: Vec<Bounded>,
    /// Every reading that explains the output, most specific first.
    pub(super) fits: Vec<Reading>,
}

impl Chosen {
    /// Their names.
    pub(super) fn ids(&self) -> Vec<String> {
        self.fits.iter().map(|reading| reading.id().to_owned()).collect()
    }
}

/// Tries the classes on what was found, the narrowest first, until a reading explains it.
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

/// Tries the conventions of one class. Where one explains the output, the others are left at
/// their first wrong rows; where none does, the one with the fewest wrong elements is chosen, among
/// equals the first. Unless `whole`, what explains nothing is not computed to its end.
fn choose_in(
    stage: &Stage<'_>,
    conventions: &[Convention],
    class: &Class,
    found: &[f64],
    (or_exact, whole): (bool, bool),
) -> Result<Option<Chosen>> {
    let mut tried: Vec<Tried> = Vec::new();
    let mut fits = Vec::new();
    let (mut exact, mut exact_rounded) = (None, None);
    for &convention in conventions {
        let same = tried.iter().position(|t| same_numbers(stage, t.convention, convention));
        let at = match same {
            Some(at) => at,
            None => {
                let stop = !whole || !fits.is_empty();
                let Some(new) = attempt(stage, (convention, class), found, stop)? else {
                    continue;
                };
                tried.push(new);
                tried.len() - 1
            }
        };
        if tried[at].wrong == 0 {
            fits.push(Reading::Within(convention));
        }
        // `marlin` reads NaN codes as numbers: its exact result is not everybody's.
        if tried[at].exact && convention != Convention::Marlin && or_exact {
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
    let (at, reading) = match once.into_iter().find_map(|(at, r)| Some((at?, r))) {
        Some((at, rounded_weights)) => (at, Reading::Exact { rounded_weights }),
        None => {
            let Some(at) = fewest(&tried) else { return Ok(None) };
            (at, Reading::Within(tried[at].convention))
        }
    };
    let Tried { convention, mut bounded, .. } = tried.swap_remove(at);
    reading.narrow(&mut bounded, stage.dtype);
    Ok(Some(Chosen { reading, convention, class: class.clone(), bounded, fits }))
}

/// The reading with the fewest wrong elements; the first, unless another one has fewer by a tenth,
/// since smaller differences are chance where the whole output is wrong.
fn fewest(tried: &[Tried]) -> Option<usize> {
    let least = (0..tried.len()).min_by_key(|&at| (tried[at].wrong, at))?;
    let clear = tried[least].wrong == 0 || tried[least].wrong * 10 <= tried[0].wrong * 9;
    Some(if clear { least } else { 0 })
}

/// The bounds of a convention; `None` where `stop` is set and an element of the first rows fits
/// neither them nor the exact result.
fn attempt(
    stage: &Stage<'_>,
    (convention, class): (Convention, &Class),
    found: &[f64],
    stop: bool,
) -> Result<Option<Tried>> {
    let size_n = stage.size_n();
    let mut all = vec![Bounded::ZERO; found.len()];
    for part in stage.parts.iter().filter(|p| !p.rows.is_empty()) {
        let blocks = match stop {
            true => part.rows.split_at(part.rows.len().min(FIRST_ROWS)),
            false => (&part.rows[..], &[][..]),
        };
        for rows in [blocks.0, blocks.1].into_iter().filter(|rows| !rows.is_empty()) {
            let bounded = stage.part(part, rows, (convention, class))?;
            let (mut within, mut exact) = (true, true);
            for (row, bounded) in rows.iter().zip(bounded.chunks_exact(size_n)) {
                let at = row * size_n;
                all[at..][..size_n].copy_from_slice(bounded);
                for (b, &x) in bounded.iter().zip(&found[at..]) {
                    within &= b.ratio(x) <= 1.0;
                    exact &= is_exact(b, x, stage.dtype);
                }
            }
            if stop && !within && !exact {
                return Ok(None);
            }
        }
    }
    let pairs = || all.iter().zip(found);
    let wrong = pairs().filter(|(b, x)| b.ratio(**x) > 1.0).count();
    let exact = pairs().all(|(b, &x)| is_exact(b, x, stage.dtype));
    Ok(Some(Tried { convention, bounded: all, wrong, exact }))
}

/// Whether `found` is the exact result rounded once.
fn is_exact(b: &Bounded, found: f64, dtype: ScalarType) -> bool {
    match b.exact.is_nan() {
        true => found.is_nan(),
        false => found == dtype.to_f64(b.rounded),
    }
}

/// An element that has to be the exact result rounded once.
fn once_rounded(b: &Bounded, dtype: ScalarType) -> Bounded {
    let value = dtype.to_f64(b.rounded);
    let error = (value - b.exact).abs();
    // What is infinite has no error.
    let half = if error.is_finite() { error.max(half_unit(dtype, value)) } else { 0.0 };
    Bounded { lo: value, hi: value, below: half, above: half, ..*b }
}

/// Half a unit in the last place of `dtype` at `value`.
fn half_unit(dtype: ScalarType, value: f64) -> f64 {
    power::unit(dtype, value) / 2.0
}

/// Whether the numbers that enter the product are rounded to the activation type.
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

/// The steps that have an operand.
fn effective(
    weight: &Weight<'_>,
    recipe: &Recipe,
    extras: Extras<'_>,
) -> Vec<crate::gemm::schedule::Step> {
    let has_operand = |op| match op {
        StepOp::GlobalScale => weight.global_scale.is_some(),
        StepOp::Bias => weight.bias.is_some(),
        StepOp::RouterWeight => extras.router_weights.is_some(),
        StepOp::ActivationScale => extras.activation_scales.is_some(),
        _ => true,
    };
    recipe.steps.iter().copied().filter(|s| has_operand(s.op)).collect()
}

/// What a reading accepts.
pub(super) fn accepted(bounded: &[Bounded]) -> Vec<Accepted> {
    bounded.iter().map(Accepted::from).collect()
}
