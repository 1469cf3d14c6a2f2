//! Single columns with the bias or the scales of another column.

use std::borrow::Cow;

use super::scene::{Scene, Setup, spread};
use super::terms::{Line, Terms};
use super::weigh::Sample;
use super::{Finding, best_of};
use crate::weight::{Table, Weight};

/// Largest number of wrong columns; more have another cause.
const MAX_COLUMNS: usize = 16;
/// Number of columns, nearest to the found numbers, that are computed.
const NEAREST: usize = 6;

/// Finds, for each wrong column of each part, another column whose bias or scales explain it.
pub(super) fn parameters(scene: &Scene<'_>) -> Option<Finding> {
    let count: usize = scene.bad.iter().map(|b| b.main_cols.len()).sum();
    if count > MAX_COLUMNS {
        return None;
    }
    best_of([
        &|| {
            of(scene, "bias-of-another-column", "bias", nearest_biases, |w, n, from| {
                w.bias = Some(with_column(w.bias.as_ref()?, n, from));
                Some(())
            })
        },
        &|| {
            of(scene, "scale-of-another-column", "scales", nearest_scales, |w, n, from| {
                w.scales = with_column(&w.scales, n, from);
                Some(())
            })
        },
    ])
}

/// The table with column `n` replaced by column `from`.
fn with_column(table: &Table, n: usize, from: usize) -> Table {
    let mut i = 0;
    table.map(table.ty(), |bits| {
        let (row, col) = (i / table.cols(), i % table.cols());
        i += 1;
        if col == n { table.bits(row, from) } else { bits }
    })
}

/// Copies column `n` of bias and scales from `from`.
fn merge_column(weight: &mut Weight<'_>, from: &Weight<'_>, n: usize) {
    let merged = |to: &Table, from: &Table| {
        let mut i = 0;
        to.map(to.ty(), |bits| {
            let (row, col) = (i / to.cols(), i % to.cols());
            i += 1;
            if col == n { from.bits(row, n) } else { bits }
        })
    };
    weight.scales = merged(&weight.scales, &from.scales);
    weight.bias = match (&weight.bias, &from.bias) {
        (Some(to), Some(from)) => Some(merged(to, from)),
        _ => None,
    };
}

fn of(
    scene: &Scene<'_>,
    id: &str,
    what: &str,
    nearest: fn(&Terms<'_>) -> Vec<usize>,
    change: fn(&mut Weight<'_>, usize, usize) -> Option<()>,
) -> Option<Finding> {
    let (mut used, mut predicted) = (Vec::new(), Vec::new());
    for bad in &scene.bad {
        let rows = &scene.stage.parts[bad.part].rows;
        let mut all = scene.stage.parts[bad.part].weight.clone();
        for &n in &bad.main_cols {
            let terms = Terms::new(scene, bad.part, n)?;
            let sample = Sample { part: bad.part, rows: spread(rows), cols: vec![n] };
            let from = nearest(&terms).into_iter().find(|&from| {
                let mut weight = scene.stage.parts[bad.part].weight.clone();
                change(&mut weight, n, from).is_some() && {
                    let setup = Setup { weight: Cow::Owned(weight), ..scene.right(bad.part) };
                    scene.holds(&sample, &setup, None)
                }
            })?;
            used.push((n, from));
        }
        let original = all.clone();
        for &(n, from) in &used[used.len() - bad.main_cols.len()..] {
            // Each is taken from the original columns.
            let mut one = original.clone();
            change(&mut one, n, from)?;
            merge_column(&mut all, &one, n);
        }
        let setup = Setup { weight: Cow::Owned(all), ..scene.right(bad.part) };
        let bounded = scene.bounds(&setup, rows, &bad.main_cols, None)?;
        let cols = &bad.main_cols;
        let places = rows.iter().flat_map(|r| cols.iter().map(move |n| r * scene.size_n + n));
        predicted.extend(places.zip(bounded));
    }
    let cost = 1.0 + used.len() as f64 * (scene.size_n as f64).log2();
    let outcome = scene.weigh(predicted, cost)?;
    let text = match used[..] {
        [(a, from_a), (b, from_b)] if (from_a, from_b) == (b, a) => {
            format!("the {what} of columns {a} and {b} are swapped")
        }
        _ => {
            let named: Vec<_> =
                used.iter().take(4).map(|(n, from)| format!("{n} has that of {from}")).collect();
            format!("columns have the {what} of another: {}", named.join(", "))
        }
    };
    Some(Finding::of(outcome, id, &text))
}

/// The columns other than n for which `distance` is least.
fn least(terms: &Terms<'_>, distance: impl Fn(usize) -> f64) -> Vec<usize> {
    let mut all: Vec<(f64, usize)> = (0..terms.weight.shape().size_n)
        .filter(|&n| n != terms.n)
        .map(|n| (distance(n), n))
        .filter(|(d, _)| !d.is_nan())
        .collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all.truncate(NEAREST);
    all.into_iter().map(|(_, n)| n).collect()
}

fn nearest_biases(terms: &Terms<'_>) -> Vec<usize> {
    let Some(bias) = &terms.weight.bias else { return Vec::new() };
    let Some(first) = terms.lines.first() else { return Vec::new() };
    // Only the router weight multiplies the bias.
    let wanted = bias.value(0, terms.n) + first.residual / first.router;
    least(terms, |n| (bias.value(0, n) - wanted).abs())
}

fn nearest_scales(terms: &Terms<'_>) -> Vec<usize> {
    let scales = &terms.weight.scales;
    let own: Vec<f64> = (0..scales.rows()).map(|g| scales.value(g, terms.n)).collect();
    if own.contains(&0.0) {
        return Vec::new();
    }
    let lines: Vec<_> = terms.lines.iter().take(4).map(|l| (l, terms.by_group(l))).collect();
    least(terms, |n| {
        let of = |(line, sums): &(&Line, Vec<f64>)| {
            let change =
                sums.iter().enumerate().map(|(g, sum)| sum * (scales.value(g, n) / own[g] - 1.0));
            ((change.sum::<f64>() - line.residual) / line.tolerance).abs()
        };
        lines.iter().map(of).fold(0.0, f64::max)
    })
}
