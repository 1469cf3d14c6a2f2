//! A factor as a matrix unit decodes it.

use crate::num::scalar::{self, ScalarType};

/// A decoded factor: (−1)^negative · significand · 2^(exponent − 10) for floats, a plain integer for
/// int8.
///
/// The exponent of a subnormal is its type's minimum: the unit aligns by it and does not normalize.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operand {
    /// Significand in units of 2^−10, below 2^11; an int8's value.
    pub(super) significand: i32,
    /// Exponent of a significand of one.
    pub(super) exponent: i16,
    /// Infinity or NaN.
    pub(super) special: Special,
}

/// Infinity and NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Special {
    Finite,
    Infinity,
    Nan,
}

/// Fraction bits of a decoded significand: f16's, the widest 16-bit mantissa.
pub(super) const FRACTION: i32 = 10;

/// Exponent of a zero: below every other.
pub(super) const ZERO_EXPONENT: i16 = -4096;

impl Operand {
    /// A zero.
    pub const ZERO: Self =
        Self { significand: 0, exponent: ZERO_EXPONENT, special: Special::Finite };

    /// The operand times 2^`exponent`, as a block-scaled instruction aligns it.
    #[must_use]
    pub const fn times_power(self, exponent: i16) -> Self {
        match self.significand {
            0 => self,
            _ => Self { exponent: self.exponent + exponent, ..self },
        }
    }

    /// Decodes a float of up to 10 mantissa bits (f16, bf16, e4m3, e5m2, and tf32 in the high bits of
    /// an f32) or an int8. With `through_f16`, 8-bit floats become f16 first, which gives e4m3's
    /// subnormals the exponent of a normal number.
    pub fn decode(ty: ScalarType, code: u32, through_f16: bool) -> Self {
        if ty == ScalarType::INT8 {
            let significand = i32::from(code as u8 as i8);
            return Self { significand, exponent: 0, special: Special::Finite };
        }
        if through_f16 && ty.size_bits() == 8 {
            // Exact: f16 holds every value of both 8-bit floats.
            let half = scalar::f64_to_f16_rne(ty.to_f64(code));
            return Self::decode(ScalarType::FLOAT16, half.into(), false);
        }
        let (exponent_bits, mantissa_bits) = match ty {
            ScalarType::FLOAT16 => (5, 10),
            ScalarType::BFLOAT16 => (8, 7),
            ScalarType::FLOAT8_E4M3FN => (4, 3),
            ScalarType::FLOAT8_E5M2 => (5, 2),
            // tf32: the low 13 bits are not read.
            ScalarType::FLOAT32 => (8, 10),
            _ => return Self { special: Special::Nan, ..Self::ZERO },
        };
        let code = if ty == ScalarType::FLOAT32 { code >> 13 } else { code };
        let field = (code >> mantissa_bits) as i32 & ((1 << exponent_bits) - 1);
        let mantissa = code as i32 & ((1 << mantissa_bits) - 1);
        let negative = code >> (exponent_bits + mantissa_bits) & 1 != 0;
        let top = field == (1 << exponent_bits) - 1;
        let special = match (ty, top) {
            (ScalarType::FLOAT8_E4M3FN, _) if top && mantissa == 7 => Special::Nan,
            (ScalarType::FLOAT8_E4M3FN, _) | (_, false) => Special::Finite,
            (_, true) if mantissa == 0 => Special::Infinity,
            (_, true) => Special::Nan,
        };
        let bias = (1 << (exponent_bits - 1)) - 1;
        let hidden = if field == 0 { 0 } else { 1 << mantissa_bits };
        let magnitude = (mantissa | hidden) << (FRACTION - mantissa_bits);
        Self {
            significand: if negative { -magnitude } else { magnitude },
            exponent: match magnitude {
                0 => ZERO_EXPONENT,
                _ => (field.max(1) - bias) as i16,
            },
            special,
        }
    }
}
