//! The 16-bit floats by their type at run time.

use super::{ScalarType, convert::*};

/// `value` rounded to `ty` and back.
pub(crate) fn round_to(ty: ScalarType, value: f32) -> f32 {
    match ty {
        ScalarType::FLOAT16 => f16_to_f32(f32_to_f16_rne(value)),
        ScalarType::BFLOAT16 => bf16_to_f32(f32_to_bf16_rne(value)),
        _ => value,
    }
}

/// The value of a FLOAT16's or BFLOAT16's bits.
pub(crate) fn widen(ty: ScalarType, bits: u16) -> f32 {
    if ty == ScalarType::FLOAT16 { f16_to_f32(bits) } else { bf16_to_f32(bits) }
}

/// `value` rounded to FLOAT16 or BFLOAT16, to nearest even. Every NaN is 0x7FFF, as a GPU's conversion
/// gives it and as schedules have it: the sign of a NaN that an operation makes is not the same on
/// every processor.
pub(crate) fn narrow(ty: ScalarType, value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    if ty == ScalarType::FLOAT16 { f32_to_f16_rne(value) } else { f32_to_bf16_rne(value) }
}
