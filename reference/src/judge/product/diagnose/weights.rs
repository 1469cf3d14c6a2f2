//! One wrong weight, or one wrong scale, in each of a few columns.

use std::borrow::Cow;

use super::Finding;
use super::scene::{Scene, Setup, spread_to};
use super::terms::{Line, ROWS, Terms};
use super::weigh::Sample;
use crate::num::scalar::ScalarType;
use crate::products::Bounded;
use crate::weight::Weight;

/// Largest number of wrong columns that may have separate causes.
const OWN_CAUSE: usize = 8;
/// Number of values near a fitted scale that are tried.
const SCALES_TRIED: usize = 16;
/// The search ends if more codes than this may explain a column: among as many none is distinct.
const FITTING_CODES: usize = 1024;

/// Part and column of every wrong column, if they are few and have enough rows.
fn few_columns(scene: &Scene<'_>) -> Option<Vec<(usize, usize)>> {
    let all: Vec<_> =
        scene.bad.iter().flat_map(|b| b.main_cols.iter().map(|&n| (b.part, n))).collect();
    let rows = |&(part, _): &(usize, usize)| scene.stage.parts[part].rows.len() >= 2;
    (all.len() <= OWN_CAUSE && all.iter().all(rows)).then_some(all)
}

/// Every element of a part's column under a setup.
fn column(
    scene: &Scene<'_>,
    part: usize,
    n: usize,
    setup: &Setup<'_>,
) -> Option<Vec<(usize, Bounded)>> {
    let rows = &scene.stage.parts[part].rows;
    let bounded = scene.bounds(setup, rows, &[n], None)?;
    Some(rows.iter().map(|row| row * scene.size_n + n).zip(bounded).collect())
}

/// One wrong code in each wrong column.
pub(super) fn one_code(scene: &Scene<'_>) -> Option<Finding> {
    let (mut texts, mut predicted, mut cost) = (Vec::new(), Vec::new(), 0.0);
    let mut shown = None;
    for (part, n) in few_columns(scene)? {
        let terms = Terms::new(scene, part, n)?;
        let mut fitting = Vec::new();
        for at in 0..terms.stored.len() {
            fitting.extend(codes_at(&terms, at));
            if fitting.len() > FITTING_CODES {
                return None;
            }
        }
        cost += (terms.stored.len() as f64).log2() + f64::from(terms.weight.codes.bits());
        // Each costs a product and a copy of the weight.
        let holds = |(_, (k, _, code), _): &Fit<Code>| column_holds(scene, &terms, *k, *code);
        let (k, old, new) = clearest(fitting, holds)?;
        predicted.extend(column(scene, part, n, &with_code(scene, part, [k, n], new))?);
        texts.push(format!("k {k}, n {n}: code {new} instead of {old}"));
        shown.get_or_insert(terms.cause(|at| terms.stored[at] == k));
    }
    let outcome = scene.weigh(predicted, cost)?;
    let text = format!("one weight of a column is wrong: {}", texts.join("; "));
    let mut finding = Finding::of(outcome, "wrong-code", &text);
    finding.cause = shown;
    Some(finding)
}

/// A fit: its position, its data and the sum of squared residuals.
type Fit<T> = (usize, T, f64);

/// Among the fits that hold, the one with the smallest residual, if it is clearly smaller than at
/// any other position.
fn clearest<T: Copy>(mut fitting: Vec<Fit<T>>, holds: impl Fn(&Fit<T>) -> bool) -> Option<T> {
    fitting.sort_by(|a, b| a.2.total_cmp(&b.2));
    let best = fitting.iter().position(&holds)?;
    let (place, data, left) = fitting[best];
    let close = fitting[best + 1..].iter().take_while(|f| f.2 <= 2.0 * left);
    let rival = close.filter(|f| f.0 != place).any(holds);
    (!rival).then_some(data)
}

/// The sum of a column's squared residuals after subtracting `of`, in units of the tolerance.
fn left(terms: &Terms<'_>, of: impl Fn(usize, &Line) -> f64) -> f64 {
    let squared =
        |(i, line): (usize, &Line)| ((line.residual - of(i, line)) / line.tolerance).powi(2);
    terms.lines.iter().enumerate().map(squared).sum()
}

/// A stored k, the right code and the found one.
type Code = (usize, u8, u8);

/// The other codes at a position that explain a column, by contributions in f64.
fn codes_at(terms: &Terms<'_>, at: usize) -> Vec<Fit<Code>> {
    let (k, n, weight) = (terms.stored[at], terms.n, terms.weight);
    let group = terms.groups[at];
    let old = weight.codes.get(k, n);
    let zero = weight.zeros.as_ref().map_or(0.0, |z| f64::from(z.bits(group, n)));
    let value = |code: u8| weight.ty.to_f64(u32::from(code)) - zero;
    let own = value(old);
    (0..=u8::MAX >> (8 - weight.codes.bits()))
        .filter(|&code| code != old && value(code).is_finite())
        .filter(|&code| {
            let step = value(code) - own;
            terms.lines.iter().all(|l| (l.residual - l.units[at] * step).abs() <= 2.0 * l.tolerance)
        })
        .map(|code| (at, (k, old, code), left(terms, |_, l| l.units[at] * (value(code) - own))))
        .collect()
}

