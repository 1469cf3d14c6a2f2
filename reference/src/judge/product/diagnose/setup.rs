//! How a part's product is computed under a suspect.

use std::borrow::Cow;

use crate::products::columns::TILE;
use crate::products::{Columns, Recipe, Rows};
use crate::weight::Weight;

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
    /// Other activations.
    pub(super) rows: Option<Rows>,
}

/// A change of single weights: k of the product, n, weight.
pub(super) type Edit<'e> = &'e (dyn Fn(usize, usize, f64) -> f64 + Sync);

/// Some columns of a matrix, perhaps with other weights.
pub(super) struct Picked<'p> {
    pub(super) inner: &'p dyn Columns,
    pub(super) cols: &'p [usize],
    pub(super) edit: Option<Edit<'p>>,
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
