//! Stages around a block's router and experts.
//!
//! | stage | value | largest error in f32, u = 2^-24 |
//! | --- | --- | --- |
//! | `linear` | W · x + b | of a product |
//! | `rms_norm` | x / √(mean of x² + ε) · (weight + offset) | below |
//! | `scale`, `multiply` | x · vector, x · number | 3u |
//! | `gelu` | ½ · x · (1 + erf(x · √½)) | 24u, and 8u · abs(x) |
//!
//! Norm: n squares, their sum in any order, the mean and ε have a relative error of (n + 6) · u at
//! most, since all terms are positive. With the inputs' errors the sum is wrong by a factor within
//! 1 ± r; its inverse root is then wrong by at most (1 − r)^−½ · (1 + 8u) − 1, of which 8u are the root's own.

use ndarray::ArrayView2;
use serde::{Deserialize, Serialize};

use super::near::{FLUSH, Near, U};
use super::values::{function, product};
use crate::moe::activation::Function;
use crate::moe::families::{BlockNumbers, FoundStage, StageRule};
use crate::num::scalar::ScalarType;

/// One stage. Tensors are named as inputs of a case: `in.NAME`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Stage {
    /// W · x + b, W `[size_n, features]`.
    Linear {
        /// W.
        weight: String,
        /// b, `[size_n]`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bias: Option<String>,
        /// Features after the stage.
        size_n: usize,
    },
    /// x / √(mean of x² + ε).
    RmsNorm {
        /// ε.
        eps: f32,
        /// Factor on each feature.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        weight: Option<String>,
        /// Added to the weight.
        #[serde(default)]
        weight_offset: f32,
        /// Whether the weight multiplies before the norm instead of after it.
        #[serde(default)]
        weight_first: bool,
    },
    /// Times a vector.
    Scale {
        /// The vector, a factor for each feature.
        weight: String,
    },
    /// Times a number.
    Multiply {
        /// The number.
        factor: f32,
    },
    /// GELU by erf.
    Gelu {},
}

impl Stage {
    /// A stage of a family's block of `hidden` features, with its tensors' names as they were found.
    pub fn of(found: &FoundStage, numbers: &BlockNumbers, hidden: usize) -> Self {
        let mut names = found.tensors.iter().map(|(name, _)| name.clone());
        let first = names.next();
        match found.rule {
            StageRule::Linear(_) | StageRule::LinearIfPresent(_) => Self::Linear {
                weight: first.unwrap_or_default(),
                bias: names.next(),
                size_n: found.width,
            },
            StageRule::Norm { eps, weight_offset, weight_first, .. } => {
                Self::RmsNorm { eps: numbers.eps(&eps), weight: first, weight_offset, weight_first }
            }
            StageRule::Scale(_) => Self::Scale { weight: first.unwrap_or_default() },
            StageRule::RootOfHidden => {
                Self::Multiply { factor: (1.0 / (hidden as f64).sqrt()) as f32 }
            }
            StageRule::Gelu => Self::Gelu {},
        }
    }

    /// Names of its tensors with their shapes after `width` features.
    pub fn tensors(&self, width: usize) -> Vec<(&str, Vec<usize>)> {
        match self {
            Self::Linear { weight, bias, size_n } => {
                let bias = bias.iter().map(|name| (name.as_str(), vec![*size_n]));
                std::iter::once((weight.as_str(), vec![*size_n, width])).chain(bias).collect()
            }
            Self::RmsNorm { weight, .. } => {
                weight.iter().map(|name| (name.as_str(), vec![width])).collect()
            }
            Self::Scale { weight } => vec![(weight.as_str(), vec![width])],
            Self::Multiply { .. } | Self::Gelu {} => Vec::new(),
        }
    }

    /// Features after the stage.
    pub fn width(&self, before: usize) -> usize {
        if let Self::Linear { size_n, .. } = self { *size_n } else { before }
    }

    /// Whether it is a norm.
    pub fn is_norm(&self) -> bool {
        matches!(self, Self::RmsNorm { .. })
    }

