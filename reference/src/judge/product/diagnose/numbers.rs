//! Mistakes that need no other product: zeros, infinities and factors.

use super::scene::Scene;
use super::weigh::Scope;
use super::{Finding, better};
use crate::judge::mistake::MARGIN;
use crate::judge::numbers::number;
use crate::judge::plain::{self as plain_names, floats};
use crate::judge::power;
use crate::judge::{Diagnosis, Strength};
use crate::num::scalar::ScalarType;
use crate::products::{Bounded, Convention};

/// Zeros, NaN, infinities or one constant in place of numbers, and numbers in place of zeros.
pub(super) fn plain(scene: &Scene<'_>) -> Option<Finding> {
    if let Some(finding) = constant_rows(scene) {
        return Some(finding);
    }
    let count = scene.wrong.iter().filter(|&i| scene.home[i / scene.size_n].is_none()).count();
    if count * 10 >= scene.wrong.len() * 9
        && let Some(finding) = absent(scene, count)
    {
        return Some(finding);
    }
    let pair = |&i: &usize| (scene.found[i], scene.bounded[i].exact);
    let pairs: Vec<(f64, f64)> = scene.wrong.iter().map(pair).collect();
    let (id, text) = floats(&pairs, scene.found.iter().all(|x| *x == 0.0))?;
    // If all wrong elements are infinite, a later suspect may state which overflow and why.
    let infinite = pairs.iter().all(|(x, _)| x.is_infinite());
    if id == "not-finite"
        && infinite
        && let Some(finding) = super::whole(scene)
            .filter(|f| f.diagnosis.unexplained == 0 && f.diagnosis.strength != Strength::Place)
    {
        return Some(finding);
    }
    Some(Finding::plain(id, text))
}

/// Rows of experts of other ranks with `count` wrong elements: they hold the product of an expert
/// of this rank, or other values.
fn absent(scene: &Scene<'_>, count: usize) -> Option<Finding> {
    let mut rows: Vec<usize> = scene.wrong.iter().map(|i| i / scene.size_n).collect();
    rows.retain(|&row| scene.home[row].is_none());
    rows.dedup();
    let cols: Vec<usize> = (0..scene.size_n).collect();
    let parts = scene.stage.parts;
    let cost = ((parts.len() * Convention::NAMED.len()) as f64).log2();
    let mut best: Option<Finding> = None;
    for (p, part) in parts.iter().enumerate() {
        for &(_, convention) in Convention::NAMED {
            let other = scene.under(convention, scene.bounded, scene.wrong);
            let Some(bounded) = other.bounds(&other.right(p), &rows, &cols, None) else { continue };
            let places =
                rows.iter().flat_map(|row| cols.iter().map(move |n| row * scene.size_n + n));
            let Some(outcome) = other.weigh(places.zip(bounded), cost) else { continue };
            let text = format!(
                "rows of experts that are not on this rank hold the product with expert {}: their \
                 id, -1, was used as an index",
                part.global
            );
            best = better(best, Finding::of(outcome, "absent-expert-indexed", &text));
        }
    }
    if best.is_some() {
        return best;
    }
    let text = "rows of experts that are not on this rank are not zero";
    (count == scene.wrong.len()).then(|| Finding::plain("absent-expert-not-zero", text))
}

/// NaN in rows of constant activations.
fn constant_rows(scene: &Scene<'_>) -> Option<Finding> {
    let rows = &scene.stage.rows;
    let constant = |row: usize| {
        let values = rows.row(row);
        values.iter().all(|x| *x == values[0])
    };
    let constant: Vec<bool> = (0..scene.home.len().min(rows.rows())).map(constant).collect();
    let is_nan = |i: usize| scene.found[i].is_nan();
    plain_names::constant_rows(&constant, scene.size_n, scene.wrong, is_nan).map(Finding::fact)
}

/// Infinities and NaN among other wrong numbers.
pub(super) fn special(scene: &Scene<'_>) -> Option<Finding> {
    let special = scene.wrong.iter().filter(|&&i| !scene.found[i].is_finite()).count();
    if special == 0 {
        return None;
    }
    let nan = scene.wrong.iter().filter(|&&i| scene.found[i].is_nan()).count();
    let infinite = special - nan;
    let text = format!(
        "{special} elements are no numbers where one belongs ({nan} NaN, {infinite} infinite)"
    );
    let diagnosis = Diagnosis {
        id: "not-finite".to_owned(),
        text,
        unexplained: scene.wrong.len() - special,
        strength: Strength::Place,
    };
    Some(Finding::new(diagnosis))
}

/// Factors within this distance of 1 keep the plain radius: rounding errors would seem to be one.
const NEAR_ONE: f64 = 0.125;
/// Factors within this distance of -1 are signs.
const SIGN: f64 = 1.0 / 64.0;

