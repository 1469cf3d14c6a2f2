//! Products of int8 activations and an int8 weight: sums in int32, exact modulo 2^32, and the f32
//! steps of the kernels after them.
//!
//! Source: `scaled_mm_epilogues_c3x.hpp`, `triton_scaled_mm.py` and `fused_moe.py` of vLLM 0.21.0.

use rayon::prelude::*;

use super::bounded::Bounded;
use super::chain::{Chain, Step};
use super::summed::{of_integer, of_integer_within};
use crate::num::scalar::ScalarType;
use crate::weight::Weight;
use crate::{Error, Result};

const F32: ScalarType = ScalarType::FLOAT32;

/// Fewest k of an int32 sum: those of the smallest instruction on int8.
pub const LEAST_BLOCK: usize = 16;

/// 2^24, up to which f32 has every integer.
const EXACT: f64 = 16_777_216.0;

/// The steps of a kernel after its integer sum. All convert the sum to f32 first, to nearest even.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Int8Epilogue {
    /// CUTLASS (`cutlass_scaled_mm`, `cutlass_scaled_mm_azp`): f32 times the column's scale, one fused
    /// multiply-add with the row's scale and the bias, and one rounding.
    Cutlass,
    /// Triton (`triton_scaled_mm`): f32 times the row's scale, times the column's, rounded; then the bias
    /// is added in the output's type.
    Triton,
}

impl Int8Epilogue {
    /// Every epilogue with its name.
    pub const NAMED: &'static [(&'static str, Self)] =
        &[("cutlass", Self::Cutlass), ("triton", Self::Triton)];

    /// The steps of one output of `dtype`.
    fn chain(self, operands: Operands, dtype: ScalarType) -> Chain {
        let Operands { row, column, bias, router } = operands;
        let router = router.map(|router| Step::multiply(router, F32));
        let round = Step::round(dtype);
        let steps = match self {
            Self::Cutlass => {
                let row = Step::multiply_add(row, bias.unwrap_or(0.0), F32);
                [Some(Step::multiply(column, F32)), Some(row), router, Some(round), None]
            }
            Self::Triton => [
                Some(Step::multiply(row, F32)),
                Some(Step::multiply(column, F32)),
                router,
                Some(round),
                bias.map(|bias| Step::add(bias, dtype)),
            ],
        };
        Chain { steps: steps.into_iter().flatten().collect() }
    }
}

/// The operands of one output's steps.
#[derive(Clone, Copy)]
struct Operands {
    /// Scale of the row.
    row: f64,
    /// Scale of the column.
    column: f64,
    bias: Option<f64>,
    router: Option<f64>,
}

/// The steps of any kernel that multiplies by both scales in f32, in either order, adds the bias in
/// f32, fused or not, multiplies by the router weight, and rounds once.
fn any_chain(operands: Operands, dtype: ScalarType) -> Chain {
    let Operands { row, column, bias, router } = operands;
    let mut steps = vec![Step::multiply(row, F32), Step::multiply(column, F32)];
    steps.push(Step::any_order([row, column]));
    steps.extend(bias.map(|bias| Step::add(bias, F32)));
    steps.extend(router.map(|router| Step::multiply(router, F32)));
    steps.push(Step::round(dtype));
    Chain { steps }
}

/// The steps of any kernel of experts that multiplies by both scales and the router weight in f32, in any
/// order, and rounds once.
fn expert_chain(operands: Operands, dtype: ScalarType) -> Chain {
    let Operands { row, column, router, .. } = operands;
    let factors = [Some(row), Some(column), router].into_iter().flatten();
    let mut steps: Vec<Step> = factors.clone().map(|x| Step::multiply(x, F32)).collect();
    steps.push(Step::any_order(factors));
    steps.push(Step::round(dtype));
    Chain { steps }
}

/// One product `[M, N]` of int8 codes.
#[derive(Debug, Clone, Copy)]
pub struct Int8Product<'p> {
    /// Codes `[M, K]`, row-major.
    pub a: &'p [i8],
    /// Scales `[M]`.
    pub a_scales: &'p [f32],
    /// int8 codes, one scale for each column, and the bias.
    pub weight: &'p Weight<'p>,
    /// Router weights `[M]`, which multiply everything before the rounding.
    pub router_weights: Option<&'p [f32]>,
    /// float16 or bfloat16.
    pub dtype: ScalarType,
}

