//! The input of a diagnosis: a failed product, samples of its wrong elements, and the computation
//! of its elements under a suspect.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::super::stage::{Part, Stage};
use super::setup::Picked;
pub(super) use super::setup::{Edit, Routers, Setup};
use crate::act_order;
pub(super) use crate::judge::mistake::holds as explains;
use crate::products::{Bounded, Convention, Extras, Judge, Recipe, Rows};
use crate::weight::{Groups, Weight};

/// Number of wrong rows and columns on which a suspect is tried, and number of others.
const SAMPLE: usize = 8;

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

    /// Number of rows without a wrong element.
    pub(super) fn right_rows(&self) -> usize {
        let mut rows: Vec<usize> = self.wrong.iter().map(|i| i / self.size_n).collect();
        rows.dedup();
        self.home.len() - rows.len()
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
