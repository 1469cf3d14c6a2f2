//! The single products of a column's elements, from which contributions of parts of the sum follow.

use super::scene::{Scene, spread_to};
use crate::judge::picture::Cause;
use crate::num::scalar::ScalarType;
use crate::products::chain::Action;
use crate::products::columns::TILE;
use crate::products::{Columns, Extras, Recipe, Rule};
use crate::weight::Weight;

/// Number of rows in which a column is examined.
pub(super) const ROWS: usize = 24;

/// The products of one column, over some rows.
pub(super) struct Terms<'s> {
    pub(super) part: usize,
    pub(super) n: usize,
    pub(super) weight: &'s Weight<'s>,
    /// Wrong rows first.
    pub(super) lines: Vec<Line>,
    /// Group and stored row of each k of the product.
    pub(super) groups: Vec<usize>,
    pub(super) stored: Vec<usize>,
    /// The weight of each k in the product.
    pub(super) weights: Vec<f64>,
}

/// The products of one element, scaled as in the output.
pub(super) struct Line {
    pub(super) wrong: bool,
    /// Activations, for each k of the product.
    pub(super) x: Vec<f64>,
    /// The factor of the sum.
    pub(super) factor: f64,
    /// activation · weight · factor for each k of the product.
    pub(super) products: Vec<f64>,
    /// The same for a weight whose q − z is one.
    pub(super) units: Vec<f64>,
    /// found − exact.
    pub(super) residual: f64,
    /// Largest distance of `residual` from its explanation.
    pub(super) tolerance: f64,
    pub(super) router: f64,
}

impl<'s> Terms<'s> {
    /// The terms of column `n` of a part; `None` if the operands do not fit each other.
    pub(super) fn new(scene: &Scene<'s>, part: usize, n: usize) -> Option<Self> {
        let stage = scene.stage;
        let p = &stage.parts[part];
        let weight = p.weight;
        let order = scene.orders[part].as_deref();
        let mut rows: Vec<usize> =
            p.rows.iter().copied().filter(|&row| scene.is_wrong(row, n)).collect();
        rows = spread_to(&rows, ROWS / 2);
        let right: Vec<usize> =
            p.rows.iter().copied().filter(|&row| !scene.is_wrong(row, n)).collect();
        rows.extend(spread_to(&right, ROWS - rows.len()));
        let pick = |values: &[f32]| -> Vec<f32> { rows.iter().map(|&r| values[r]).collect() };
        let scales = stage.extras.activation_scales.map(pick);
        let routers = stage.extras.router_weights.map(pick);
        let extras =
            Extras { activation_scales: scales.as_deref(), router_weights: routers.as_deref() };
        let recipe = Recipe::new(scene.convention, weight, stage.dtype, extras).ok()?;
        let columns = recipe.columns(weight, order).ok()?;
        let size_k = weight.shape().size_k;
        let mut tile = vec![[0.0; TILE]; size_k];
        columns.tile(n / TILE * TILE, &mut tile);
        let mut activations = stage.rows.select(&rows)?;
        if let Some(order) = order {
            activations = activations.gather(order).ok()?;
        }
        let stored: Vec<usize> = (0..size_k).map(|k| order.map_or(k, |o| o[k] as usize)).collect();
        let one = weight.scales.rows() == 1;
        let groups: Vec<usize> =
            stored.iter().map(|&k| if one { 0 } else { weight.groups.group_of(k) }).collect();
        // The weight in the product for q − z = 1.
        let offset = f64::from(recipe.power).exp2();
        let unit = |k: usize| match recipe.rule {
            Rule::Unscaled => offset,
            _ => weight.scales.value(groups[k], n) * offset,
        };
        let units: Vec<f64> = (0..size_k).map(unit).collect();
        let line = |(m, &row): (usize, &usize)| {
            let steps = recipe.chain(weight, extras, m, n).steps;
            let multiplies = steps.iter().filter(|s| s.action == Action::Multiply);
            let factor: f64 = multiplies.map(|s| s.operand).product();
            let i = row * scene.size_n + n;
            let (b, found) = (&scene.bounded[i], scene.found[i]);
            let roundoff = if stage.dtype == ScalarType::FLOAT16 { 1e-3 } else { 8e-3 };
            let grown = (found.abs() - b.exact.abs()).max(0.0);
            Line {
                wrong: scene.is_wrong(row, n),
                x: activations.row(m).to_vec(),
                factor,
                products: activations
                    .row(m)
                    .iter()
                    .zip(&tile)
                    .map(|(x, w)| x * w[n % TILE] * factor)
                    .collect(),
                units: activations.row(m).iter().zip(&units).map(|(x, u)| x * u * factor).collect(),
                residual: found - b.exact,
                tolerance: b.below.max(b.above) + 4.0 * roundoff * grown,
                router: routers.as_ref().map_or(1.0, |w| f64::from(w[m])),
            }
        };
        let lines = rows.iter().enumerate().map(line).collect();
        let weights = tile.iter().map(|w| w[n % TILE]).collect();
        Some(Self { part, n, weight, lines, groups, stored, weights })
    }

    /// The picture of some k of the product.
    pub(super) fn cause(&self, is: impl Fn(usize) -> bool) -> Cause {
        let size_k = self.stored.len();
        let mut stored = vec![false; size_k];
        self.stored.iter().enumerate().for_each(|(at, &k)| stored[k] |= is(at));
        let group_size = self.weight.groups.group_size().rows(self.weight.shape().k());
        Cause::new(size_k, group_size, |k| stored[k])
    }

    /// The contribution of each group to an element.
    pub(super) fn by_group(&self, line: &Line) -> Vec<f64> {
        let mut sums = vec![0.0; self.weight.scales.rows()];
        self.groups.iter().zip(&line.products).for_each(|(&g, x)| sums[g] += x);
        sums
    }

    /// The lines that a common cause must explain: the wrong ones, or all if there are few.
    pub(super) fn judged(&self) -> impl Iterator<Item = &Line> {
        let wrong = self.lines.iter().filter(|l| l.wrong).count();
        self.lines.iter().filter(move |l| l.wrong || wrong < 2)
    }
}
