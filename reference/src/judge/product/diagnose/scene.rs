//! The input of a diagnosis: a failed product, samples of its wrong elements, and the computation
//! of its elements under a suspect.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::super::stage::{Part, Stage};
use super::setup::Picked;
pub(super) use super::setup::{Edit, Routers, Setup};
use crate::act_order;
pub(super) use crate::judge::mistake::holds as explains;
use crate::judge::mistake::{Comparison, Outcome, near};
use crate::products::{Bounded, Convention, Extras, Judge, Recipe, Rows};
use crate::weight::{Groups, Weight};

/// Number of wrong rows and columns on which a suspect is tried, and number of others.
const SAMPLE: usize = 8;
/// Number of parts (experts) on which a suspect is tried.
const PARTS: usize = 4;

/// A failed product.
pub(in crate::judge::product) struct Scene<'s> {
    pub(super) stage: &'s Stage<'s>,
    /// The convention that the kernel is assumed to follow.
    pub(super) convention: Convention,
    /// The exact result and bound of each element.
    pub(in crate::judge::product) bounded: &'s [Bounded],
    pub(in crate::judge::product) found: &'s [f64],
    /// Elements out of bound, ascending.
    pub(in crate::judge::product) wrong: &'s [usize],
    pub(in crate::judge::product) size_n: usize,
    /// Part of each row; `None` if the row belongs to an expert of another rank.
    pub(super) home: Vec<Option<usize>>,
    /// Parts with wrong elements, with their wrong rows and columns.
    pub(super) bad: Vec<Bad>,
    /// Row order of each part's product: that of the case, otherwise the stable sort of g_idx.
    pub(super) orders: Vec<Option<Cow<'s, [u32]>>>,
}

/// Rows and columns of one part that have wrong elements.
pub(super) struct Bad {
    pub(super) part: usize,
    /// Wrong rows, without those that have far fewer wrong elements than the others and may have
    /// another cause.
    pub(super) main_rows: Vec<usize>,
    pub(super) main_cols: Vec<usize>,
}

/// The entries of `of` with at least a quarter of the largest number of wrong elements.
fn main(of: &BTreeMap<usize, usize>) -> Vec<usize> {
    let most = of.values().copied().max().unwrap_or(0);
    of.iter().filter(|(_, count)| **count * 4 >= most).map(|(&at, _)| at).collect()
}

/// A rectangle of elements of one part.
pub(super) struct Sample {
    pub(super) part: usize,
    pub(super) rows: Vec<usize>,
    pub(super) cols: Vec<usize>,
}

impl<'s> Scene<'s> {
    pub(in crate::judge::product) fn new(
        stage: &'s Stage<'s>,
        bounded: &'s [Bounded],
        found: &'s [f64],
        wrong: &'s [usize],
    ) -> Self {
        Self::of(stage, stage.convention(), bounded, found, wrong)
    }

