//! Quantization in blocks along the row: MX (32 values, a power-of-two scale) and NVFP4 (16 values,
//! an e4m3 scale under a global scale). Codes are unpacked, one per byte.

use super::{Quantized, absmax, finite_rows, matrix};
use crate::num::array::FloatView2;
use crate::num::element::{E2m1, E4m3fn, E8m0};
use crate::num::scalar::ScalarType;
use crate::{Error, Result};

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
/// [`Error::Size`]: not rows of whole blocks; [`Error::Value`]: not finite.
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

/// 1 / x, or 1e-8 for zero, as in upstream's emulation.
fn reciprocal(x: f32) -> f32 {
    1.0 / if x == 0.0 { 1e8 } else { x }
}

/// e2m1 codes and e4m3fn scales of 16 values each, under `global_scale` (448 · 6 / largest value,
/// usually): scale = e4m3(global · (max · fl(1/6))), limited to 448; q = x · 1/(scale · 1/global),
/// to nearest even, limited to 6. Upstream: `ref_nvfp4_quant`.
///
/// Every operation is in f32, and the reciprocal of 0 is 1e-8. 16-bit activations are widened
/// first. A negative value that rounds to zero is −0 (code 8), as with the conversion instruction.
/// GPU kernels use approximate reciprocals: see [`super::nvfp4_kernel_difference`].
///
/// # Errors
/// As [`mx`], in blocks of 16; [`Error::Size`] for a global scale that is not positive and
/// finite.
pub fn nvfp4<'a>(
    x: impl Into<FloatView2<'a>>,
    global_scale: f32,
) -> Result<Quantized<E2m1, E4m3fn>> {
    let x = x.into();
    let (rows, (x, _)) = (x.shape()[0], finite_rows(&x, 16)?);
    if !(global_scale.is_finite() && global_scale > 0.0) {
        return Err(Error::size("global scale", global_scale, "a positive finite number"));
    }
    let (mut codes, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    for block in x.chunks_exact(16) {
        let scale = (global_scale * (absmax(block) * (1.0 / 6.0))).min(448.0);
        let scale = E4m3fn::from_f32_rne_saturating(scale);
        let factor = reciprocal(scale.to_f32() * reciprocal(global_scale));
        let code = |v: &f32| {
            let scaled = if *v == 0.0 { *v } else { v * factor };
            E2m1::from_f32_rne_saturating(scaled)
        };
        codes.extend(block.iter().map(code));
        scales.push(scale);
    }
    Ok(Quantized { codes: matrix(rows, codes), scales: matrix(rows, scales) })
}
