//! Suspects against the found elements: a sample rules out most of them, the others are compared with
//! every element.

use super::scene::{Bad, Edit, Scene, Setup, explains, spread, spread_to};
use crate::judge::Strength;
use crate::judge::mistake::{Comparison, Outcome, choice, near};
use crate::products::Bounded;

/// Number of wrong rows and columns on which a suspect is tried, and number of others.
const SAMPLE: usize = 8;
/// Number of parts (experts) on which a suspect is tried.
const PARTS: usize = 4;
/// Fewest columns of one part that share a wrong range of k: a kernel reads as many at once.
const SHARED_COLUMNS: usize = 8;

/// A rectangle of elements of one part.
pub(super) struct Sample {
    pub(super) part: usize,
    pub(super) rows: Vec<usize>,
    pub(super) cols: Vec<usize>,
}

/// The elements to which a suspect applies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Scope {
    /// All elements of the parts with wrong ones.
    Parts,
    /// The rows with wrong elements.
    Rows,
    /// The columns with wrong elements.
    Columns,
    /// The rectangle of both.
    Tile,
}

impl Scope {
    pub(super) const ALL: [Self; 4] = [Self::Parts, Self::Rows, Self::Columns, Self::Tile];

    /// The scopes of a mistake with some k, which a kernel makes in all columns that it reads at
    /// once.
    pub(super) fn of_k(scene: &Scene<'_>) -> &'static [Self] {
        let shared = |b: &Bad| b.main_cols.len() >= SHARED_COLUMNS.min(scene.size_n);
        if scene.bad.iter().all(shared) { &Self::ALL } else { &[Self::Parts, Self::Rows] }
    }

    /// The bits that say which rows and columns of one part it has: they were chosen by their wrong
    /// elements.
    pub(super) fn choice(self, scene: &Scene<'_>, bad: &Bad) -> f64 {
        let rows = || {
            let all = &scene.stage.parts[bad.part].rows;
            let at = |row: &usize| all.iter().position(|r| r == row);
            choice::of_lines(&bad.main_rows.iter().filter_map(at).collect::<Vec<_>>(), all.len())
        };
        let cols = || choice::of_lines(&bad.main_cols, scene.size_n);
        match self {
            Self::Parts => 0.0,
            Self::Rows => rows(),
            Self::Columns => cols(),
            Self::Tile => rows() + cols(),
        }
    }

    /// Its rows and columns in one part.
    pub(super) fn within(self, scene: &Scene<'_>, bad: &Bad) -> (Vec<usize>, Vec<usize>) {
        let part = &scene.stage.parts[bad.part];
        let (all_rows, all_cols) = (|| part.rows.clone(), || (0..scene.size_n).collect());
        match self {
            Self::Parts => (all_rows(), all_cols()),
            Self::Rows => (bad.main_rows.clone(), all_cols()),
            Self::Columns => (all_rows(), bad.main_cols.clone()),
            Self::Tile => (bad.main_rows.clone(), bad.main_cols.clone()),
        }
    }
}

impl<'s> Scene<'s> {
    /// Two lists of samples. A suspect must explain every sample of the first (wrong rows, with
    /// some right columns) or of the second (wrong columns, with some right rows).
    pub(super) fn samples(&self) -> [Vec<Sample>; 2] {
        let of = |more_rows: bool| {
            let sample = |bad: &Bad| {
                let part = &self.stage.parts[bad.part];
                let (mut rows, mut cols) = (spread(&bad.main_rows), Vec::new());
                // Include columns that are wrong in these rows, so that the sample does not miss
                // all of them.
                for &row in &rows {
                    let wrong: Vec<usize> =
                        bad.main_cols.iter().copied().filter(|&n| self.is_wrong(row, n)).collect();
                    cols.extend(spread_to(&wrong, SAMPLE.div_ceil(rows.len())));
                }
                cols.extend(spread(&bad.main_cols));
                if more_rows {
                    rows.extend(spread(&part.rows));
                } else {
                    cols.extend(spread_to(&(0..self.size_n).collect::<Vec<_>>(), SAMPLE));
                }
                Sample { part: bad.part, rows: distinct(rows), cols: distinct(cols) }
            };
            self.bad.iter().take(PARTS).map(sample).collect()
        };
        [of(false), of(true)]
    }

