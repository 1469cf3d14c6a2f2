//! Fast search for values that no weight may have.

use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::{Error, Result};

/// Returns [`Error::Value`] for the first element of `tensor`, read as `ty`, that is NaN or
/// infinite. The tensor's elements must have `ty`'s width.
pub fn expect_finite(tensor: &Tensor<'_>, ty: ScalarType) -> Result<()> {
    // Nearly always all values are finite, so only the exponents are examined first.
    let finite = match ty {
        ScalarType::FLOAT16 if tensor.dtype().bytes() == 2 => {
            tensor.elements::<u16>().iter().all(|b| b & 0x7c00 != 0x7c00)
        }
        ScalarType::BFLOAT16 if tensor.dtype().bytes() == 2 => {
            tensor.elements::<u16>().iter().all(|b| b & 0x7f80 != 0x7f80)
        }
        ScalarType::FLOAT32 if tensor.dtype().bytes() == 4 => {
            tensor.elements::<u32>().iter().all(|b| b & 0x7f80_0000 != 0x7f80_0000)
        }
        _ => false,
    };
    if finite {
        return Ok(());
    }
    find(tensor, ty, |v| !v.is_finite(), "a finite number")
}

/// Returns [`Error::Value`] for the first element for which `bad` holds.
pub(crate) fn find(
    tensor: &Tensor<'_>,
    ty: ScalarType,
    bad: impl Fn(f64) -> bool,
    expected: &str,
) -> Result<()> {
    let value = |bits: u32| ty.to_f64(bits);
    let at = match (tensor.dtype().bytes(), ty.storage_bits()) {
        (1, 8) => {
            let table: Vec<bool> = (0..256).map(|b| bad(value(b))).collect();
            tensor.elements::<u8>().iter().position(|&b| table[usize::from(b)])
        }
        (2, 16) => tensor.elements::<u16>().iter().position(|&b| bad(value(b.into()))),
        (4, 32) => tensor.elements::<u32>().iter().position(|&b| bad(value(b))),
        _ => return Err(Error::dtype(tensor.name(), tensor.dtype(), ty)),
    };
    match at {
        None => Ok(()),
        Some(i) => Err(Error::value(
            tensor.name(),
            &unflatten(tensor.shape(), i),
            value(element_bits(tensor, i)),
            expected,
        )),
    }
}

/// The bits of element `i`, zero-extended to 32.
fn element_bits(tensor: &Tensor<'_>, i: usize) -> u32 {
    let width = tensor.dtype().bytes();
    let bytes = &tensor.bytes()[i * width..(i + 1) * width];
    bytes.iter().rev().fold(0, |bits, &b| bits << 8 | u32::from(b))
}

/// The index of flat position `i`.
pub(crate) fn unflatten(shape: &[usize], mut i: usize) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (slot, &dim) in index.iter_mut().zip(shape).rev() {
        *slot = i % dim.max(1);
        i /= dim.max(1);
    }
    index
}
