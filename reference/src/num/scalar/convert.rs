//! Conversions between f64, f32, f16 and bf16, on raw bits.
//!
//! `rne` rounds to nearest even, `rtz` toward zero, `rna` to nearest with ties away from zero. A
//! result that is too large becomes infinity (`rtz`: the largest finite value, as in IEEE 754).
//! `saturating` makes it the largest finite value, for infinities too. Narrowing makes every NaN a
//! quiet NaN with its sign and without payload; widening keeps the payload.

use super::format::{Overflow, Rounding, narrow_f32, narrow_f64, widen_to_f64};
use super::kind::ScalarType;

const F16: ScalarType = ScalarType::FLOAT16;
const BF16: ScalarType = ScalarType::BFLOAT16;

/// IEEE half to f32, exactly.
///
/// Without branches, so that loops over it vectorize.
#[inline]
pub const fn f16_to_f32(bits: u16) -> f32 {
    let sign = ((bits & 0x8000) as u32) << 16;
    let magnitude = (bits & 0x7fff) as u32;
    let shifted = magnitude << 13;
    let normal = shifted + ((127 - 15) << 23);
    // A NaN keeps its payload and becomes quiet.
    let special = shifted | 0x7f80_0000 | (((magnitude > 0x7c00) as u32) << 22);
    // magnitude · 2^−24; the conversion of an integer below 2^10 is exact.
    let scale = if magnitude == 0 { 0 } else { 24 << 23 };
    let subnormal = (magnitude as f32).to_bits() - scale;
    let value = if magnitude >= 0x7c00 { special } else { normal };
    let value = if magnitude < 0x400 { subnormal } else { value };
    f32::from_bits(sign | value)
}

/// IEEE half to f64, exactly.
#[inline]
pub const fn f16_to_f64(bits: u16) -> f64 {
    f64::from_bits(widen_to_f64(bits as u32, F16))
}

/// bfloat16 to f32, exactly: the upper half of the f32's bits. (NaN keeps even a signalling bit.)
#[inline]
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// bfloat16 to f64, exactly.
#[inline]
pub const fn bf16_to_f64(bits: u16) -> f64 {
    f64::from_bits(widen_to_f64(bits as u32, BF16))
}

