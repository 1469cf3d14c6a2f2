//! The tensors of an operation, with the shapes and types that a config requires.

use crate::Error;
use crate::Result;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};

/// The requirement on one dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dim {
    /// Exactly this size.
    Is(usize),
    /// 1 or more.
    Some,
    /// Any size, including 0 (lists whose length depends on values).
    Any,
}

/// A tensor of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorRule {
    /// Name in the file, `in.` or `out.` included.
    pub name: String,
    /// Element types allowed.
    pub dtypes: Vec<DType>,
    /// Required shape.
    pub shape: Vec<Dim>,
    /// Whether a single value, as `[1]` or without dimensions, may replace the whole shape.
    pub or_single: bool,
    /// Whether the tensor is required.
    pub required: bool,
}

impl TensorRule {
    pub(crate) fn required(mut self, required: bool) -> Self {
        self.required = required;
        self
    }

    pub(crate) fn or_single(mut self) -> Self {
        self.or_single = true;
        self
    }

    /// Returns [`Error::Dtype`] or [`Error::Shape`] unless `tensor` satisfies the rule.
    pub fn check(&self, tensor: &Tensor<'_>) -> Result<()> {
        tensor.expect_dtype(&self.dtypes)?;
        if self.fits(tensor.shape()) {
            return Ok(());
        }
        Err(Error::shape(tensor.name(), tensor.shape(), self.demanded()))
    }

    /// Whether the rule allows a tensor of this shape.
    pub fn fits(&self, shape: &[usize]) -> bool {
        let fits = |(rule, &dim): (&Dim, &usize)| match *rule {
            Dim::Is(expected) => dim == expected,
            Dim::Some => dim > 0,
            Dim::Any => true,
        };
        if shape.len() == self.shape.len() && self.shape.iter().zip(shape).all(fits) {
            return true;
        }
        self.or_single && matches!(shape, [] | [1])
    }

    /// The required shape as printed in errors: `[16, 1 or more]`.
    pub(crate) fn demanded(&self) -> String {
        let dims: Vec<String> = self
            .shape
            .iter()
            .map(|d| match d {
                Dim::Is(n) => n.to_string(),
                Dim::Some => "1 or more".to_owned(),
                Dim::Any => "any".to_owned(),
            })
            .collect();
        format!("[{}]", dims.join(", "))
    }

    /// Elements that the rule fixes; dimensions that it leaves open count once.
    pub(crate) fn elements(&self) -> u64 {
        let size = |dim: &Dim| match *dim {
            Dim::Is(size) => size as u64,
            Dim::Some | Dim::Any => 1,
        };
        self.shape.iter().map(size).fold(1, u64::saturating_mul)
    }
}

/// A tensor that may be absent.
pub(crate) fn rule(name: impl Into<String>, dtypes: &[DType], shape: &[Dim]) -> TensorRule {
    TensorRule {
        name: name.into(),
        dtypes: dtypes.to_vec(),
        shape: shape.to_vec(),
        or_single: false,
        required: false,
    }
}

/// The stored type of 16- and 32-bit floats and activations.
pub(crate) fn stored(ty: ScalarType) -> DType {
    match ty {
        ScalarType::FLOAT16 => DType::F16,
        ScalarType::BFLOAT16 => DType::BF16,
        ScalarType::INT8 => DType::I8,
        ScalarType::FLOAT8_E4M3FN => DType::F8E4M3,
        _ => DType::F32,
    }
}
