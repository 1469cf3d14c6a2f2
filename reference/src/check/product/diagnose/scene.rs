//! What a diagnosis works on: a failed product, samples of its wrong elements, and the machinery
//! that computes what the elements would be under a suspect.

use std::borrow::Cow;

use super::super::stage::{Part, Stage};
use crate::act_order;
use crate::gemm::columns::TILE;
use crate::gemm::{Bounded, Columns, Extras, Judge, Recipe, Rows, WeightColumns};
use crate::weight::{Groups, Weight};

/// Wrong rows and columns that a suspect is tried on, and as many of the others.
const SAMPLE: usize = 8;
/// Parts (experts) that a suspect is tried on.
const PARTS: usize = 4;
/// Products that may be computed to count what a named suspect explains.
const MAX_COUNTED: usize = 1 << 28;

/// A failed product.
pub(in crate::check::product) struct Scene<'s> {
    pub(super) stage: &'s Stage<'s>,
    /// What each element should be.
    pub(in crate::check::product) bounded: &'s [Bounded],
    pub(in crate::check::product) found: &'s [f64],
    /// Elements out of bound, ascending.
    pub(in crate::check::product) wrong: &'s [usize],
    pub(in crate::check::product) size_n: usize,
    /// Part of each row; none where the row belongs to an expert of another rank.
    pub(super) home: Vec<Option<usize>>,
    /// Parts with wrong elements: its wrong rows, and their wrong columns.
    pub(super) bad: Vec<Bad>,
    /// Row order of each part's product: the case's own, else the stable sort of g_idx.
    pub(super) orders: Vec<Option<Cow<'s, [u32]>>>,
}

/// Wrong rows and columns of one part.
pub(super) struct Bad {
    pub(super) part: usize,
    pub(super) rows: Vec<usize>,
    pub(super) cols: Vec<usize>,
}

/// A rectangle of elements of one part.
pub(super) struct Sample {
    pub(super) part: usize,
    pub(super) rows: Vec<usize>,
    pub(super) cols: Vec<usize>,
}

/// The router weights that a suspect applies.
pub(super) enum Routers {
    AsStated,
    Missing,
    /// One for each output row.
    These(Vec<f32>),
}

/// How a part's product is computed under a suspect.
pub(super) struct Setup<'s> {
    pub(super) weight: Cow<'s, Weight<'s>>,
    pub(super) recipe: Option<fn(&mut Recipe)>,
    pub(super) routers: Routers,
    /// k of the product → row of the matrix.
    pub(super) order: Option<Cow<'s, [u32]>>,
    /// k of the product → k of the activations.
    pub(super) gather: Option<Cow<'s, [u32]>>,
    /// Group of each k of the product.
    pub(super) groups: Option<Vec<u32>>,
    /// The activations of these rows instead of the rows' own.
    pub(super) sources: Option<Vec<usize>>,
}

/// A change of single weights: k of the product, n, weight.
pub(super) type Edit<'e> = &'e (dyn Fn(usize, usize, f64) -> f64 + Sync);

/// Some columns of a matrix, perhaps with other weights.
struct Picked<'p> {
    inner: &'p dyn Columns,
    cols: &'p [usize],
    edit: Option<Edit<'p>>,
}

impl Columns for Picked<'_> {
    fn size_k(&self) -> usize {
        self.inner.size_k()
    }

    fn size_n(&self) -> usize {
        self.cols.len()
    }

    fn tile(&self, n0: usize, out: &mut [[f64; TILE]]) {
        let cols = &self.cols[n0..self.cols.len().min(n0 + TILE)];
        let first = cols[0] / TILE * TILE;
        if cols.len() == TILE && cols.iter().enumerate().all(|(j, &n)| n == first + j) {
            self.inner.tile(first, out);
        } else {
            out.fill([0.0; TILE]);
            let mut tile = vec![[0.0; TILE]; out.len()];
            let mut held = usize::MAX;
            for (j, &n) in cols.iter().enumerate() {
                if n / TILE != held {
                    held = n / TILE;
                    self.inner.tile(held * TILE, &mut tile);
                }
                out.iter_mut().zip(&tile).for_each(|(out, w)| out[j] = w[n % TILE]);
            }
        }
        if let Some(edit) = self.edit {
            for (k, out) in out.iter_mut().enumerate() {
                cols.iter().zip(out).for_each(|(&n, w)| *w = edit(k, n, *w));
            }
        }
    }
}

