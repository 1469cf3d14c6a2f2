//! Quantization in blocks of 32 along the row with power-of-two scales (MX). Codes are unpacked, one per
//! byte.

use super::{Quantized, absmax, finite_rows, matrix};
use crate::Result;
use crate::num::array::FloatView2;
use crate::num::element::E8m0;
use crate::num::scalar::ScalarType;

/// ⌊log₂⌋ of the largest magnitude, or of 2^-126 if that is larger.
fn exponent(block: &[f32]) -> i32 {
    (absmax(block).max(f32::MIN_POSITIVE).to_bits() >> 23) as i32 - 127
}

/// 2^e in f64, where dividing by it is exact.
fn power(e: i32) -> f64 {
    f64::from_bits(((e + 1023) as u64) << 52)
}

/// Codes of type `ty`, one to a byte, and e8m0 scales of 32 values each: scale =
/// 2^(⌊log₂ max⌋ − `below`), at least 2^-127, max at least 2^-126; values round to nearest even and
/// saturate. OCP Microscaling Formats 1.0, section 6.3.
///
/// The logarithm is exact here; upstream's (`mxfp8_e4m3_quantize`) is f32 and could differ for an
/// f32 maximum just below a power of two, never for 16-bit inputs.
///
/// # Errors
/// [`crate::Error::Size`]: not rows of whole blocks; [`crate::Error::Value`]: not finite.
pub fn mx<'a>(
    x: impl Into<FloatView2<'a>>,
    ty: ScalarType,
    below: i32,
) -> Result<Quantized<u8, E8m0>> {
    let x = x.into();
    let (rows, (x, _)) = (x.shape()[0], finite_rows(&x, 32)?);
    let (mut codes, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    for block in x.chunks_exact(32) {
        let e = (exponent(block) - below).max(-127);
        let code = |v: &f32| ty.encode_rne_saturating(f64::from(*v) / power(e)) as u8;
        codes.extend(block.iter().map(code));
        scales.push(E8m0::from_bits((e + 127) as u8));
    }
    Ok(Quantized { codes: matrix(rows, codes), scales: matrix(rows, scales) })
}
