//! Quantizes activations and weights to codes and scales by upstream's definitions.
//!
//! Arrays are f16, bf16 or f32: typed `ndarray` views, or a [`FloatView2`] if the type is known at run
//! time only. 16-bit floats are widened exactly. Every operation is an IEEE operation in the stated
//! order, so codes and scales are defined bit for bit.
//!
//! ```
//! use marlinspike::num::element::{bf16, E4m3fn};
//! use marlinspike::quantize::per_token_fp8;
//! use ndarray::array;
//!
//! let x = array![[1.0f32, -2.0, 0.5], [448.0, 0.0, 100.0]].mapv(bf16::from_f32);
//! let q = per_token_fp8(x.view(), None)?;
//! assert_eq!(q.scales.shape(), [2, 1]);
//! assert_eq!(q.scales[[1, 0]], 1.0);
//! assert_eq!(q.codes[[0, 1]], E4m3fn::from_f32_rne_saturating(-448.0));
//! # Ok::<(), marlinspike::Error>(())
//! ```

mod activation;
mod block;
mod fp8_block;
mod fp8_group;
mod group;
mod int8;
mod rules;
pub mod scaled_fp4;

pub use activation::{Int8Rule, Quantized, per_tensor_fp8, per_token_fp8, per_token_int8};
pub use block::{MxRounding, mx, mx_by};
pub use fp8_block::{per_block_fp8, requantize_ue8m0};
pub use fp8_group::{
    CodeBy, Fp8GroupOperations, Fp8GroupRule, ScaleBy, ceil_to_ue8m0, per_group_fp8,
    per_group_fp8_by, per_group_fp8_with,
};
pub use group::{GroupQuantized, gptq_quantize_weights, quantize_by_group, quantize_weights};
pub use int8::{Int8Quantized, Int8Quantizer};
pub use rules::ActivationRule;
pub(crate) use rules::{RowRule, RuleFit, StatedActivations};

use std::borrow::Cow;

use ndarray::Array2;

use crate::num::array::FloatView2;
use crate::{Error, Result};

/// The values and the columns of `x`. Fails unless they are finite and `block` divides the columns.
pub(crate) fn finite_rows<'a>(x: &FloatView2<'a>, block: usize) -> Result<(Cow<'a, [f32]>, usize)> {
    let cols = expect_blocks(x, block)?;
    let values = x.widened();
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok((values, cols)),
        Some(i) => Err(Error::value("x", &[i / cols, i % cols], values[i], "a finite number")),
    }
}

/// The columns of `x`, a positive multiple of `block`.
fn expect_blocks(x: &FloatView2<'_>, block: usize) -> Result<usize> {
    let cols = x.shape()[1];
    if cols == 0 || !cols.is_multiple_of(block) {
        return Err(Error::size("columns", cols, format!("a positive multiple of {block}")));
    }
    Ok(cols)
}

/// `values` in `rows` rows, which they fill.
pub(crate) fn matrix<T>(rows: usize, values: Vec<T>) -> Array2<T> {
    let cols = values.len().checked_div(rows).unwrap_or(0);
    Array2::from_shape_vec((rows, cols), values).expect("whole rows")
}

/// Fills rows with an infinity or NaN with zeros and returns their indices; their scales become
/// NaN.
pub(crate) fn clear_broken(values: &mut [f32], cols: usize) -> Vec<usize> {
    let mut broken = Vec::new();
    for (row, values) in values.chunks_mut(cols.max(1)).enumerate() {
        if !values.iter().all(|v| v.is_finite()) {
            values.fill(0.0);
            broken.push(row);
        }
    }
    broken
}

/// Largest magnitude; a NaN does not count, as for `fmaxf`.
pub(crate) fn absmax(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |m, v| m.max(v.abs()))
}