impl<'s> Scene<'s> {
    pub(in crate::check::product) fn new(
        stage: &'s Stage<'s>,
        bounded: &'s [Bounded],
        found: &'s [f64],
        wrong: &'s [usize],
    ) -> Self {
        let size_n = stage.found.shape().last().copied().unwrap_or(1).max(1);
        let mut home = vec![None; found.len() / size_n];
        for (p, part) in stage.parts.iter().enumerate() {
            part.rows.iter().for_each(|&row| home[row] = Some(p));
        }
        let mut bad: Vec<Bad> = Vec::new();
        for &i in wrong {
            let (row, n) = (i / size_n, i % size_n);
            let Some(part) = home[row] else { continue };
            let at = bad.iter().position(|b| b.part == part).unwrap_or_else(|| {
                bad.push(Bad { part, rows: Vec::new(), cols: Vec::new() });
                bad.len() - 1
            });
            if bad[at].rows.last() != Some(&row) {
                bad[at].rows.push(row);
            }
            bad[at].cols.push(n);
        }
        for bad in &mut bad {
            bad.cols.sort_unstable();
            bad.cols.dedup();
        }
        let order = |(p, part): (usize, &'s Part<'s>)| match (&part.weight.groups, stage.orders) {
            (Groups::Uniform(_), _) => None,
            (_, Some(orders)) => orders.get(p).map(|o| Cow::Borrowed(o.as_slice())),
            (Groups::Indexed { g_idx, .. }, None) => Some(act_order::sort(g_idx).perm.into()),
        };
        let orders = stage.parts.iter().enumerate().map(order).collect();
        Self { stage, bounded, found, wrong, size_n, home, bad, orders }
    }

    /// `row 5 (token 2, slot 1, expert 3)`, or `row 5` outside a layer.
    pub(in crate::check::product) fn row_name(&self, row: usize) -> String {
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

    /// The part's product as it should be.
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
        }
    }

    /// Exact results and bounds of `rows` × `cols` under a suspect; none where its parts do not
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
        let mut recipe = Recipe::new(stage.convention(), weight, stage.dtype, extras).ok()?;
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
        let activations = read(&stage.rows)?;
        let radius = match &stage.radius {
            Some(radius) => Some(read(radius)?),
            None => None,
        };
        let mut columns = WeightColumns::new(weight, recipe.rule, setup.order.as_deref())
            .ok()?
            .times_power(recipe.power);
        if let Some(groups) = &setup.groups {
            columns = columns.with_groups(groups.clone()).ok()?;
        }
        let picked = Picked { inner: &columns, cols, edit };
        let judge = Judge { weight, order: None, recipe: &recipe, class: &class, extras };
        judge.bounds_of(&picked, &|i| cols[i], &activations, radius.as_ref()).ok()
    }

    /// Samples that a suspect has to explain wholly: either all of them of the first list, wrong
    /// rows with right columns among them, or all of the second, wrong columns with right rows.
    pub(super) fn samples(&self) -> [Vec<Sample>; 2] {
        let of = |more_rows: bool| {
            let sample = |bad: &Bad| {
                let part = &self.stage.parts[bad.part];
                let (mut rows, mut cols) = (spread(&bad.rows), Vec::new());
                // Columns that these rows have wrong, lest the sample should miss all of them.
                for &row in &rows {
                    let wrong: Vec<usize> =
                        bad.cols.iter().copied().filter(|&n| self.is_wrong(row, n)).collect();
                    cols.extend(spread_to(&wrong, SAMPLE.div_ceil(rows.len())));
                }
                cols.extend(spread(&bad.cols));
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

    /// Whether every element of a sample may come out under `setup`.
    pub(super) fn holds(&self, sample: &Sample, setup: &Setup<'_>, edit: Option<Edit<'_>>) -> bool {
        let bounded = self.bounds(setup, &sample.rows, &sample.cols, edit);
        let places = sample.rows.iter().flat_map(|&r| sample.cols.iter().map(move |&n| (r, n)));
        bounded.is_some_and(|bounded| {
            places.zip(&bounded).all(|((r, n), b)| explains(b, self.found[r * self.size_n + n]))
        })
    }

    /// How many of the wrong elements `make`'s setups leave unexplained; none where that would be
    /// too much work.
    pub(super) fn unexplained(
        &self,
        make: &dyn Fn(usize) -> Option<Setup<'s>>,
        edit: Option<Edit<'_>>,
    ) -> Option<usize> {
        let work = |bad: &Bad| {
            bad.rows.len() * bad.cols.len() * self.stage.parts[bad.part].weight.shape().size_k
        };
        if self.bad.iter().map(work).sum::<usize>() > MAX_COUNTED {
            return None;
        }
        let absent = self.wrong.iter().filter(|&i| self.home[i / self.size_n].is_none()).count();
        let mut left = absent;
        for bad in &self.bad {
            let bounded = make(bad.part).and_then(|s| self.bounds(&s, &bad.rows, &bad.cols, edit));
            let places = bad.rows.iter().flat_map(|&r| bad.cols.iter().map(move |&n| (r, n)));
            for (at, (row, n)) in places.enumerate() {
                let x = self.found[row * self.size_n + n];
                let explained = bounded.as_ref().is_some_and(|b| explains(&b[at], x));
                left += usize::from(!explained && self.is_wrong(row, n));
            }
        }
        Some(left)
    }
}

/// Whether a kernel of the class that computes what `bounded` describes may give `found`.
pub(super) fn explains(bounded: &Bounded, found: f64) -> bool {
    !bounded.is_unbounded() && bounded.ratio(found) <= 1.0
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