    /// Whether nearly every element of a sample matches `setup`. One wrong element in ten may have
    /// another cause.
    pub(super) fn holds(&self, sample: &Sample, setup: &Setup<'_>, edit: Option<Edit<'_>>) -> bool {
        let Some(bounded) = self.bounds(setup, &sample.rows, &sample.cols, edit) else {
            return false;
        };
        let places = sample.rows.iter().flat_map(|&r| sample.cols.iter().map(move |&n| (r, n)));
        let (mut left, mut wrong) = (0, 0);
        let mut distances = Comparison::default();
        for ((row, n), b) in places.zip(&bounded) {
            let is_wrong = self.is_wrong(row, n);
            wrong += usize::from(is_wrong);
            let i = row * self.size_n + n;
            let x = self.found[i];
            distances.weigh_distance(&self.bounded[i], b, x, self.stage.dtype);
            if !explains(b, x) && !self.is_near(b, x) {
                if !is_wrong && !b.is_unbounded() {
                    return false;
                }
                left += 1;
            }
        }
        left * 8 <= wrong && !distances.is_loose()
    }

    /// Whether a number is within a few units in the last place of a prediction.
    fn is_near(&self, made: &Bounded, found: f64) -> bool {
        near(made, found, made.exact.abs(), self.stage.dtype)
    }

    /// Compares the setups of `make` with all elements, in any scope.
    pub(super) fn weigh_setups(
        &self,
        make: &dyn Fn(usize) -> Option<Setup<'s>>,
        cost: f64,
    ) -> Option<Outcome> {
        self.weigh_scopes(&Scope::ALL, make, None, cost)
    }

    /// Compares the setups of `make`, changed by `edit`, with all elements, if they hold for one of
    /// the `allowed` scopes. Samples are tried first.
    pub(super) fn weigh_scopes(
        &self,
        allowed: &[Scope],
        make: &dyn Fn(usize) -> Option<Setup<'s>>,
        edit: Option<Edit<'_>>,
        cost: f64,
    ) -> Option<Outcome> {
        let samples = self.samples();
        let sampled = |list: &Vec<Sample>| {
            !list.is_empty()
                && list.iter().all(|s| make(s.part).is_some_and(|m| self.holds(s, &m, edit)))
        };
        let [rows, columns] = [sampled(&samples[0]), sampled(&samples[1])];
        let tile = rows
            || columns
            || self.bad.iter().take(PARTS).all(|bad| {
                let (rows, cols) = (spread(&bad.main_rows), spread(&bad.main_cols));
                let sample = Sample { part: bad.part, rows, cols };
                make(bad.part).is_some_and(|m| self.holds(&sample, &m, edit))
            });
        let scopes = [
            (rows && columns, Scope::Parts),
            (rows, Scope::Rows),
            (columns, Scope::Columns),
            (tile, Scope::Tile),
        ];
        let mut best: Option<Outcome> = None;
        for (_, scope) in scopes.into_iter().filter(|s| s.0 && allowed.contains(&s.1)) {
            let predicted = self.predicted(make, edit, scope)?;
            let mut all = self.compared(predicted);
            // Rows and columns were chosen by their wrong elements, so their location is no
            // evidence.
            all.total = if matches!(scope, Scope::Parts) { self.found.len() } else { 0 };
            let choice: f64 = self.bad.iter().map(|bad| scope.choice(self, bad)).sum();
            let Some(outcome) = all.outcome_of(cost, choice) else { continue };
            if outcome.beats(best) {
                best = Some(outcome);
            }
            if outcome.strength == Strength::Explains {
                break;
            }
        }
        best
    }

    /// The elements that a suspect changes in a scope, with its predictions.
    fn predicted(
        &self,
        make: &dyn Fn(usize) -> Option<Setup<'s>>,
        edit: Option<Edit<'_>>,
        scope: Scope,
    ) -> Option<Vec<(usize, Bounded)>> {
        let mut predicted = Vec::new();
        for bad in &self.bad {
            let (rows, cols) = scope.within(self, bad);
            let bounded = self.bounds(&make(bad.part)?, &rows, &cols, edit)?;
            let places = rows.iter().flat_map(|&r| cols.iter().map(move |&n| r * self.size_n + n));
            predicted.extend(places.zip(bounded));
        }
        Some(predicted)
    }

    /// Compares a prediction of some elements with the output; all other elements are predicted to
    /// be right.
    pub(super) fn weigh(
        &self,
        predicted: impl IntoIterator<Item = (usize, Bounded)>,
        cost: f64,
    ) -> Option<Outcome> {
        self.compared(predicted).outcome(cost)
    }

    pub(super) fn compared(
        &self,
        predicted: impl IntoIterator<Item = (usize, Bounded)>,
    ) -> Comparison {
        let ty = self.stage.dtype;
        Comparison::of_bounds(self.bounded, predicted, self.found, self.wrong, ty)
    }
}

fn distinct(mut values: Vec<usize>) -> Vec<usize> {
    values.sort_unstable();
    values.dedup();
    values
}