impl Int8Product<'_> {
    /// Checks types and shapes.
    fn validate(&self) -> Result<()> {
        let (weight, shape) = (self.weight, self.weight.shape());
        weight.validate()?;
        if weight.ty != ScalarType::INT8 || weight.scales.rows() != 1 || weight.zeros.is_some() {
            let found =
                format!("{}: {} in {} groups", weight.name, weight.ty, weight.scales.rows());
            return Err(Error::unsupported(found, "int8 with one scale for each column"));
        }
        let rows = self.a_scales.len();
        if self.a.len() != rows * shape.size_k {
            let expected = format!("[{rows}, {}]", shape.size_k);
            return Err(Error::shape("a", &[self.a.len()], expected));
        }
        Ok(())
    }

    /// What `sum` makes of each row of codes and each column's codes, `[M, N]`.
    ///
    /// # Errors
    /// As [`Int8Product::sums`].
    fn each<T: Copy + Send + Sync>(
        &self,
        sum: impl Fn(&[i8], &[i32]) -> T + Sync,
    ) -> Result<Vec<T>> {
        self.validate()?;
        let shape = self.weight.shape();
        let (size_k, size_n) = (shape.size_k, shape.size_n);
        let rows = self.a_scales.len();
        let column = |n: usize| -> Vec<T> {
            let w: Vec<i32> =
                (0..size_k).map(|k| i32::from(self.weight.codes.get(k, n) as i8)).collect();
            self.a.chunks_exact(size_k).map(|row| sum(row, &w)).collect()
        };
        let columns: Vec<Vec<T>> = (0..size_n).into_par_iter().map(column).collect();
        Ok((0..rows * size_n).map(|i| columns[i % size_n][i / size_n]).collect())
    }

    /// Σ a · w modulo 2^32, `[M, N]`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a weight that is not int8 with one scale for each column;
    /// [`Error::Shape`] for rows of another length.
    pub fn sums(&self) -> Result<Vec<i32>> {
        self.each(|row, w| {
            row.iter().zip(w).fold(0i32, |sum, (&a, &w)| sum.wrapping_add(i32::from(a) * w))
        })
    }

    /// The f32 accumulators of a kernel that adds an int32 sum for each `size` k, k ascending, `[M, N]`:
    /// upstream's `fused_moe_kernel`, whose `BLOCK_SIZE_K` is the size. Up to 1024 k they are exact.
    ///
    /// # Errors
    /// As [`Int8Product::sums`]; [`Error::Size`] for blocks of no k.
    pub fn block_sums(&self, size: usize) -> Result<Vec<f32>> {
        if size == 0 {
            return Err(Error::size("k of a block", size, "1 or more"));
        }
        self.each(|row, w| {
            let part = |(a, w): (&[i8], &[i32])| {
                a.iter().zip(w).fold(0i32, |sum, (&a, &w)| sum.wrapping_add(i32::from(a) * w))
            };
            row.chunks(size).zip(w.chunks(size)).map(part).fold(0f32, |sum, s| sum + s as f32)
        })
    }

    /// Σ w of each column: `azp_adj` of upstream, modulo 2^32.
    pub fn column_sums(weight: &Weight<'_>) -> Vec<i32> {
        let shape = weight.shape();
        let sum = |n: usize| {
            let codes = (0..shape.size_k).map(|k| i32::from(weight.codes.get(k, n) as i8));
            codes.fold(0i32, i32::wrapping_add)
        };
        (0..shape.size_n).into_par_iter().map(sum).collect()
    }

    /// The operands of output `i`, row-major.
    fn operands(&self, i: usize) -> Operands {
        let (m, n) = (i / self.weight.shape().size_n, i % self.weight.shape().size_n);
        Operands {
            row: self.a_scales[m].into(),
            column: self.weight.scales.value(0, n),
            bias: self.weight.bias.as_ref().map(|bias| bias.value(0, n)),
            router: self.router_weights.map(|router| router[m].into()),
        }
    }

    /// The outputs, bits of `dtype`, for the integer `sums` `[M, N]`.
    pub fn outputs(&self, sums: &[i32], epilogue: Int8Epilogue) -> Vec<u32> {
        let sums: Vec<f32> = sums.iter().map(|&sum| sum as f32).collect();
        self.outputs_of(&sums, epilogue)
    }

    /// The outputs, bits of `dtype`, for the f32 `sums` `[M, N]`.
    pub fn outputs_of(&self, sums: &[f32], epilogue: Int8Epilogue) -> Vec<u32> {
        let one = |(i, &sum): (usize, &f32)| {
            let value = epilogue.chain(self.operands(i), self.dtype).run(f64::from(sum));
            self.dtype.encode_rne(value)
        };
        sums.iter().enumerate().map(one).collect()
    }

    /// The exact results, and the bounds of kernels of experts: int32 sums of [`LEAST_BLOCK`] k or more,
    /// converted to f32 and added there in any order; f32 products with both scales and the router
    /// weight in any order; one rounding.
    ///
    /// # Errors
    /// As [`Int8Product::sums`]; [`Error::Unsupported`] for a weight with a bias.
    pub fn block_bounds(&self) -> Result<Vec<Bounded>> {
        if self.weight.bias.is_some() {
            let what = format!("{}: a bias", self.weight.name);
            return Err(Error::unsupported(what, "int8 experts without bias"));
        }
        // The sum of at most 2^31 products fits i64.
        let sums = self.each(|row, w| {
            row.iter().zip(w).fold([0i64; 2], |[sum, all], (&a, &w)| {
                let product = i64::from(i32::from(a) * w);
                [sum + product, all + product.abs()]
            })
        })?;
        let terms = self.weight.shape().size_k.div_ceil(LEAST_BLOCK) as f64;
        let one = |(i, &[sum, all]): (usize, &[i64; 2])| {
            // Integers up to 2^24 are exact. Otherwise each conversion and addition errs by 2^-24 of a
            // partial sum; the factor covers the products of the errors.
            let all = all as f64;
            let error = if all <= EXACT { 0.0 } else { terms * all / EXACT * 1.01 };
            of_integer_within(sum, error, &expert_chain(self.operands(i), self.dtype), self.dtype)
        };
        Ok(sums.iter().enumerate().map(one).collect())
    }

    /// The exact results for the integer `sums` `[M, N]`, and the bounds of kernels that multiply by
    /// both scales in f32, in either order, add the bias in f32, and round once.
    pub fn bounds(&self, sums: &[i32]) -> Vec<Bounded> {
        let one = |(i, &sum): (usize, &i32)| {
            of_integer(sum, &any_chain(self.operands(i), self.dtype), self.dtype)
        };
        sums.iter().enumerate().map(one).collect()
    }
}