macro_rules! narrow {
    ($($(#[$doc:meta])* $name:ident: $from:ident via $encode:ident -> $to:ident as $code:ty,
       $rounding:ident, $overflow:ident;)*) => {$(
        $(#[$doc])*
        #[inline]
        pub const fn $name(value: $from) -> $code {
            $encode(value.to_bits(), ScalarType::$to, Rounding::$rounding, Overflow::$overflow)
                as $code
        }
    )*};
}
pub(super) use narrow;

narrow! {
    /// f32 to IEEE half, to nearest even; from 65520 on infinity (PTX `cvt.rn.f16.f32`).
    f32_to_f16_rne: f32 via narrow_f32 -> FLOAT16 as u16, NearestEven, Infinity;
    /// f32 to IEEE half, toward zero; finite values end at 65504 (PTX `cvt.rz.f16.f32`).
    f32_to_f16_rtz: f32 via narrow_f32 -> FLOAT16 as u16, TowardZero, Infinity;
    /// f32 to IEEE half, to nearest with ties away from zero; from 65520 on infinity.
    f32_to_f16_rna: f32 via narrow_f32 -> FLOAT16 as u16, NearestAway, Infinity;
    /// f32 to IEEE half, to nearest even, limited to ±65504.
    f32_to_f16_rne_saturating: f32 via narrow_f32 -> FLOAT16 as u16, NearestEven, Saturate;
    /// f64 to IEEE half, to nearest even, rounded once; from 65520 on infinity.
    f64_to_f16_rne: f64 via narrow_f64 -> FLOAT16 as u16, NearestEven, Infinity;
    /// f64 to IEEE half, toward zero; finite values end at 65504.
    f64_to_f16_rtz: f64 via narrow_f64 -> FLOAT16 as u16, TowardZero, Infinity;
    /// f64 to IEEE half, to nearest even, limited to ±65504.
    f64_to_f16_rne_saturating: f64 via narrow_f64 -> FLOAT16 as u16, NearestEven, Saturate;
    /// f32 to bfloat16, toward zero (PTX `cvt.rz.bf16.f32`).
    f32_to_bf16_rtz: f32 via narrow_f32 -> BFLOAT16 as u16, TowardZero, Infinity;
    /// f32 to bfloat16, to nearest with ties away from zero.
    f32_to_bf16_rna: f32 via narrow_f32 -> BFLOAT16 as u16, NearestAway, Infinity;
    /// f32 to bfloat16, to nearest even, limited to the largest finite value.
    f32_to_bf16_rne_saturating: f32 via narrow_f32 -> BFLOAT16 as u16, NearestEven, Saturate;
    /// f64 to bfloat16, to nearest even, rounded once.
    f64_to_bf16_rne: f64 via narrow_f64 -> BFLOAT16 as u16, NearestEven, Infinity;
    /// f64 to bfloat16, toward zero.
    f64_to_bf16_rtz: f64 via narrow_f64 -> BFLOAT16 as u16, TowardZero, Infinity;
    /// f64 to bfloat16, to nearest even, limited to the largest finite value.
    f64_to_bf16_rne_saturating: f64 via narrow_f64 -> BFLOAT16 as u16, NearestEven, Saturate;
}

/// f32 to bfloat16, to nearest even (PTX `cvt.rn.bf16.f32`).
///
/// Both types have the same exponents, so a carry into infinity needs no special case, and loops
/// over it vectorize.
#[inline]
pub const fn f32_to_bf16_rne(value: f32) -> u16 {
    let bits = value.to_bits();
    let nan = (bits >> 16 & 0x8000) | 0x7fc0;
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    // For a NaN the sum may wrap; it is then unused.
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if is_nan { nan } else { rounded }) as u16
}

/// f64 to f32, to nearest even: what `as` does, but in integers.
#[inline]
pub const fn f64_to_f32_rne(value: f64) -> f32 {
    let (rounding, overflow) = (Rounding::NearestEven, Overflow::Infinity);
    f32::from_bits(narrow_f64(value.to_bits(), ScalarType::FLOAT32, rounding, overflow))
}

/// f64 to f32, toward zero; finite values end at the largest finite f32.
#[inline]
pub const fn f64_to_f32_rtz(value: f64) -> f32 {
    let (rounding, overflow) = (Rounding::TowardZero, Overflow::Infinity);
    f32::from_bits(narrow_f64(value.to_bits(), ScalarType::FLOAT32, rounding, overflow))
}

/// IEEE half to bfloat16, to nearest even. Never overflows.
#[inline]
pub const fn f16_to_bf16_rne(bits: u16) -> u16 {
    f32_to_bf16_rne(f16_to_f32(bits))
}

/// IEEE half to bfloat16, toward zero.
#[inline]
pub const fn f16_to_bf16_rtz(bits: u16) -> u16 {
    f32_to_bf16_rtz(f16_to_f32(bits))
}

/// bfloat16 to IEEE half, to nearest even; from 65520 on infinity.
#[inline]
pub const fn bf16_to_f16_rne(bits: u16) -> u16 {
    f32_to_f16_rne(bf16_to_f32(bits))
}

/// bfloat16 to IEEE half, toward zero; finite values end at 65504.
#[inline]
pub const fn bf16_to_f16_rtz(bits: u16) -> u16 {
    f32_to_f16_rtz(bf16_to_f32(bits))
}

/// bfloat16 to IEEE half, to nearest even, limited to ±65504.
#[inline]
pub const fn bf16_to_f16_rne_saturating(bits: u16) -> u16 {
    f32_to_f16_rne_saturating(bf16_to_f32(bits))
}
