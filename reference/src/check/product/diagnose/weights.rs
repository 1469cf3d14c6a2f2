//! One wrong weight, or one wrong scale, in each of a few columns.

use std::borrow::Cow;

use super::Finding;
use super::residual::cause;
use super::scene::{Sample, Scene, Setup, spread_to};
use super::terms::{Line, ROWS, Terms};
use crate::scalar::ScalarType;
use crate::weight::{Codes, Weight};

/// Wrong columns that may each have a cause of their own.
const OWN_CAUSE: usize = 8;
/// Codes of a column that may explain it before the search is given up.
const FITTING_CODES: usize = 256;

/// Part and column of every wrong column, where they are few and have enough rows.
fn few_columns(scene: &Scene<'_>) -> Option<Vec<(usize, usize)>> {
    let all: Vec<_> = scene.bad.iter().flat_map(|b| b.cols.iter().map(|&n| (b.part, n))).collect();
    let rows = |&(part, _): &(usize, usize)| scene.stage.parts[part].rows.len() >= 2;
    (all.len() <= OWN_CAUSE && all.iter().all(rows)).then_some(all)
}

/// One wrong code in each wrong column.
pub(super) fn one_code(scene: &Scene<'_>) -> Option<Finding> {
    let mut texts = Vec::new();
    let mut shown = None;
    for (part, n) in few_columns(scene)? {
        let terms = Terms::new(scene, part, n)?;
        let mut fitting = Vec::new();
        for at in 0..terms.stored.len() {
            fitting.extend(codes_at(scene, &terms, at));
            // Each costs a copy of the weight, and of so many none is the clearest.
            if fitting.len() > FITTING_CODES {
                return None;
            }
        }
        let (k, old, new) = clearest(fitting)?;
        texts.push(format!("k {k}, n {n}: code {new} instead of {old}"));
        shown.get_or_insert(cause(&terms, |at| terms.stored[at] == k));
    }
    let text = format!("one weight of a column is wrong: {}", texts.join("; "));
    let mut finding = Finding::new("wrong-code", text);
    finding.cause = shown;
    Some(finding)
}

/// Of the fits that the bounds allow, the one that leaves least, where it leaves clearly less than
/// any at another place. A fit is its place first, and comes with the sum of squares that it leaves.
fn clearest<T: Copy>(mut fitting: Vec<(usize, T, f64)>) -> Option<T> {
    fitting.sort_by(|a, b| a.2.total_cmp(&b.2));
    let &(place, best, left) = fitting.first()?;
    let second = fitting.iter().find(|f| f.0 != place);
    second.is_none_or(|f| f.2 > 2.0 * left).then_some(best)
}

/// What `of` leaves of a column's residuals, in tolerances, squared.
fn left(terms: &Terms<'_>, of: impl Fn(usize, &Line) -> f64) -> f64 {
    let squared =
        |(i, line): (usize, &Line)| ((line.residual - of(i, line)) / line.tolerance).powi(2);
    terms.lines.iter().enumerate().map(squared).sum()
}

/// A stored k, the right code and the found one.
type Code = (usize, u8, u8);

/// The other codes at a place that explain a column.
fn codes_at(scene: &Scene<'_>, terms: &Terms<'_>, at: usize) -> Vec<(usize, Code, f64)> {
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
        .filter(|&code| column_holds(scene, terms, k, code))
        .map(|code| (at, (k, old, code), left(terms, |_, l| l.units[at] * (value(code) - own))))
        .collect()
}

/// Whether the column of a matrix with another code in it explains all its elements.
fn column_holds(scene: &Scene<'_>, terms: &Terms<'_>, k: usize, code: u8) -> bool {
    let part = &scene.stage.parts[terms.part];
    let codes = &part.weight.codes;
    let (bits, pack) = (codes.bits(), codes.pack());
    let mut words = codes.words().to_vec();
    let word = &mut words[k / pack * scene.size_n + terms.n];
    let shift = (k % pack) as u32 * bits;
    *word = *word & !((u32::MAX >> (32 - bits)) << shift) | u32::from(code) << shift;
    let Ok(codes) = Codes::from_words(bits, codes.shape(), words) else { return false };
    let weight = Weight { codes, ..part.weight.clone() };
    let setup = Setup { weight: Cow::Owned(weight), ..scene.right(terms.part) };
    let sample =
        Sample { part: terms.part, rows: spread_to(&part.rows, 2 * ROWS), cols: vec![terms.n] };
    scene.holds(&sample, &setup, None)
}

/// One group's scale off by a factor, in each wrong column.
pub(super) fn one_scale(scene: &Scene<'_>) -> Option<Finding> {
    let half = scene.stage.dtype == ScalarType::FLOAT16;
    let roundoff = if half { 2f64.powi(-11) } else { 2f64.powi(-8) };
    let mut texts = Vec::new();
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
                // Weights with another scale are rounded in another way.
                let slack = line.tolerance + 2.0 * roundoff * absolute;
                let (a, b) = ((line.residual - slack) / sums[g], (line.residual + slack) / sums[g]);
                (lo, hi) = (lo.max(a.min(b)), hi.min(a.max(b)));
            }
            if lo <= hi && !(lo..=hi).contains(&0.0) && lo.is_finite() && hi.is_finite() {
                let change = (lo + hi) / 2.0;
                fitting.push((g, (g, change), left(&terms, |i, _| sums[i][g] * change)));
            }
        }
        let (g, change) = clearest(fitting)?;
        let percent = change * 100.0;
        texts.push(format!("the scale of group {g}, n {n} is off by {percent:+.2} %"));
        shown.get_or_insert(cause(&terms, |at| terms.groups[at] == g));
    }
    let mut finding = Finding::new("group-scale-off", texts.join("; "));
    finding.cause = shown;
    Some(finding)
}
