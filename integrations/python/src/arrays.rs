//! Tensors between Python and Rust: an element type's name, a shape, and the bytes as a numpy array.

use marlinspike::num::tensor::{DType, Tensor};
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

use crate::error::{Failed, raised};

/// A tensor from Python; its bytes are borrowed.
#[derive(FromPyObject)]
pub(crate) struct Input<'py>(String, Vec<usize>, PyReadonlyArray1<'py, u8>);

/// A named tensor from Python.
pub(crate) type Named<'py> = (String, Input<'py>);

/// A tensor for Python.
pub(crate) type Output<'py> = (&'static str, Vec<usize>, Bound<'py, PyArray1<u8>>);

impl Input<'_> {
    /// The tensor over the array's bytes.
    pub(crate) fn tensor(&self, name: &str) -> PyResult<Tensor<'_>> {
        let Self(dtype, shape, bytes) = self;
        let ty = DType::from_name(dtype).ok_or_else(|| {
            let known: Vec<_> = DType::ALL.iter().map(|ty| ty.name()).collect();
            raised(format!(
                "`{name}`: found element type {dtype}, expected one of {}",
                known.join(", ")
            ))
        })?;
        Tensor::new(name, ty, shape.clone(), bytes.as_slice()?).failed()
    }
}

/// A tensor as Python takes it.
pub(crate) fn output<'py>(py: Python<'py>, tensor: Tensor<'_>) -> Output<'py> {
    let (dtype, shape) = (tensor.dtype().name(), tensor.shape().to_vec());
    (dtype, shape, PyArray1::from_vec(py, tensor.into_bytes().into_owned()))
}
