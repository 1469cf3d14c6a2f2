//! Conversions to and from the types of at most 8 bits, on raw bits (e2m1 in the low 4 bits).
//!
//! Names follow the 16-bit conversions; `rne_nan` maps values that are too large, and infinities, to
//! NaN. Decoding is a table lookup; the tables are computed from integers at compile time.

use super::convert::{bf16_to_f32, f16_to_f32, narrow};
use super::format::{
    Overflow, Rounding, narrow_f32, narrow_f64, narrow_f64_to_e8m0, widen_to_f32, widen_to_f64,
};
use super::kind::ScalarType;

const fn table(from: ScalarType) -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = f32::from_bits(widen_to_f32(code as u32, from));
        code += 1;
    }
    table
}

macro_rules! decode {
    ($($from:ident, $what:literal, $table:ident, $to_f32:ident, $to_f64:ident;)*) => {$(
        static $table: [f32; 256] = table(ScalarType::$from);

        #[doc = concat!($what, " to f32, exactly.")]
        #[inline]
        pub fn $to_f32(code: u8) -> f32 {
            $table[code as usize]
        }

        #[doc = concat!($what, " to f64, exactly.")]
        #[inline]
        pub const fn $to_f64(code: u8) -> f64 {
            f64::from_bits(widen_to_f64(code as u32, ScalarType::$from))
        }
    )*};
}

decode! {
    FLOAT8_E4M3FN, "e4m3fn (0x7f and 0xff NaN)", E4M3FN, e4m3fn_to_f32, e4m3fn_to_f64;
    FLOAT8_E5M2, "e5m2", E5M2, e5m2_to_f32, e5m2_to_f64;
    FLOAT8_E8M0FNU, "e8m0 (2^(code − 127), 0xff NaN; 2^−127 is a subnormal f32)",
        E8M0, e8m0_to_f32, e8m0_to_f64;
    FLOAT4_E2M1F, "e2m1 (the low 4 bits of the code)", E2M1, e2m1_to_f32, e2m1_to_f64;
}

narrow! {
    /// f32 to e4m3fn, to nearest even, limited to ±448, infinities too (PTX
    /// `cvt.rn.satfinite.e4m3x2.f32`, and the clamp before the cast in FP8 quantizers).
    f32_to_e4m3fn_rne_saturating: f32 via narrow_f32 -> FLOAT8_E4M3FN as u8, NearestEven, Saturate;
    /// f32 to e4m3fn, to nearest even; above 464 (half a step over 448) NaN, as PyTorch's
    /// `.to(torch.float8_e4m3fn)`. 464 itself is a tie and becomes 448.
    f32_to_e4m3fn_rne_nan: f32 via narrow_f32 -> FLOAT8_E4M3FN as u8, NearestEven, Nan;
    /// f32 to e4m3fn, toward zero, limited to ±448, infinities too.
    f32_to_e4m3fn_rtz_saturating: f32 via narrow_f32 -> FLOAT8_E4M3FN as u8, TowardZero, Saturate;
    /// f64 to e4m3fn, to nearest even, rounded once, limited to ±448, infinities too.
    f64_to_e4m3fn_rne_saturating: f64 via narrow_f64 -> FLOAT8_E4M3FN as u8, NearestEven, Saturate;
    /// f64 to e4m3fn, to nearest even, rounded once; above 464 NaN.
    f64_to_e4m3fn_rne_nan: f64 via narrow_f64 -> FLOAT8_E4M3FN as u8, NearestEven, Nan;
    /// f32 to e5m2, to nearest even, limited to ±57344, infinities too (PTX
    /// `cvt.rn.satfinite.e5m2x2.f32`).
    f32_to_e5m2_rne_saturating: f32 via narrow_f32 -> FLOAT8_E5M2 as u8, NearestEven, Saturate;
    /// f32 to e5m2, to nearest even; from 61440 on infinity, as PyTorch's
    /// `.to(torch.float8_e5m2)`.
    f32_to_e5m2_rne_infinity: f32 via narrow_f32 -> FLOAT8_E5M2 as u8, NearestEven, Infinity;
    /// f32 to e5m2, toward zero, limited to ±57344, infinities too.
    f32_to_e5m2_rtz_saturating: f32 via narrow_f32 -> FLOAT8_E5M2 as u8, TowardZero, Saturate;
    /// f64 to e5m2, to nearest even, rounded once, limited to ±57344, infinities too.
    f64_to_e5m2_rne_saturating: f64 via narrow_f64 -> FLOAT8_E5M2 as u8, NearestEven, Saturate;
    /// f64 to e5m2, to nearest even, rounded once; from 61440 on infinity.
    f64_to_e5m2_rne_infinity: f64 via narrow_f64 -> FLOAT8_E5M2 as u8, NearestEven, Infinity;
    /// f32 to e2m1, to nearest even, limited to ±6; NaN becomes +6 (PTX
    /// `cvt.rn.satfinite.e2m1x2.f32`). The code is in the low 4 bits.
    f32_to_e2m1_rne_saturating: f32 via narrow_f32 -> FLOAT4_E2M1F as u8, NearestEven, Saturate;
    /// f64 to e2m1, to nearest even, rounded once, limited to ±6; NaN becomes +6.
    f64_to_e2m1_rne_saturating: f64 via narrow_f64 -> FLOAT4_E2M1F as u8, NearestEven, Saturate;
}

