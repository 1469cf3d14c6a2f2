//! Quantizes activations and weights to codes and scales by upstream's definitions.
//!
//! Values are f32 (16-bit floats are widened exactly). Every operation is an IEEE operation in the
//! stated order, so codes and scales are defined bit for bit.

mod activation;
mod block;
mod fp8_group;
mod group;
mod nvfp4_kernel;
mod rules;

pub use activation::{Int8Rule, Quantized, per_tensor_fp8, per_token_fp8, per_token_int8};
pub use block::{mx, nvfp4};
pub use fp8_group::per_group_fp8;
pub use group::{GroupQuantized, gptq_quantize_weights, quantize_by_group, quantize_weights};
pub(crate) use nvfp4_kernel::with_ties_away;
pub use nvfp4_kernel::{Nvfp4Difference, nvfp4_kernel_difference, nvfp4_ties_away};
pub use rules::{ActivationRule, RuleFit, StatedActivations};

use crate::{Error, Result};

/// Checks that `x` is rows of `cols` finite values, with `cols` a multiple of `block`.
fn expect_rows(x: &[f32], cols: usize, block: usize) -> Result<()> {
    if cols == 0 || !cols.is_multiple_of(block) {
        return Err(Error::size("columns", cols, format!("a positive multiple of {block}")));
    }
    if !x.len().is_multiple_of(cols) {
        return Err(Error::shape("x", &[x.len()], format!("rows of {cols}")));
    }
    match x.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(i) => Err(Error::value("x", &[i / cols, i % cols], x[i], "a finite number")),
    }
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

/// Largest magnitude.
fn absmax(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |m, v| m.max(v.abs()))
}
