//! Exact values in f64, to a relative error of 2^-40.

use super::Function;
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, PI};

/// √(2/π).
const BETA: f64 = FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
const KAPPA: f64 = 0.044_715;

/// erfc x. Up to 2 by the series erf x = (2/√π)·e^(−x²)·Σ 2ⁿ·x^(2n+1)/(1·3·…·(2n+1)), whose terms
/// are all positive; beyond by the continued fraction of x·e^(x²)·√π·erfc x, from its 120th level
/// up, where the error is below f64's.
pub(super) fn erfc(x: f64) -> f64 {
    if x < 0.0 {
        return 2.0 - erfc(-x);
    }
    if x < 2.0 {
        let (mut term, mut sum, mut n) = (x, x, 1.0);
        while term > sum * 1e-18 {
            term *= 2.0 * x * x / (2.0 * n + 1.0);
            sum += term;
            n += 1.0;
        }
        return 1.0 - FRAC_2_SQRT_PI * (-x * x).exp() * sum;
    }
    if x > 27.0 {
        return 0.0;
    }
    let tail = (1..=120).rev().fold(0.0, |tail, n| 0.5 * f64::from(n) / (x + tail));
    (-x * x).exp() / (PI.sqrt() * (x + tail))
}

/// The tangent's argument in GELU by tangent.
pub(super) fn inner(x: f64) -> f64 {
    BETA * (x + KAPPA * x * x * x)
}

/// x / (1 + e^−y), also where the exponential overflows; zero at x = −∞.
fn logistic(x: f64, y: f64) -> f64 {
    let value = x / (1.0 + (-y).exp());
    if value.is_nan() && !x.is_nan() { -0.0 } else { value }
}

impl Function {
    /// F(x); the limit, zero, at −∞.
    pub fn exact(self, x: f64, alpha: f64) -> f64 {
        match self {
            Self::Silu => logistic(x, alpha * x),
            Self::Gelu => {
                let value = 0.5 * x * erfc(-x * FRAC_1_SQRT_2);
                if x == f64::NEG_INFINITY { -0.0 } else { value }
            }
            // ½·(1 + tanh y) = 1 / (1 + e^(−2y)).
            Self::GeluTanh => logistic(x, 2.0 * inner(x)),
            Self::Relu2 => x.max(0.0) * x.max(0.0),
        }
    }

    /// The gate at which F is smallest; F falls before it and rises after it.
    pub(super) fn lowest(self, alpha: f64) -> f64 {
        match self {
            Self::Silu => -1.278_464_542_761_074 / alpha,
            Self::Gelu => -0.751_791_524_693_564_5,
            Self::GeluTanh => -0.752_461_422_071_016_3,
            Self::Relu2 => 0.0,
        }
    }
}
