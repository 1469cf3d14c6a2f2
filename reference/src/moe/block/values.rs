//! Products and functions of values that have an error.

use ndarray::ArrayView2;

use super::near::{FLUSH, Near, U};
use crate::moe::activation::Function;
use crate::num::scalar::ScalarType;

/// Largest error of an activation's function in f32, relative to its result: the exponential and a
/// division, each to a few units in the last place.
pub(super) const FUNCTION: f64 = 24.0 * U;

/// x · Wᵀ + bias, with products and sums in f32 in any order, rounded to `ty`.
pub(super) fn product(
    x: &[Near],
    weight: ArrayView2<'_, f64>,
    bias: Option<&[f64]>,
    ty: ScalarType,
) -> Vec<Near> {
    // One rounding for each product and each addition.
    let gamma = (x.len() as f64 + 2.0) * U * (1.0 + 1e-3);
    let row = |(n, row): (usize, ndarray::ArrayView1<'_, f64>)| {
        let (mut exact, mut size, mut error) = (0.0, 0.0, 0.0);
        for (x, w) in x.iter().zip(row) {
            exact += x.exact * w;
            size += (x.magnitude() * w).abs();
            error += x.error * w.abs();
        }
        error += gamma * size + x.len() as f64 * FLUSH;
        let sum = Near { exact, error }.rounded(ty);
        match bias {
            Some(bias) => sum.plus(Near::point(bias[n])).rounded(ty),
            None => sum,
        }
    };
    weight.rows().into_iter().enumerate().map(row).collect()
}

/// Largest slope of an activation's function.
fn slope(function: Function, gate: Near) -> f64 {
    match function {
        // Of g·σ(αg), for every α.
        Function::Silu => 1.1,
        Function::Gelu | Function::GeluTanh => 1.13,
        Function::Relu2 => 2.0 * gate.magnitude(),
    }
}

/// An activation's function. Where 1 + erf or 1 + tanh cancels, its error is relative to the gate.
pub(super) fn function(function: Function, gate: Near, alpha: f64) -> Near {
    let cancelled = match function {
        Function::Gelu | Function::GeluTanh => 8.0 * U * gate.magnitude(),
        Function::Silu | Function::Relu2 => 0.0,
    };
    let error = slope(function, gate) * gate.error + cancelled;
    Near { exact: function.exact(gate.exact, alpha), error }.within(FUNCTION)
}

/// c · tanh(x / c), whose slope is at most 1.
pub(super) fn softcap(x: Near, cap: f64) -> Near {
    Near { exact: cap * (x.exact / cap).tanh(), error: x.error }.within(16.0 * U)
}