    /// The same output judged under another convention.
    pub(super) fn under<'o>(
        &'o self,
        convention: Convention,
        bounded: &'o [Bounded],
        wrong: &'o [usize],
    ) -> Scene<'o> {
        Scene::of(self.stage, convention, bounded, self.found, wrong)
    }

    /// The exact result and bound of each element under another convention; `None` if the
    /// convention does not apply to the product.
    pub(super) fn bounded_as(&self, convention: Convention) -> Option<Vec<Bounded>> {
        let other = Scene::of(self.stage, convention, self.bounded, self.found, &[]);
        let cols: Vec<usize> = (0..self.size_n).collect();
        let mut all = vec![Bounded::ZERO; self.found.len()];
        for (p, part) in self.stage.parts.iter().enumerate() {
            let bounded = other.bounds(&other.right(p), &part.rows, &cols, None)?;
            for (row, bounded) in part.rows.iter().zip(bounded.chunks_exact(self.size_n)) {
                all[row * self.size_n..][..self.size_n].copy_from_slice(bounded);
            }
        }
        Some(all)
    }

    fn of(
        stage: &'s Stage<'s>,
        convention: Convention,
        bounded: &'s [Bounded],
        found: &'s [f64],
        wrong: &'s [usize],
    ) -> Self {
        let size_n = stage.found.shape().last().copied().unwrap_or(1).max(1);
        let mut home = vec![None; found.len() / size_n];
        for (p, part) in stage.parts.iter().enumerate() {
            part.rows.iter().for_each(|&row| home[row] = Some(p));
        }
        let mut counts: Vec<(usize, [BTreeMap<usize, usize>; 2])> = Vec::new();
        for &i in wrong {
            let (row, n) = (i / size_n, i % size_n);
            let Some(part) = home[row] else { continue };
            let at = counts.iter().position(|c| c.0 == part).unwrap_or_else(|| {
                counts.push((part, Default::default()));
                counts.len() - 1
            });
            *counts[at].1[0].entry(row).or_default() += 1;
            *counts[at].1[1].entry(n).or_default() += 1;
        }
        let bad = |(part, [rows, cols]): (usize, [BTreeMap<usize, usize>; 2])| Bad {
            part,
            main_rows: main(&rows),
            main_cols: main(&cols),
        };
        let bad = counts.into_iter().map(bad).collect();
        let order = |(p, part): (usize, &'s Part<'s>)| match (&part.weight.groups, stage.orders) {
            (Groups::Uniform(_), _) => None,
            (_, Some(orders)) => orders.get(p).map(|o| Cow::Borrowed(o.as_slice())),
            (Groups::Indexed { g_idx, .. }, None) => Some(act_order::sort(g_idx).perm.into()),
        };
        let orders = stage.parts.iter().enumerate().map(order).collect();
        Self { stage, convention, bounded, found, wrong, size_n, home, bad, orders }
    }

    /// `row 5 (token 2, slot 1, expert 3)`, or `row 5` outside a layer.
    pub(in crate::judge::product) fn row_name(&self, row: usize) -> String {
        let Some(top_k) = self.stage.top_k else { return format!("row {row}") };
        let place = format!("row {row} (token {}, slot {}", row / top_k, row % top_k);
        match self.home[row] {
            Some(part) => format!("{place}, expert {})", self.stage.parts[part].global),
            None => format!("{place}, expert of another rank)"),
        }
    }

    pub(super) fn is_wrong(&self, row: usize, n: usize) -> bool {
        self.wrong.binary_search(&(row * self.size_n + n)).is_ok()
    }

    /// The right computation of a part's product.
    pub(super) fn right(&self, part: usize) -> Setup<'s> {
        let order = self.orders[part].clone();
        Setup {
            weight: Cow::Borrowed(self.stage.parts[part].weight),
            recipe: None,
            routers: Routers::AsStated,
            gather: order.clone(),
            order,
            groups: None,
            sources: None,
            rows: None,
        }
    }

    /// The part's right product with another matrix.
    pub(super) fn changed(
        &self,
        part: usize,
        change: impl FnOnce(&mut Weight<'s>) -> Option<()>,
    ) -> Option<Setup<'s>> {
        let mut weight = self.stage.parts[part].weight.clone();
        change(&mut weight)?;
        Some(Setup { weight: Cow::Owned(weight), ..self.right(part) })
    }

    /// Exact results and bounds of `rows` × `cols` under a suspect; `None` if its operands do not
    /// fit each other.
    pub(super) fn bounds(
        &self,
        setup: &Setup<'_>,
        rows: &[usize],
        cols: &[usize],
        edit: Option<Edit<'_>>,
    ) -> Option<Vec<Bounded>> {
        if rows.is_empty() || cols.is_empty() {
            return Some(Vec::new());
        }
        let stage = self.stage;
        let weight = setup.weight.as_ref();
        let pick = |values: &[f32]| -> Vec<f32> { rows.iter().map(|&r| values[r]).collect() };
        let scales = stage.extras.activation_scales.map(pick);
        let routers = match &setup.routers {
            Routers::AsStated => stage.extras.router_weights.map(pick),
            Routers::Missing => None,
            Routers::These(values) => Some(pick(values)),
        };
        let extras =
            Extras { activation_scales: scales.as_deref(), router_weights: routers.as_deref() };
        let mut recipe = Recipe::new(self.convention, weight, stage.dtype, extras).ok()?;
        if let Some(change) = setup.recipe {
            change(&mut recipe);
        }
        let class = stage.declared.class_for(weight, stage.input_dtype);
        let sources = setup.sources.as_deref().unwrap_or(rows);
        let read = |all: &Rows| -> Option<Rows> {
            let own = all.select(sources)?;
            match &setup.gather {
                Some(gather) => own.gather(gather).ok(),
                None => Some(own),
            }
        };
        let activations = read(setup.rows.as_ref().unwrap_or(&stage.rows))?;
        let radius = match &stage.radius {
            Some(radius) => Some(read(radius)?),
            None => None,
        };
        let mut columns = recipe.columns(weight, setup.order.as_deref()).ok()?;
        if let Some(groups) = &setup.groups {
            columns = columns.with_groups(groups.clone()).ok()?;
        }
        let picked = Picked { inner: &columns, cols, edit };
        let judge = Judge { weight, order: None, recipe: &recipe, class: &class, extras };
        judge.bounds_of(&picked, &|i| cols[i], &activations, radius.as_ref()).ok()
    }

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
        for ((row, n), b) in places.zip(&bounded) {
            let is_wrong = self.is_wrong(row, n);
            wrong += usize::from(is_wrong);
            let x = self.found[row * self.size_n + n];
            if !explains(b, x) && !self.is_near(b, x) {
                if !is_wrong && !b.is_unbounded() {
                    return false;
                }
                left += 1;
            }
        }
        left * 8 <= wrong
    }

    /// Whether a number is within a few units in the last place of a prediction.
    fn is_near(&self, made: &Bounded, found: f64) -> bool {
        near(made, found, made.exact.abs(), self.stage.dtype)
    }

    /// Compares the setups of `make`, changed by `edit`, with all elements, if they hold for the
    /// affected parts, rows or columns. Samples are tried first.
    pub(super) fn weigh_setups(
        &self,
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
        for (_, scope) in scopes.into_iter().filter(|s| s.0) {
            let predicted = self.predicted(make, edit, scope)?;
            let mut all = self.compared(predicted);
            // Rows and columns were chosen by their wrong elements, so their location is no
            // evidence.
            all.total = if matches!(scope, Scope::Parts) { self.found.len() } else { 0 };
            let Some(outcome) = all.outcome(cost) else { continue };
            if outcome.beats(best) {
                best = Some(outcome);
            }
            if outcome.is_final() {
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
        let all: Vec<usize> = (0..self.size_n).collect();
        let mut predicted = Vec::new();
        for bad in &self.bad {
            let part = &self.stage.parts[bad.part];
            let (rows, cols) = match scope {
                Scope::Parts => (&part.rows, &all),
                Scope::Rows => (&bad.main_rows, &all),
                Scope::Columns => (&part.rows, &bad.main_cols),
                Scope::Tile => (&bad.main_rows, &bad.main_cols),
            };
            let bounded = self.bounds(&make(bad.part)?, rows, cols, edit)?;
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

    fn compared(&self, predicted: impl IntoIterator<Item = (usize, Bounded)>) -> Comparison {
        let ty = self.stage.dtype;
        Comparison::of_bounds(self.bounded, predicted, self.found, self.wrong, ty)
    }
}

/// The elements to which a suspect applies.
#[derive(Clone, Copy)]
enum Scope {
    /// All elements of the parts with wrong ones.
    Parts,
    /// The rows with wrong elements.
    Rows,
    /// The columns with wrong elements.
    Columns,
    /// The rectangle of both.
    Tile,
}

/// [`SAMPLE`] of `values`, evenly spaced.
pub(super) fn spread(values: &[usize]) -> Vec<usize> {
    spread_to(values, SAMPLE)
}

/// Up to `count` of `values`, evenly spaced, the first and the last among them.
pub(super) fn spread_to(values: &[usize], count: usize) -> Vec<usize> {
    if values.len() <= count || count < 2 {
        return values.iter().copied().take(count).collect();
    }
    (0..count).map(|i| values[i * (values.len() - 1) / (count - 1)]).collect()
}

fn distinct(mut values: Vec<usize>) -> Vec<usize> {
    values.sort_unstable();
    values.dedup();
    values
}