/// One factor for all elements of a part, of its wrong rows or columns, or of their rectangle.
pub(super) fn factor(scene: &Scene<'_>) -> Option<Finding> {
    if scene.wrong.len() < 4 {
        return None;
    }
    let mut factors = Vec::new();
    for bad in &scene.bad {
        factors.push((bad.part, of_part(scene, bad.part)?));
    }
    let &(_, first) = factors.first()?;
    let scaled = |i: usize, f: f64| {
        let b = &scene.bounded[i];
        let radius = spread(b, f, scene.stage.dtype);
        let exact = b.exact * f;
        let (lo, hi) = (exact - radius, exact + radius);
        (i, Bounded { exact, lo, hi, centre: exact, below: radius, above: radius, ..*b })
    };
    // The factor is fitted to one element of each part. A sign that is lost tells no more than one bit.
    let cost = 12.0 * factors.len() as f64;
    let signs = factors.iter().all(|(_, f)| (f + 1.0).abs() < SIGN);
    let in_scope = |scope: Scope| {
        let mut predicted = Vec::new();
        for (bad, &(_, f)) in scene.bad.iter().zip(&factors) {
            let (rows, cols) = scope.within(scene, bad);
            let at = rows.iter().flat_map(|r| cols.iter().map(move |n| r * scene.size_n + n));
            predicted.extend(at.map(|i| scaled(i, f)));
        }
        let choice: f64 = scene.bad.iter().map(|bad| scope.choice(scene, bad)).sum();
        if signs && (scene.wrong.len() as f64) < choice + MARGIN {
            return None;
        }
        scene.compared(predicted).outcome_of(cost, choice)
    };
    let outcome = Scope::ALL.into_iter().find_map(in_scope)?;
    let named: Vec<String> = factors
        .iter()
        .take(4)
        .map(|&(part, f)| {
            if scene.stage.parts.len() > 1 {
                format!("{} (expert {})", number(f), scene.stage.parts[part].global)
            } else {
                number(f)
            }
        })
        .collect();
    let mut text = format!("every wrong element is what it should be times {}", named.join(", "));
    let power = first.abs().log2().round();
    if power != 0.0 && (first.abs() / power.exp2() - 1.0).abs() < 1e-4 {
        text += &format!(", or 2^{power}");
    }
    let one_half = {
        let half = scene.size_n / 2;
        let upper = |i: &usize| i % scene.size_n >= half;
        scene.wrong.iter().all(upper) || !scene.wrong.iter().any(upper)
    };
    let global = scene.stage.parts.iter().any(|p| p.weight.global_scale.is_some());
    if scene.stage.name == "gate_up" && one_half && global {
        text += ": gate and up have a global scale each, and one of them was applied to both";
        return Some(Finding::of(outcome, "gate-scale-on-up", &text));
    }
    Some(Finding::of(outcome, "constant-factor", &text))
}

/// The factor that most wrong elements of a part allow; `None` if it is 1 or turns numbers into
/// zeros.
fn of_part(scene: &Scene<'_>, part: usize) -> Option<f64> {
    let of = |&i: &usize| ratios(&scene.bounded[i], scene.found[i], scene.stage.dtype);
    let mut all: Vec<(f64, f64)> = scene
        .wrong
        .iter()
        .filter(|&&i| scene.home[i / scene.size_n] == Some(part))
        .filter_map(of)
        .collect();
    // Narrow ranges are most informative; their median is among those that agree.
    all.sort_by(|a, b| (a.1 - a.0).total_cmp(&(b.1 - b.0)));
    all.truncate(all.len().div_ceil(2));
    let mut middles: Vec<f64> = all.iter().map(|(a, b)| (a + b) / 2.0).collect();
    middles.sort_by(f64::total_cmp);
    let median = *middles.get(middles.len() / 2)?;
    let (mut lo, mut hi) = (f64::NEG_INFINITY, f64::INFINITY);
    for (a, b) in all.into_iter().filter(|(a, b)| (*a..=*b).contains(&median)) {
        (lo, hi) = (lo.max(a), hi.min(b));
    }
    let factor = simplest(lo, hi);
    let known = factor.is_finite() && factor != 0.0 && !(lo..=hi).contains(&1.0);
    (known && !(lo..=hi).contains(&0.0)).then_some(factor)
}

/// The number between `lo` and `hi` with the fewest binary digits after the point.
fn simplest(lo: f64, hi: f64) -> f64 {
    let middle = (lo + hi) / 2.0;
    let rounded = (0..24).map(|digits| {
        let unit = f64::from(1u32 << digits);
        (middle * unit).round() / unit
    });
    rounded
        .into_iter()
        .find(|factor| *factor != 0.0 && (lo..=hi).contains(factor))
        .unwrap_or(middle)
}

/// The factors by which the exact number may have been multiplied before its roundings.
fn ratios(b: &Bounded, found: f64, ty: ScalarType) -> Option<(f64, f64)> {
    if b.exact == 0.0 || b.is_unbounded() {
        return None;
    }
    let factor = found / b.exact;
    let radius = spread(b, factor, ty) / b.exact.abs();
    Some((factor - radius, factor + radius))
}

/// How far an element may be from its exact value after a factor: its bound scales with it, and so does
/// the last rounding, unless the product has another exponent. A factor that is not near 1 may multiply
/// the rounded value, which is rounded again.
fn spread(b: &Bounded, factor: f64, ty: ScalarType) -> f64 {
    let half = |x: f64| power::unit(ty, x) / 2.0;
    let again = half(b.exact * factor);
    let grown = (again - factor.abs() * half(b.exact)).max(0.0);
    let near_one = (factor - 1.0).abs() < NEAR_ONE;
    b.below.max(b.above) * factor.abs() + if near_one { grown } else { again }
}
