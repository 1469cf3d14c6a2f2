//! Activations and outputs of either type.

use crate::num::scalar::{ScalarType, bf16_to_f32, f32_to_bf16_rne};
use crate::num::tensor::{DType, Tensor};
use crate::w4a8::packed::MatrixBytes;
use crate::{Error, Result};

/// Row-major floats of the supported types.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// FLOAT32.
    F32(Vec<f32>),
    /// BFLOAT16, as bits.
    Bf16(Vec<u16>),
}

impl Values {
    /// `values` rounded to `ty`, to nearest even.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for types other than FLOAT32 and BFLOAT16.
    pub fn from_f32(values: Vec<f32>, ty: ScalarType) -> Result<Self> {
        match ty {
            ScalarType::FLOAT32 => Ok(Self::F32(values)),
            ScalarType::BFLOAT16 => {
                Ok(Self::Bf16(values.into_iter().map(f32_to_bf16_rne).collect()))
            }
            _ => Err(Error::unsupported(format!("{ty} activations"), "float32 or bfloat16")),
        }
    }

    /// The elements of a tensor.
    ///
    /// # Errors
    /// [`Error::Dtype`] for types other than F32 and BF16.
    pub fn from_tensor(tensor: &Tensor<'_>) -> Result<Self> {
        tensor.expect_dtype(&[DType::F32, DType::BF16])?;
        Ok(match tensor.dtype() {
            DType::F32 => Self::F32(tensor.elements::<f32>().into_owned()),
            _ => Self::Bf16(tensor.elements::<u16>().into_owned()),
        })
    }

    /// FLOAT32 or BFLOAT16.
    pub fn ty(&self) -> ScalarType {
        match self {
            Self::F32(_) => ScalarType::FLOAT32,
            Self::Bf16(_) => ScalarType::BFLOAT16,
        }
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(v) => v.len(),
            Self::Bf16(v) => v.len(),
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values as f32, exactly.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F32(v) => v.clone(),
            Self::Bf16(v) => v.iter().map(|&b| bf16_to_f32(b)).collect(),
        }
    }

    /// Rows of `size_k` values in the order of a weight's rows.
    pub(super) fn ordered(&self, size_k: usize, weight: MatrixBytes<'_>) -> Self {
        let from = |i: usize| i / size_k * size_k + weight.row(i % size_k);
        match self {
            Self::F32(v) => Self::F32((0..v.len()).map(|i| v[from(i)]).collect()),
            Self::Bf16(v) => Self::Bf16((0..v.len()).map(|i| v[from(i)]).collect()),
        }
    }

    /// The values' bits, zero-extended.
    pub fn bits(&self) -> Vec<u32> {
        match self {
            Self::F32(v) => v.iter().map(|x| x.to_bits()).collect(),
            Self::Bf16(v) => v.iter().map(|&b| b.into()).collect(),
        }
    }
}