macro_rules! from_16_bits {
    ($($f16:ident, $bf16:ident, $f32:ident;)*) => {$(
        #[doc = concat!("IEEE half by way of f32, which holds it exactly: see [`", stringify!($f32), "`].")]
        #[inline]
        pub const fn $f16(bits: u16) -> u8 {
            $f32(f16_to_f32(bits))
        }

        #[doc = concat!("bfloat16 by way of f32, which holds it exactly: see [`", stringify!($f32), "`].")]
        #[inline]
        pub const fn $bf16(bits: u16) -> u8 {
            $f32(bf16_to_f32(bits))
        }
    )*};
}

from_16_bits! {
    f16_to_e4m3fn_rne_saturating, bf16_to_e4m3fn_rne_saturating, f32_to_e4m3fn_rne_saturating;
    f16_to_e4m3fn_rne_nan, bf16_to_e4m3fn_rne_nan, f32_to_e4m3fn_rne_nan;
    f16_to_e5m2_rne_saturating, bf16_to_e5m2_rne_saturating, f32_to_e5m2_rne_saturating;
    f16_to_e5m2_rne_infinity, bf16_to_e5m2_rne_infinity, f32_to_e5m2_rne_infinity;
    f16_to_e2m1_rne_saturating, bf16_to_e2m1_rne_saturating, f32_to_e2m1_rne_saturating;
}

/// The exact value of an f32 as f64 bits; any NaN as NaN.
const fn f32_as_f64_bits(value: f32) -> u64 {
    widen_to_f64(value.to_bits(), ScalarType::FLOAT32)
}

macro_rules! e8m0 {
    ($($(#[$doc:meta])* $f32:ident, $f64:ident, $rounding:ident, $overflow:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// The sign is dropped; zero and everything below 2^−127 becomes 2^−127 (code 0); NaN is
        /// 0xff.
        #[inline]
        pub const fn $f32(value: f32) -> u8 {
            narrow_f64_to_e8m0(f32_as_f64_bits(value), Rounding::$rounding, Overflow::$overflow)
        }

        #[doc = concat!("[`", stringify!($f32), "`] from f64, rounded once.")]
        #[inline]
        pub const fn $f64(value: f64) -> u8 {
            narrow_f64_to_e8m0(value.to_bits(), Rounding::$rounding, Overflow::$overflow)
        }
    )*};
}

e8m0! {
    /// f32 to e8m0, the nearest power of two, 1.5·2^e up to 2^(e + 1); from 1.5·2^127 on, and for
    /// infinities, NaN. PyTorch's `.to(torch.float8_e8m0fnu)` agrees except between 2^−127
    /// and 1.5·2^−127: see [`f32_to_e8m0_torch`].
    f32_to_e8m0_rne, f64_to_e8m0_rne, NearestEven, Nan;
    /// f32 to e8m0, the nearest power of two, 1.5·2^e up to 2^(e + 1), limited to 2^127.
    f32_to_e8m0_rne_saturating, f64_to_e8m0_rne_saturating, NearestEven, Saturate;
    /// f32 to e8m0, the largest power of two that is not larger: 2^⌊log2 |x|⌋, the shared scale
    /// of OCP Microscaling v1.0 §6.3. Infinities become NaN (PTX `cvt.rz.ue8m0x2.f32`).
    f32_to_e8m0_floor, f64_to_e8m0_floor, TowardZero, Nan;
    /// f32 to e8m0, the smallest power of two that is not smaller: 2^⌈log2 |x|⌉. Above 2^127, and
    /// for infinities, NaN (PTX `cvt.rp.ue8m0x2.f32`).
    f32_to_e8m0_ceil, f64_to_e8m0_ceil, AwayFromZero, Nan;
    /// f32 to e8m0, the smallest power of two that is not smaller, limited to 2^127 (PTX
    /// `cvt.rp.satfinite.ue8m0x2.f32`).
    f32_to_e8m0_ceil_saturating, f64_to_e8m0_ceil_saturating, AwayFromZero, Saturate;
}

/// f32 to e8m0 exactly as PyTorch's `.to(torch.float8_e8m0fnu)` (2.11): [`f32_to_e8m0_rne`], but a
/// subnormal f32 above 2^−127 always becomes 2^−126 (code 1), even where 2^−127 is nearer.
#[inline]
pub const fn f32_to_e8m0_torch(value: f32) -> u8 {
    let magnitude = value.to_bits() & 0x7fff_ffff;
    if magnitude > 0x40_0000 && magnitude < 0x80_0000 { 1 } else { f32_to_e8m0_rne(value) }
}
