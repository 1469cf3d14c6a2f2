//! Activations of a whole block, and the experts of each token.

use marlinspike::Result;
use marlinspike::moe::block::Near;
use marlinspike::moe::layer::Routed;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};

use super::dense::{round, values};
use crate::run::input::Numbers;

/// Activations of 16 or 32 bits.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Floats {
    /// FLOAT32, FLOAT16 or BFLOAT16.
    pub ty: ScalarType,
    /// The numbers.
    pub values: Vec<f32>,
}

impl Numbers for Floats {
    fn from_f32(values: Vec<f32>, ty: ScalarType) -> Result<Self> {
        let values = values.into_iter().map(|v| round(ty, v.into())).collect();
        Ok(Self { ty, values })
    }

    fn from_tensor(tensor: &Tensor<'_>) -> Result<Self> {
        let ty = match tensor.dtype() {
            DType::F32 => ScalarType::FLOAT32,
            DType::F16 => ScalarType::FLOAT16,
            _ => ScalarType::BFLOAT16,
        };
        Ok(Self { ty, values: values(tensor)? })
    }
}

/// Ids and weights of each token, as the experts take them.
#[derive(Debug)]
pub(super) struct Routes {
    pub(super) top_k: usize,
    pub(super) ids: Vec<i32>,
    pub(super) weights: Vec<f32>,
    /// Weights `[M, shared experts]`, if the router gives them.
    pub(super) shared: Option<Vec<Near>>,
}

impl Routes {
    pub(super) fn routed(&self) -> Result<Routed<'_>> {
        Routed::from_rows(self.top_k, &self.ids, &self.weights)
    }
}
