//! Comparison of a block's outputs with the derived bound.

use marlinspike::moe::block::{Mlp, Near, Shared as SharedNear};
use marlinspike::ndarray::Array2;
use marlinspike::{Error, Result};

use super::dense::Dense;
use super::experts::matrix;
use super::plain::{Floats, PlainBlock, Routes};
use super::tail::{Linears, Shared};
use crate::run::output::{Check, Output};

impl PlainBlock {
    /// Compares `y_experts` and `y` with the derived bound of both.
    pub(super) fn check(&self, x: &Floats, routes: &Routes, outputs: &[Output]) -> Result<Check> {
        let input = x.values.chunks_exact(self.hidden).flat_map(|row| {
            let row = row.iter().map(|&x| Near::point(x.into())).collect();
            self.stages[0].near(row, x.ty)
        });
        let near = self.experts.near(&input.collect::<Vec<_>>(), routes.routed()?, x.ty)?;
        let last = outputs.len() - 1;
        let sum = outside(&outputs[0], &near);
        if sum.mismatches > 0 {
            return Ok(sum);
        }
        let y = outside(&outputs[last], &self.y_near(x, routes, &near)?);
        // Values of `y` come from sums: without a bound for these, they have none.
        Ok(Check { unbounded: y.unbounded.max(sum.unbounded), ..y })
    }

    fn y_near(&self, x: &Floats, routes: &Routes, y: &Array2<Near>) -> Result<Array2<Near>> {
        let (tail, sum) = (&self.surrounding.tail, self.experts.sum(x.ty));
        let shared = tail.shared.as_ref().map(|s| (s, nears(s)));
        let mut all = Vec::with_capacity(x.values.len());
        for (t, (row, x_row)) in
            y.rows().into_iter().zip(x.values.chunks_exact(self.hidden)).enumerate()
        {
            let x_row: Vec<f64> = x_row.iter().map(|&x| x.into()).collect();
            let added = shared.iter().flat_map(|(s, experts)| {
                let of = |(j, e): (usize, &SharedNear)| {
                    let weight = routes.shared.as_ref().map(|w| w[t * experts.len() + j]);
                    e.apply(&x_row, &s.activation, weight, x.ty)
                };
                experts.iter().enumerate().map(of).collect::<Vec<_>>()
            });
            let added: Vec<Vec<Near>> = added.collect();
            let row = self.stages[1].near(row.to_vec(), x.ty);
            let whole = row.into_iter().enumerate().map(|(h, y)| {
                let mut terms = vec![y];
                terms.extend(added.iter().map(|added| added[h]));
                terms.extend(tail.output_bias.as_ref().map(|b| Near::point(b[h].into())));
                let y = if terms.len() > 1 { sum.total(&terms) } else { y };
                if tail.is_averaged { y.halved() } else { y }
            });
            all.extend(tail.stages.near(whole.collect(), x.ty));
        }
        let shape = (y.nrows(), self.hidden);
        let found = [all.len()];
        Array2::from_shape_vec(shape, all).map_err(|_| Error::shape("y", &found, "[M, H]"))
    }
}

/// The shared experts as the bound takes them.
fn nears(shared: &Shared) -> Vec<SharedNear> {
    let Linears::Dense(experts) = &shared.linears else { return Vec::new() };
    let one = |[w13, w2]: &[Dense; 2]| SharedNear {
        mlp: Mlp { w13: matrix(w13), w2: matrix(w2), w13_bias: None, w2_bias: None },
        gate: shared.gate.as_ref().map(matrix),
    };
    experts.iter().map(one).collect()
}

/// Values of an output outside the bound, and those without one.
fn outside(found: &Output, near: &Array2<Near>) -> Check {
    let has_bound = |near: &Near| near.error.is_finite() && near.exact.is_finite();
    let accepts = |bits: u32, near: &Near| {
        !has_bound(near) || near.interval().rounded(found.ty).contains(found.ty.to_f64(bits))
    };
    let unbounded = near.iter().filter(|near| !has_bound(near)).count();
    let pairs = found.bits().zip(near.iter()).enumerate();
    let mut wrong = pairs.filter(|(_, (bits, near))| !accepts(*bits, near)).peekable();
    let first = wrong.peek().map(|(i, (bits, near))| {
        let at = [i / found.size_n, i % found.size_n];
        (at, *bits, found.ty.encode_rne(near.exact))
    });
    let missing = found.bits().count().abs_diff(near.len());
    Check { mismatches: wrong.count() + missing, first, stage: Some(found.name), unbounded }
}
