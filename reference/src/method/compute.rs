//! The algorithms that compute a product.

use rayon::prelude::*;

use super::product::{Arithmetic, Product};
use super::{definition, exact, scheduled};
use crate::Result;
use crate::num::array::HalfArray2;
use crate::products::Bounded;
use crate::products::schedule::Schedule;

impl Product<'_> {
    /// The output `[M, N]`, of `dtype`.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape), [`Error::Size`](crate::Error::Size) for inconsistent
    /// parts; [`Error::Value`](crate::Error::Value) for an alpha that is not a positive normal
    /// number or an unknown expert; [`Error::Unsupported`](crate::Error::Unsupported) for an
    /// arithmetic that the quantized rows or the weights do not allow; the errors of
    /// [`Schedule::execute_stack`].
    pub fn compute(&self, arithmetic: Arithmetic) -> Result<HalfArray2> {
        self.array(self.compute_bits(arithmetic)?)
    }

    /// [`Product::compute`] by bits, row-major.
    pub(crate) fn compute_bits(&self, arithmetic: Arithmetic) -> Result<Vec<u16>> {
        self.validate()?;
        match arithmetic {
            Arithmetic::Exact => exact::compute(self),
            scheduled => scheduled::compute(self, scheduled),
        }
    }

    /// The same bits, output by output and one product after the other.
    ///
    /// # Errors
    /// As [`Product::compute`].
    pub fn define(&self, arithmetic: Arithmetic) -> Result<HalfArray2> {
        self.array(self.define_bits(arithmetic)?)
    }

    /// [`Product::define`] by bits, row-major.
    pub(crate) fn define_bits(&self, arithmetic: Arithmetic) -> Result<Vec<u16>> {
        self.validate()?;
        let size_n = self.size_n();
        let mut out = vec![0; self.expert_of.len() * size_n];
        for e in 0..self.weights.len() {
            let expert = definition::Expert::new(self, e, arithmetic)?;
            if expert.rows().is_empty() {
                continue;
            }
            let columns = (0..size_n).into_par_iter().map(|n| expert.column(n));
            for (n, column) in columns.collect::<Result<Vec<_>>>()?.iter().enumerate() {
                for (&m, &y) in expert.rows().iter().zip(column) {
                    out[m * size_n + n] = y;
                }
            }
        }
        Ok(out)
    }

    /// The output `[M, N]` in the order of additions of `schedule`.
    ///
    /// # Errors
    /// As [`Product::compute`]; [`Error::Unsupported`](crate::Error::Unsupported) for rows with
    /// scales in groups under a schedule that does not apply them
    /// ([`GroupSum::row_scale`](crate::products::schedule::GroupSum::row_scale)), and for `halves` that differ from the multiplier of their matrix.
    pub fn execute(&self, schedule: &Schedule) -> Result<HalfArray2> {
        self.array(self.execute_bits(schedule)?)
    }

    /// [`Product::execute`] by bits, row-major.
    pub(crate) fn execute_bits(&self, schedule: &Schedule) -> Result<Vec<u16>> {
        self.validate()?;
        scheduled::execute(self, schedule)
    }

    fn array(&self, bits: Vec<u16>) -> Result<HalfArray2> {
        HalfArray2::from_bits("y", self.dtype, [self.expert_of.len(), self.size_n()], bits)
    }

    /// Exact result and bounds of every output for kernels that use the matrix unit of a scheduled
    /// `arithmetic` in any order, with partial sums in f32
    /// ([`Class::of_unit`](crate::products::Class::of_unit)).
    ///
    /// # Errors
    /// As [`Product::compute`]; [`Error::Unsupported`](crate::Error::Unsupported) for
    /// [`Arithmetic::Exact`], which no kernel uses.
    pub fn bounds(&self, arithmetic: Arithmetic) -> Result<Vec<Bounded>> {
        self.validate()?;
        scheduled::bounds(self, arithmetic)
    }
}
