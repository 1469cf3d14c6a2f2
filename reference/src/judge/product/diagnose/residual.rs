//! Explains the residual of a wrong element (found minus exact) as the contribution of a part of
//! the sum: a group or a range of k that was dropped or added twice, a group with other scales, one
//! wrong weight.
//!
//! Contributions in f64 select candidate parts; the bounds of the product without the part (or with
//! it twice) decide.

use std::borrow::Cow;

use super::scene::{Scene, Setup, spread_to};
use super::terms::{Line, Terms};
use super::weigh::Scope;
use super::{Finding, best_of, better, weights};

/// Number of columns that are searched for a common cause.
const COLUMNS: usize = 6;
/// k per step of Marlin's kernels.
const STEP: usize = 16;

/// Largest number of parts of the sum that are tried; each costs a product and a list of all k.
const TRIED: usize = 8;
/// Largest number of pairs of first and last step that are examined: all of them up to K = 92,000.
const RANGES: usize = 1 << 24;
/// Largest number of other group scales that are tried; each costs a copy of the weight.
const SCALES: usize = 64;

/// A set of k whose products were dropped or added twice.
struct Part {
    id: &'static str,
    text: String,
    /// Membership of each k of the product.
    k: Vec<bool>,
    /// Factor of the weights: 0 or 2.
    factor: f64,
}

/// Finds the part of the sum that explains the wrong elements best.
pub(super) fn explain(scene: &Scene<'_>) -> Option<Finding> {
    let mut terms = Vec::new();
    for bad in scene.bad.iter().take(3) {
        let columns = spread_to(&bad.main_cols, COLUMNS);
        terms.extend(columns.into_iter().filter_map(|n| Terms::new(scene, bad.part, n)));
    }
    let first = terms.first()?;
    let mut parts = groups(&terms);
    // There are many ranges, so two elements may match one by chance.
    if terms.iter().map(|t| t.judged().count()).sum::<usize>() >= 3 {
        parts.extend(ranges(&terms));
        parts.extend(single(&terms));
    }
    let tried = terms.iter().map(|t| t.weight.scales.rows()).max().unwrap_or(1);
    let cost = hypotheses(first.stored.len(), tried);
    let mut best: Option<Finding> = None;
    for part in parts.into_iter().take(2 * TRIED) {
        let edit: &(dyn Fn(usize, usize, f64) -> f64 + Sync) =
            &|at, _, w| if part.k[at] { w * part.factor } else { w };
        let right = |p: usize| Some(scene.right(p));
        let outcome = scene.weigh_scopes(Scope::of_k(scene), &right, Some(edit), cost);
        if let Some(outcome) = outcome {
            let mut finding = Finding::of(outcome, part.id, &part.text);
            finding.cause = Some(first.cause(|at| part.k[at]));
            best = better(best, finding);
        }
    }
    if best.as_ref().is_some_and(Finding::is_decisive) {
        return best;
    }
    let others =
        best_of([&|| other_groups_scales(scene, &terms), &|| weights::one_code(scene), &|| {
            weights::one_scale(scene)
        }]);
    match others {
        Some(other) => better(best, other),
        None => best,
    }
}

/// Logarithm of the number of parts that are tried: groups, ranges of steps and single k, each
/// dropped or added twice.
fn hypotheses(size_k: usize, groups: usize) -> f64 {
    let steps = size_k.div_ceil(STEP);
    ((2 * groups + steps * (steps + 1) + 2 * size_k) as f64).log2()
}

/// Whether `of(terms, line)` is the residual of every element; among many, one in 16 may have
/// another cause.
fn fits<'t, 's: 't>(terms: &'t [Terms<'s>], of: impl Fn(usize, usize, &Line) -> f64) -> bool {
    let count: usize = terms.iter().map(|t| t.judged().count()).sum();
    let mut outliers = count / 16;
    terms.iter().enumerate().all(|(t, terms)| {
        terms.judged().enumerate().all(|(l, line)| {
            // The tolerance is doubled, because contributions are not rounded as in the bound.
            let fits = (line.residual - of(t, l, line)).abs() <= 2.0 * line.tolerance;
            let outlier = !fits && outliers > 0;
            outliers -= usize::from(outlier);
            fits || outlier
        })
    })
}

const WAYS: [(f64, f64); 2] = [(-1.0, 0.0), (1.0, 2.0)];

