//! Quantization in blocks of 32 along the row with power-of-two scales (MX). Codes are unpacked, one per
//! byte.

use super::{Quantized, absmax, finite_rows, matrix};
use crate::Result;
use crate::named::named;
use crate::num::array::FloatView2;
use crate::num::element::E8m0;
use crate::num::scalar::ScalarType;

named! {
    /// How the scale of an MX block follows from its largest magnitude m. The format's largest number is
    /// max, and e is the exponent of max (2 for e2m1).
    MxRounding {
        /// 2^(⌊log₂ m⌋ − e): OCP Microscaling Formats 1.0, section 6.3. Values above max · scale saturate.
        Floor "floor",
        /// As `floor`, after m is rounded to the significand bits of the format, halves up: m of 1.75 · 2^n
        /// and more counts as 2^(n + 1) in e2m1. AMD Quark, AITER's `dynamic_mxfp4_quant`, torchao.
        Even "even",
        /// 2^(⌈log₂ m⌉ − e): torchao's `CEIL`.
        Ceil "ceil",
        /// 2^⌈log₂(m / max)⌉, the least scale under which no value saturates: `cvt.rp.satfinite.ue8m0x2`,
        /// torchao's `RCEIL`.
        RoundUp "round_up",
    }
}

impl MxRounding {
    /// The scale's exponent for the largest magnitude `max` under a format of `limit`, with `bits` of
    /// fraction and the exponent `below`.
    fn exponent(self, max: f32, limit: f32, (bits, below): (u32, i32)) -> i32 {
        let floor = |x: f32| (x.max(f32::MIN_POSITIVE).to_bits() >> 23) as i32 - 127;
        let is_power = |x: f32| x <= f32::MIN_POSITIVE || x.to_bits() & 0x7f_ffff == 0;
        let ceil = |x: f32| floor(x) + i32::from(!is_power(x));
        match self {
            Self::Floor => floor(max) - below,
            Self::Even => {
                let half = 1 << (22 - bits);
                floor(f32::from_bits(max.to_bits() + half)) - below
            }
            Self::Ceil => ceil(max) - below,
            // The quotient in f64 lies on the same side of every power of two as the exact one.
            Self::RoundUp => {
                let quotient = f64::from(max.max(f32::MIN_POSITIVE)) / f64::from(limit);
                let bits = quotient.to_bits();
                (bits >> 52) as i32 - 1023 + i32::from(bits & ((1 << 52) - 1) != 0)
            }
        }
    }
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
    mx_by(x, ty, below, MxRounding::Floor)
}

/// [`mx`] with another rule for the scales.
///
/// # Errors
/// As [`mx`].
pub fn mx_by<'a>(
    x: impl Into<FloatView2<'a>>,
    ty: ScalarType,
    below: i32,
    rounding: MxRounding,
) -> Result<Quantized<u8, E8m0>> {
    let x = x.into();
    let (rows, (x, _)) = (x.shape()[0], finite_rows(&x, 32)?);
    let (mut codes, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    let (limit, fraction) = match ty {
        ScalarType::FLOAT4_E2M1F => (6.0, 1),
        _ => (448.0, 3),
    };
    for block in x.chunks_exact(32) {
        let e = rounding.exponent(absmax(block), limit, (fraction, below)).max(-127);
        let code = |v: &f32| ty.encode_rne_saturating(f64::from(*v) / power(e)) as u8;
        codes.extend(block.iter().map(code));
        scales.push(E8m0::from_bits((e + 127) as u8));
    }
    Ok(Quantized { codes: matrix(rows, codes), scales: matrix(rows, scales) })
}