    /// The stage of one token, with `get` for the numbers of a tensor; rounded to `ty`.
    pub fn apply(
        &self,
        x: &[Near],
        get: &dyn Fn(&str) -> Option<Vec<f64>>,
        ty: ScalarType,
    ) -> Vec<Near> {
        let vector = |name: &str| get(name).unwrap_or_else(|| vec![0.0; x.len()]);
        let scaled = |x: &[Near], w: &[f64]| -> Vec<Near> {
            let one = |(x, w): (&Near, &f64)| x.times(Near::point(*w)).within(3.0 * U).rounded(ty);
            x.iter().zip(w).map(one).collect()
        };
        match self {
            Self::Linear { weight, bias, size_n } => {
                let values = get(weight).unwrap_or_else(|| vec![0.0; size_n * x.len()]);
                let weight = ArrayView2::from_shape((*size_n, x.len()), &values)
                    .expect("the rule fixes the shape");
                product(x, weight, bias.as_deref().and_then(get).as_deref(), ty)
            }
            Self::RmsNorm { eps, weight, weight_offset, weight_first } => {
                let offset = f64::from(*weight_offset);
                let weight = weight.as_deref().map(vector);
                let weight: Option<Vec<f64>> =
                    weight.map(|w| w.into_iter().map(|w| w + offset).collect());
                match (weight, weight_first) {
                    (None, _) => rms_norm(x, *eps, ty),
                    (Some(w), true) => rms_norm(&scaled(x, &w), *eps, ty),
                    (Some(w), false) => scaled(&rms_norm(x, *eps, ty), &w),
                }
            }
            Self::Scale { weight } => scaled(x, &vector(weight)),
            Self::Multiply { factor } => scaled(x, &vec![f64::from(*factor); x.len()]),
            Self::Gelu {} => {
                x.iter().map(|&x| function(Function::Gelu, x, 1.0).rounded(ty)).collect()
            }
        }
    }
}

/// Stages one after the other.
pub fn apply_stages(
    stages: &[Stage],
    x: Vec<Near>,
    get: &dyn Fn(&str) -> Option<Vec<f64>>,
    ty: ScalarType,
) -> Vec<Near> {
    stages.iter().fold(x, |x, stage| stage.apply(&x, get, ty))
}

/// x / √(mean of x² + ε), rounded to `ty`.
///
/// An implementation's mean lies between those of the smallest and of the largest magnitudes. Whatever its
/// x, no result exceeds √n.
fn rms_norm(x: &[Near], eps: f32, ty: ScalarType) -> Vec<Near> {
    let (n, eps) = (x.len() as f64, f64::from(eps));
    let mean_of = |size: fn(&Near) -> f64| x.iter().map(|x| size(x).powi(2)).sum::<f64>() / n + eps;
    let gamma = (n + 6.0) * U * 1.001;
    let mean = mean_of(|x| x.exact.abs());
    let least = mean_of(|x| (x.exact.abs() - x.error).max(0.0)) * (1.0 - gamma) - FLUSH;
    let most = mean_of(|x| x.magnitude()) * (1.0 + gamma) + FLUSH;
    // The sum of squares must not overflow in f32.
    let is_bounded = mean > 0.0 && most * n <= f64::from(f32::MAX) / 2.0;
    let root = 1.0 / mean.sqrt();
    let off = match least > 0.0 {
        true => {
            let above = (mean / least).sqrt() * (1.0 + 8.0 * U) - 1.0;
            above.max(1.0 - (mean / most).sqrt() * (1.0 - 8.0 * U))
        }
        false => f64::INFINITY,
    };
    let one = |x: &Near| {
        let exact = x.exact * root;
        let error = root * (x.error * (1.0 + off) + x.exact.abs() * off);
        let largest = exact.abs() + n.sqrt() * (1.0 + gamma + 8.0 * U);
        // `f64::min` takes the other number for NaN, which 0 · ∞ gives.
        let error = if is_bounded { error.min(largest) } else { f64::INFINITY };
        Near { exact, error }.within(2.0 * U).rounded(ty)
    };
    x.iter().map(one).collect()
}
