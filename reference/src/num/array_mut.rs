//! Arrays to fill, whose type is known at run time only.

use ndarray::{ArrayViewMut, Dimension, Ix2};

use super::element::{bf16, f16};
use super::scalar::ScalarType;

/// A borrowed array of a run-time floating-point type, to fill.
#[derive(Debug)]
#[non_exhaustive]
pub enum FloatViewMut<'a, D: Dimension> {
    /// IEEE half.
    F16(ArrayViewMut<'a, f16, D>),
    /// bfloat16.
    Bf16(ArrayViewMut<'a, bf16, D>),
    /// IEEE single.
    F32(ArrayViewMut<'a, f32, D>),
}

/// [`FloatViewMut`] of a matrix.
pub type FloatViewMut2<'a> = FloatViewMut<'a, Ix2>;

impl<D: Dimension> FloatViewMut<'_, D> {
    /// The number format.
    pub fn scalar_type(&self) -> ScalarType {
        match self {
            Self::F16(_) => ScalarType::FLOAT16,
            Self::Bf16(_) => ScalarType::BFLOAT16,
            Self::F32(_) => ScalarType::FLOAT32,
        }
    }

    /// The dimensions.
    pub fn shape(&self) -> &[usize] {
        match self {
            Self::F16(a) => a.shape(),
            Self::Bf16(a) => a.shape(),
            Self::F32(a) => a.shape(),
        }
    }
}

impl<'a, D: Dimension> From<ArrayViewMut<'a, f16, D>> for FloatViewMut<'a, D> {
    fn from(view: ArrayViewMut<'a, f16, D>) -> Self {
        Self::F16(view)
    }
}

impl<'a, D: Dimension> From<ArrayViewMut<'a, bf16, D>> for FloatViewMut<'a, D> {
    fn from(view: ArrayViewMut<'a, bf16, D>) -> Self {
        Self::Bf16(view)
    }
}

impl<'a, D: Dimension> From<ArrayViewMut<'a, f32, D>> for FloatViewMut<'a, D> {
    fn from(view: ArrayViewMut<'a, f32, D>) -> Self {
        Self::F32(view)
    }
}
