//! Executes a schedule on arrays.

use ndarray::{Array2, ArrayView2};

use super::{Extras, Schedule, Stack};
use crate::num::array::row_major;
use crate::num::dims::Shape;
use crate::weight::Weight;
use crate::{Error, Result};

impl Schedule {
    /// The output `[M, N]` as bits of [`Schedule::output_type`]; `x` is `[M, K]` codes of the unit's
    /// type `a`, zero-extended.
    ///
    /// # Errors
    /// [`ScheduleError`](crate::products::schedule::ScheduleError) if the schedule contradicts
    /// itself or the weight; [`Error::Shape`] for x and extras of another shape; [`Error::Value`]
    /// for a weight without a value in the unit's type and for a permutation that does not sort;
    /// [`Error::Missing`] for a scale that a step needs; the errors of [`Weight::validate`].
    pub fn execute(
        &self,
        x: ArrayView2<'_, u32>,
        weight: &Weight<'_>,
        extras: Extras<'_>,
    ) -> Result<Array2<u32>> {
        let (shape, size_m) = (weight.shape(), x.nrows());
        expect_columns(x, shape.size_k)?;
        let y = self.execute_rows(&row_major(x), weight, extras)?;
        Ok(Array2::from_shape_vec((size_m, shape.size_n), y).expect("every output"))
    }

    /// Like [`Schedule::execute`], with a matrix for each row: `y[m] = x[m] · W[expert_of[m]]`.
    /// Ignores `extras.order`; `stack.orders` has one for each expert.
    ///
    /// # Errors
    /// As [`Schedule::execute`]; [`Error::Value`] for an unknown expert; [`Error::Shape`] for
    /// experts of several shapes.
    pub fn execute_stack(
        &self,
        x: ArrayView2<'_, u32>,
        stack: Stack<'_>,
        extras: Extras<'_>,
    ) -> Result<Array2<u32>> {
        let shape = stack.weights.first().map_or(Shape::new(0, 0), Weight::shape);
        if !stack.weights.is_empty() {
            expect_columns(x, shape.size_k)?;
        }
        let y = self.execute_stack_rows(&row_major(x), stack, extras)?;
        Ok(Array2::from_shape_vec((stack.expert_of.len(), shape.size_n), y).expect("every output"))
    }
}

/// Checks that rows of `x` fill a matrix of `size_k` rows.
fn expect_columns(x: ArrayView2<'_, u32>, size_k: usize) -> Result<()> {
    if x.ncols() == size_k {
        return Ok(());
    }
    Err(Error::shape("x", x.shape(), format!("[{}, {size_k}]", x.nrows())))
}
