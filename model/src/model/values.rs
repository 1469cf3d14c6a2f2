//! Reads small tensors such as scales and router biases as real numbers.

use marlinspike::formats::float_type;
use marlinspike::num::tensor::Tensor;
use marlinspike::weight::Table;
use marlinspike::{Error, Result};

/// Turns a scalar into a tensor of one element, so that scalars can be concatenated.
pub(crate) fn line(tensor: Tensor<'_>) -> Result<Tensor<'_>> {
    if !tensor.shape().is_empty() {
        return Ok(tensor);
    }
    let (name, dtype) = (tensor.name().to_owned(), tensor.dtype());
    Tensor::new(name, dtype, vec![1], tensor.into_bytes())
}

/// The values of a tensor of any floating-point type as f32.
///
/// # Errors
/// [`Error::Dtype`] for another type.
pub fn floats(tensor: &Tensor<'_>) -> Result<Vec<f32>> {
    let Some(ty) = float_type(tensor.dtype()) else {
        return Err(Error::dtype(tensor.name(), tensor.dtype(), "a floating-point type"));
    };
    Ok(Table::from_tensor(&line(tensor.clone())?, ty)?
        .iter_bits()
        .map(|b| ty.to_f64(b) as f32)
        .collect())
}
