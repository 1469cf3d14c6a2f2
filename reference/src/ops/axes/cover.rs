//! Greedy covering arrays, one row at a time, as AETG builds them.
//!
//! A row begins with a combination that no earlier row has. Each further axis takes the value with the
//! most new combinations among those that a legal row can still have.

use std::collections::BTreeSet;

use super::Axes;

/// The combinations of one set of axes.
struct Tuples {
    axes: Vec<usize>,
    /// For each combination, the last axis fastest: whether a row has it, or none can.
    done: Vec<bool>,
}

impl Tuples {
    fn new(axes: Vec<usize>, sizes: &[usize]) -> Self {
        let len = axes.iter().map(|&axis| sizes[axis]).product();
        Self { axes, done: vec![false; len] }
    }

    /// The combination of a row; `None` where an axis has no value yet.
    fn index(&self, row: &[Option<usize>], sizes: &[usize]) -> Option<usize> {
        self.axes.iter().try_fold(0, |at, &axis| Some(at * sizes[axis] + row[axis]?))
    }

    /// The row that has only combination `at`.
    fn row(&self, mut at: usize, sizes: &[usize]) -> Vec<Option<usize>> {
        let mut row = vec![None; sizes.len()];
        for &axis in self.axes.iter().rev() {
            row[axis] = Some(at % sizes[axis]);
            at /= sizes[axis];
        }
        row
    }
}

/// Every set of `size` of `0..len`, ascending.
fn subsets(len: usize, size: usize) -> Vec<Vec<usize>> {
    if size == 0 {
        return vec![Vec::new()];
    }
    let last = |set: Vec<usize>| {
        let first = set.last().map_or(0, |&last| last + 1);
        (first..len).map(move |next| [set.as_slice(), &[next]].concat())
    };
    subsets(len, size - 1).into_iter().flat_map(last).collect()
}

/// A legal row with the values of `partial`, found by trying the values of each further axis.
pub(super) fn complete(axes: &Axes, partial: &[Option<usize>]) -> Option<Vec<usize>> {
    let mut row = partial.to_vec();
    if axes.forbidding(&row).is_some() {
        return None;
    }
    fill(axes, &mut row).then(|| row.into_iter().flatten().collect())
}

/// Gives every axis a value, from the first that has none. Restores the row where that is impossible.
fn fill(axes: &Axes, row: &mut [Option<usize>]) -> bool {
    let Some(axis) = row.iter().position(Option::is_none) else { return true };
    for value in 0..axes.axes[axis].values.len() {
        row[axis] = Some(value);
        if axes.rules.iter().all(|r| !r.axes.contains(&axis) || !axes.forbids(r, row))
            && fill(axes, row)
        {
            return true;
        }
    }
    row[axis] = None;
    false
}

/// The rows of a covering array of this strength.
pub(super) fn rows(axes: &Axes, strength: usize) -> Vec<Vec<usize>> {
    let sizes = axes.sizes();
    let strength = strength.min(sizes.len());
    let sets: BTreeSet<Vec<usize>> =
        subsets(sizes.len(), strength).into_iter().chain(axes.together.iter().cloned()).collect();
    let mut array = Array {
        axes,
        // Combinations of many axes first: their rows cover the most of the others.
        tuples: sets.into_iter().map(|set| Tuples::new(set, &sizes)).collect(),
        of_axis: Vec::new(),
        used: sizes.iter().map(|&size| vec![0; size]).collect(),
        sizes,
        rows: Vec::new(),
    };
    array.tuples.sort_by_key(|tuples| std::cmp::Reverse(tuples.done.len()));
    array.of_axis = (0..array.sizes.len())
        .map(|axis| {
            let has = |&at: &usize| array.tuples[at].axes.contains(&axis);
            (0..array.tuples.len()).filter(has).collect()
        })
        .collect();
    array.build();
    array.rows
}

/// A covering array in the making.
struct Array<'a> {
    axes: &'a Axes,
    sizes: Vec<usize>,
    tuples: Vec<Tuples>,
    /// The sets of axes that contain an axis.
    of_axis: Vec<Vec<usize>>,
    /// Rows with each value.
    used: Vec<Vec<usize>>,
    rows: Vec<Vec<usize>>,
}

impl Array<'_> {
    fn build(&mut self) {
        for set in 0..self.tuples.len() {
            for at in 0..self.tuples[set].done.len() {
                if self.tuples[set].done[at] {
                    continue;
                }
                let partial = self.tuples[set].row(at, &self.sizes);
                if complete(self.axes, &partial).is_none() {
                    self.tuples[set].done[at] = true;
                    continue;
                }
                self.add(partial);
            }
        }
    }

    /// Completes a row that a legal one begins with, and adds it.
    fn add(&mut self, mut row: Vec<Option<usize>>) {
        let count = self.sizes.len();
        // Another axis first in each row, so that no axis always follows the others.
        let turn = self.rows.len();
        for axis in (0..count).map(|i| (i + turn) % count) {
            if row[axis].is_none() {
                row[axis] = Some(self.best(&mut row, axis));
            }
        }
        for tuples in &mut self.tuples {
            if let Some(at) = tuples.index(&row, &self.sizes) {
                tuples.done[at] = true;
            }
        }
        let row: Vec<usize> = row.into_iter().flatten().collect();
        self.used.iter_mut().zip(&row).for_each(|(used, &value)| used[value] += 1);
        self.rows.push(row);
    }

    /// The value of `axis` with the most new combinations; among equals the one in the fewest rows.
    fn best(&self, row: &mut [Option<usize>], axis: usize) -> usize {
        let mut values: Vec<(usize, usize, usize)> = (0..self.sizes[axis])
            .map(|value| {
                row[axis] = Some(value);
                (usize::MAX - self.gain(row, axis), self.used[axis][value], value)
            })
            .collect();
        values.sort_unstable();
        let legal = |&&(_, _, value): &&(usize, usize, usize)| {
            row[axis] = Some(value);
            complete(self.axes, row).is_some()
        };
        let found = values.iter().find(legal).map(|&(_, _, value)| value);
        row[axis] = None;
        // The row began with a part of a legal one, so a value is found.
        found.unwrap_or_default()
    }

    /// Combinations with `axis` that the row has and no earlier one.
    fn gain(&self, row: &[Option<usize>], axis: usize) -> usize {
        let is_new = |&&set: &&usize| {
            let tuples = &self.tuples[set];
            tuples.index(row, &self.sizes).is_some_and(|at| !tuples.done[at])
        };
        self.of_axis[axis].iter().filter(is_new).count()
    }
}