/// Whether replacing one code explains all elements of the column.
fn column_holds(scene: &Scene<'_>, terms: &Terms<'_>, k: usize, code: u8) -> bool {
    let part = &scene.stage.parts[terms.part];
    let setup = with_code(scene, terms.part, [k, terms.n], code);
    let sample =
        Sample { part: terms.part, rows: spread_to(&part.rows, 2 * ROWS), cols: vec![terms.n] };
    scene.holds(&sample, &setup, None)
}

/// A part's product with another code at (k, n).
fn with_code<'s>(scene: &Scene<'s>, part: usize, at: [usize; 2], code: u8) -> Setup<'s> {
    let weight = scene.stage.parts[part].weight;
    let weight = Weight { codes: weight.codes.with(at, code), ..weight.clone() };
    Setup { weight: Cow::Owned(weight), ..scene.right(part) }
}

/// A part's product with the bits of one scale replaced.
fn with_scale<'s>(
    scene: &Scene<'s>,
    part: usize,
    [group, n]: [usize; 2],
    bits: u32,
) -> Option<Setup<'s>> {
    let mut weight = scene.stage.parts[part].weight.clone();
    let (mut i, cols) = (0, weight.scales.cols());
    weight.scales = weight.scales.map(weight.scales.ty(), |old| {
        i += 1;
        if (i - 1) / cols == group && (i - 1) % cols == n { bits } else { old }
    });
    Some(Setup { weight: Cow::Owned(weight), ..scene.right(part) })
}

/// Scales of a column's type whose values are between two, as bits; the nearest to `wanted` first.
fn scales_near(weight: &Weight<'_>, [lo, hi]: [f64; 2], wanted: f64) -> Vec<u32> {
    let ty = weight.scales.ty();
    let bits = weight.scales.ty().storage_bits();
    if bits > 16 {
        return Vec::new();
    }
    let mut all: Vec<(f64, u32)> = (0..1u32 << bits)
        .map(|code| (ty.to_f64(code), code))
        .filter(|(value, _)| (lo..=hi).contains(value))
        .collect();
    all.sort_by(|a, b| (a.0 - wanted).abs().total_cmp(&(b.0 - wanted).abs()));
    all.truncate(SCALES_TRIED);
    all.into_iter().map(|(_, code)| code).collect()
}

/// One group's scale off by a factor, in each wrong column.
pub(super) fn one_scale(scene: &Scene<'_>) -> Option<Finding> {
    let half = scene.stage.dtype == ScalarType::FLOAT16;
    let roundoff = if half { 2f64.powi(-11) } else { 2f64.powi(-8) };
    let (mut texts, mut predicted, mut cost) = (Vec::new(), Vec::new(), 0.0);
    let mut shown = None;
    for (part, n) in few_columns(scene)? {
        let terms = Terms::new(scene, part, n)?;
        let sums: Vec<_> = terms.lines.iter().map(|l| terms.by_group(l)).collect();
        let mut fitting = Vec::new();
        for g in 0..terms.weight.scales.rows() {
            let (mut lo, mut hi) = (f64::NEG_INFINITY, f64::INFINITY);
            for (line, sums) in terms.lines.iter().zip(&sums) {
                let own = terms.groups.iter().zip(&line.products);
                let absolute: f64 =
                    own.filter(|(group, _)| **group == g).map(|(_, x)| x.abs()).sum();
                // Weights with another scale are rounded differently.
                let slack = line.tolerance + 2.0 * roundoff * absolute;
                let (a, b) = ((line.residual - slack) / sums[g], (line.residual + slack) / sums[g]);
                (lo, hi) = (lo.max(a.min(b)), hi.min(a.max(b)));
            }
            if lo <= hi && !(lo..=hi).contains(&0.0) && lo.is_finite() && hi.is_finite() {
                let change = (lo + hi) / 2.0;
                let fit = (g, [lo, change, hi]);
                fitting.push((g, fit, left(&terms, |i, _| sums[i][g] * change)));
            }
        }
        // The scale is fitted to the elements, one of 2^16 values.
        cost += (terms.weight.scales.rows() as f64).log2() + 16.0;
        let (g, [lo, change, hi]) = clearest(fitting, |_| true)?;
        let old = terms.weight.scales.value(g, n);
        let ends = [old * (1.0 + lo), old * (1.0 + hi)];
        let range = [ends[0].min(ends[1]), ends[0].max(ends[1])];
        let (bits, of_column, _) = scales_near(terms.weight, range, old * (1.0 + change))
            .into_iter()
            .filter_map(|bits| {
                let setup = with_scale(scene, part, [g, n], bits)?;
                let made = column(scene, part, n, &setup)?;
                let far = |(i, b): &(usize, Bounded)| b.ratio(scene.found[*i]).min(1e6);
                let distance: f64 = made.iter().map(far).fold(0.0, f64::max);
                Some((bits, made, distance))
            })
            .min_by(|a, b| a.2.total_cmp(&b.2))?;
        predicted.extend(of_column);
        let percent = (terms.weight.scales.ty().to_f64(bits) / old - 1.0) * 100.0;
        texts.push(format!("the scale of group {g}, n {n} is off by {percent:+.2} %"));
        shown.get_or_insert(terms.cause(|at| terms.groups[at] == g));
    }
    let outcome = scene.weigh(predicted, cost)?;
    let mut finding = Finding::of(outcome, "group-scale-off", &texts.join("; "));
    finding.cause = shown;
    Some(finding)
}