fn groups(terms: &[Terms<'_>]) -> Vec<Part> {
    let first = &terms[0];
    let count = first.weight.scales.rows();
    if count == 1 {
        return Vec::new();
    }
    let sums: Vec<Vec<Vec<f64>>> =
        terms.iter().map(|t| t.judged().map(|l| t.by_group(l)).collect()).collect();
    let sum = |t: usize, l: usize, g: usize| sums[t][l][g];
    let mut parts = Vec::new();
    for g in 0..count {
        for (sign, factor) in WAYS {
            if parts.len() == TRIED || !fits(terms, |t, l, _| sign * sum(t, l, g)) {
                continue;
            }
            let k = first.groups.iter().map(|&group| group == g).collect();
            parts.push(if factor == 0.0 {
                let text = format!("group {g} of k is missing from the sum");
                Part { id: "group-dropped", text, k, factor }
            } else {
                let text = format!("group {g} of k was added twice");
                Part { id: "group-twice", text, k, factor }
            });
        }
    }
    parts
}

/// Contiguous ranges of [`STEP`]s, shortest first.
fn ranges(terms: &[Terms<'_>]) -> Vec<Part> {
    let size_k = terms[0].stored.len();
    let steps = size_k.div_ceil(STEP);
    let prefix = |line: &Line| {
        let mut sums = vec![0.0];
        let mut sum = 0.0;
        for step in line.products.chunks(STEP) {
            sum += step.iter().sum::<f64>();
            sums.push(sum);
        }
        sums
    };
    let sums: Vec<Vec<Vec<f64>>> = terms.iter().map(|t| t.judged().map(prefix).collect()).collect();
    let mut parts = Vec::new();
    for length in (1..steps).take((RANGES / steps.max(1)).max(1)) {
        for from in 0..=steps - length {
            for (sign, factor) in WAYS {
                if parts.len() == TRIED {
                    return parts;
                }
                let sum = |t: usize, l: usize| sums[t][l][from + length] - sums[t][l][from];
                if !fits(terms, |t, l, _| sign * sum(t, l)) {
                    continue;
                }
                let (a, b) = (from * STEP, ((from + length) * STEP).min(size_k));
                let sorted = if terms[0].stored.iter().enumerate().all(|(i, &k)| i == k) {
                    ""
                } else {
                    " in sorted order"
                };
                let range = format!("k {a} to {}{sorted} ({})", b - 1, kind(a, b, size_k));
                let k = (0..size_k).map(|k| (a..b).contains(&k)).collect();
                parts.push(if factor == 0.0 {
                    let text = format!("{range} is missing from the sum");
                    Part { id: "k-range-dropped", text, k, factor }
                } else {
                    Part {
                        id: "k-range-twice",
                        text: format!("{range} was added twice"),
                        k,
                        factor,
                    }
                });
            }
        }
    }
    parts
}

/// Describes a range of k in a kernel's terms.
fn kind(a: usize, b: usize, size_k: usize) -> String {
    if b - a == STEP {
        return format!("k16 tile {}", a / STEP);
    }
    if a.is_multiple_of(64) && b.is_multiple_of(64) && b - a == 64 {
        return format!("k64 tile {}", a / 64);
    }
    match (a, b) {
        (0, _) => "a first chunk of k".to_owned(),
        (_, b) if b == size_k => "a last chunk of k".to_owned(),
        _ => format!("{} k16 tiles", (b - a) / STEP),
    }
}

fn single(terms: &[Terms<'_>]) -> Vec<Part> {
    let size_k = terms[0].stored.len();
    let mut parts = Vec::new();
    for at in 0..size_k {
        for (sign, factor) in WAYS {
            if parts.len() < TRIED && fits(terms, |_, _, line| sign * line.products[at]) {
                let row = terms[0].stored[at];
                let k = (0..size_k).map(|k| k == at).collect();
                parts.push(if factor == 0.0 {
                    let text = format!("k {row} is missing from the sum");
                    Part { id: "k-dropped", text, k, factor }
                } else {
                    Part { id: "k-twice", text: format!("k {row} was added twice"), k, factor }
                });
            }
        }
    }
    parts
}

/// Finds a group that has the scales of another group in all wrong columns.
fn other_groups_scales(scene: &Scene<'_>, terms: &[Terms<'_>]) -> Option<Finding> {
    let first = &terms[0];
    let count = first.weight.scales.rows();
    let sums: Vec<Vec<Vec<f64>>> =
        terms.iter().map(|t| t.judged().map(|l| t.by_group(l)).collect()).collect();
    let ratio = |t: &Terms<'_>, g: usize, from: usize| {
        t.weight.scales.value(from, t.n) / t.weight.scales.value(g, t.n)
    };
    let sum = |t: usize, l: usize, g: usize| sums[t][l][g];
    let mut tries = 0..SCALES;
    let mut best: Option<Finding> = None;
    for g in 0..count {
        for from in (0..count).filter(|&from| from != g) {
            let of =
                |t: usize, l: usize, _: &Line| sum(t, l, g) * (ratio(&terms[t], g, from) - 1.0);
            if !fits(terms, of) || tries.next().is_none() {
                continue;
            }
            let setup = |part: usize| {
                let mut weight = scene.stage.parts[part].weight.clone();
                let old = weight.scales;
                let (mut i, cols) = (0, old.cols());
                weight.scales = old.map(old.ty(), |bits| {
                    i += 1;
                    if (i - 1) / cols == g { old.bits(from, (i - 1) % cols) } else { bits }
                });
                Some(Setup { weight: Cow::Owned(weight), ..scene.right(part) })
            };
            let cost = 2.0 * (count as f64).log2();
            if let Some(outcome) = scene.weigh_scopes(Scope::of_k(scene), &setup, None, cost) {
                let text = format!("group {g} of k was given the scales of group {from}");
                let id = "group-scales-of-another-group";
                let mut finding = Finding::of(outcome, id, &text);
                finding.cause = Some(first.cause(|at| first.groups[at] == g));
                best = better(best, finding);
            }
        }
    }
    best
}
