//! Activations to 8 bits with one scale per token.

use marlinspike::quantize::{Int8Rule, Quantized};
use marlinspike::scalar::ScalarType;

use super::check;
use crate::{
    device::Device,
    error::AccelError,
    raw,
    registry::{Law, Needs, Row, lattice},
};

/// Upstream: the function `per_token_quant_int8`.
pub(crate) static INT8: Row = Row {
    name: "per_token_quant_int8",
    source: "per_token_quant_int8",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| lattice(&[("IS_BF16", &[0, 1]), ("IS_PRODUCT", &[0, 1])]),
};

/// Upstream: `dynamic_per_token_scaled_fp8_quant`.
pub(crate) static FP8: Row = Row {
    name: "per_token_quant_fp8",
    source: "per_token_quant_fp8",
    needs: Needs { compute_capability: (8, 0) },
    law: Law::EqualBits,
    variants: |_| lattice(&[("IS_BF16", &[0, 1])]),
};

/// Rows that were checked.
#[derive(Debug)]
pub(crate) struct Rows<'a> {
    pub(crate) x: &'a [u16],
    pub(crate) rows: u32,
    pub(crate) size_k: u32,
}

impl<'a> Rows<'a> {
    fn new(row: &Row, x: &'a [u16], dtype: ScalarType, size_k: usize) -> Result<Self, AccelError> {
        let rows = check::rows(row, "x", x.len(), size_k)?;
        let exponent = if dtype == ScalarType::FLOAT16 { 0x7c00 } else { 0x7f80 };
        if let Some(i) = x.iter().position(|bits| bits & exponent == exponent) {
            let (found, at) = (dtype.to_f64(x[i].into()), [i / size_k, i % size_k]);
            let found = format!("{found} at {at:?}");
            return Err(AccelError::argument(row, "x", found, "finite numbers"));
        }
        Ok(Self { x, rows, size_k: check::positive(row, "size_k", size_k)? })
    }
}

/// int8 codes and scales of `x` `[rows, size_k]`, bits of `dtype`: the bits of
/// [`per_token_int8`](marlinspike::quantize::per_token_int8).
///
/// # Errors
/// [`AccelError::Argument`] for another type, for x that is not whole rows of finite numbers; those
/// of preparing and running a kernel.
pub fn per_token_quant_int8(
    device: &Device,
    x: &[u16],
    dtype: ScalarType,
    size_k: usize,
    rule: Int8Rule,
) -> Result<Quantized<i8>, AccelError> {
    let is_bf16 = check::is_bf16(&INT8, "dtype", dtype)?;
    let args = Rows::new(&INT8, x, dtype, size_k)?;
    let is_product = u32::from(rule == Int8Rule::Product);
    let function = device.function(&INT8, &[is_bf16, ("IS_PRODUCT", is_product)])?;
    let (codes, scales) = raw::quantize::int8(device, &function, &args)?;
    Ok(Quantized { codes, scales })
}

/// e4m3fn codes and scales of `x` `[rows, size_k]`, bits of `dtype`: the bits of
/// [`per_token_fp8`](marlinspike::quantize::per_token_fp8). `upper` bounds the magnitude that a
/// scale counts.
///
/// # Errors
/// As [`per_token_quant_int8`]; [`AccelError::Argument`] for a bound that is not positive.
pub fn per_token_quant_fp8(
    device: &Device,
    x: &[u16],
    dtype: ScalarType,
    size_k: usize,
    upper: Option<f32>,
) -> Result<Quantized<u8>, AccelError> {
    let is_bf16 = check::is_bf16(&FP8, "dtype", dtype)?;
    let args = Rows::new(&FP8, x, dtype, size_k)?;
    let upper = upper.unwrap_or(f32::INFINITY);
    if upper.is_nan() || upper <= 0.0 {
        return Err(AccelError::argument(&FP8, "upper", upper, "a positive number"));
    }
    let function = device.function(&FP8, &[is_bf16])?;
    let (codes, scales) = raw::quantize::fp8(device, &function, &args, upper)?;
    Ok(Quantized { codes, scales })
}
