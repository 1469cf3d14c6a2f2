//! The integer encoder of every conversion: a wide float's bits to a narrow float's code.
//!
//! Significands are shifted and compared as integers, so the result does not depend on the
//! processor's rounding mode, on flush-to-zero flags, on x87, or on a library that rounds twice
//! through f32.

use super::kind::{NanRepr, ScalarType};

/// Rounding of a value between two neighbouring values of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// The nearer; in the middle, the one whose last significand bit is 0. With a single significand
    /// bit (e8m0) both are odd, and the larger one is taken (IEEE 754-2019 §4.3.1).
    NearestEven,
    /// The nearer; in the middle, the one of larger magnitude.
    NearestAway,
    /// The one of smaller magnitude.
    TowardZero,
    /// The one of larger magnitude.
    AwayFromZero,
}

/// The result for an infinity, and for a finite value that rounds above the largest finite one.
/// [`Rounding::TowardZero`] never does so, and applies the policy to infinities only, as in IEEE 754.
///
/// With every policy NaN becomes NaN; in a format without NaN, the positive maximum, as with PTX
/// `cvt.satfinite` to e2m1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Overflow {
    /// Infinity; where the format has none, NaN; where it has neither, the maximum.
    Infinity,
    /// The largest finite value of the same sign, for infinities too.
    Saturate,
    /// NaN of the same sign; where the format has none, the maximum.
    Nan,
}

impl ScalarType {
    /// The exponent bias: 15 for f16, 127 for bf16.
    pub(super) const fn exponent_bias(self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }

    /// All exponent and mantissa bits.
    const fn magnitude_mask(self) -> u32 {
        (1 << (self.exponent as u32 + self.mantissa as u32)) - 1
    }

    const fn infinity_code(self) -> u32 {
        ((1 << self.exponent) - 1) << self.mantissa
    }

    /// The code of the largest finite value, without sign.
    #[inline]
    pub(super) const fn max_finite_code(self) -> u32 {
        match self.nan_repr {
            _ if !self.finite_values_only => self.infinity_code() - 1,
            NanRepr::None => self.magnitude_mask(),
            NanRepr::ExtdRangeMaxMin => self.magnitude_mask() - 1,
            NanRepr::Ieee754 => self.infinity_code() - 1,
        }
    }

    /// The NaN that conversions write, without sign: the quiet NaN without payload from 16 bits on,
    /// all ones in the 8-bit types (as PyTorch and CUDA do for e5m2).
    #[inline]
    const fn nan_code(self) -> Option<u32> {
        match self.nan_repr {
            NanRepr::None => None,
            NanRepr::Ieee754 if self.size_bits() > 8 => {
                Some(self.infinity_code() | 1 << (self.mantissa - 1))
            }
            NanRepr::Ieee754 | NanRepr::ExtdRangeMaxMin => Some(self.magnitude_mask()),
        }
    }

    /// The code, without sign, that `overflow` gives to a value that is too large.
    #[inline(always)]
    const fn overflow_code(self, overflow: Overflow) -> u32 {
        let max = self.max_finite_code();
        let nan = match self.nan_code() {
            Some(nan) => nan,
            None => max,
        };
        match overflow {
            Overflow::Infinity if !self.finite_values_only => self.infinity_code(),
            Overflow::Infinity | Overflow::Nan => nan,
            Overflow::Saturate => max,
        }
    }
}

macro_rules! narrowing {
    ($(#[$doc:meta])* $name:ident, $word:ty, mantissa $m:literal, bias $bias:literal) => {
        $(#[$doc])*
        ///
        /// With a constant target and policy the compiler folds everything but the shifts, and no
        /// branch depends on the value.
        #[inline(always)]
        pub(super) const fn $name(
            bits: $word,
            to: ScalarType,
            rounding: Rounding,
            overflow: Overflow,
        ) -> u32 {
            const INFINITY: $word = (1 << (<$word>::BITS - 1)) - (1 << $m);
            let negative = bits >> (<$word>::BITS - 1) != 0;
            let magnitude = bits & (<$word>::MAX >> 1);
            // The source's exponent field of the target's smallest normal value.
            let min_normal = ($bias + 1 - to.exponent_bias()) as $word;
            let field = magnitude >> $m;
            let hidden: $word = if field == 0 { 0 } else { 1 << $m };
            let significand = (magnitude & ((1 << $m) - 1)) | hidden;
            let field = if field == 0 { 1 } else { field };
            // Below the smallest normal value the spacing is constant: shift further instead.
            // Beyond $m + 2 bits only "more than zero" is left.
            let (below, above) = if field < min_normal {
                (min_normal - field, 0)
            } else {
                (0, field - min_normal)
            };
            let shift = $m - to.mantissa as $word + below;
            let shift = if shift > $m + 2 { $m + 2 } else { shift };
            let half: $word = 1 << (shift - 1);
            let increment = match rounding {
                Rounding::NearestEven => half - 1 + (significand >> shift & 1),
                Rounding::NearestAway => half,
                Rounding::TowardZero => 0,
                Rounding::AwayFromZero => half - 1 + half,
            };
            // The hidden bit, if it is left, adds one to the exponent field, and so does a carry
            // out of the mantissa.
            let code = ((significand + increment) >> shift) + (above << to.mantissa);
            let max = to.max_finite_code();
            let beyond = match rounding {
                Rounding::TowardZero if magnitude != INFINITY => max,
                _ => to.overflow_code(overflow),
            };
            let code = if code > max as $word { beyond } else { code as u32 };
            let nan = magnitude > INFINITY;
            let sign = (negative as u32) << (to.exponent + to.mantissa);
            match to.nan_code() {
                Some(code) if nan => sign | code,
                None if nan => max,
                _ => sign | code,
            }
        }
    };
}

narrowing! {
    /// The code in `to` (a signed float with fewer mantissa bits) of the f32 with these bits.
    narrow_f32, u32, mantissa 23, bias 127
}
narrowing! {
    /// The code in `to` (a signed float with fewer mantissa bits) of the f64 with these bits.
    narrow_f64, u64, mantissa 52, bias 1023
}

/// The e8m0 code of the magnitude of the f64 with these bits. The type has neither sign nor zero:
/// the sign is dropped, and everything below 2^−127 becomes 2^−127 (code 0).
#[inline(always)]
pub(super) const fn narrow_f64_to_e8m0(bits: u64, rounding: Rounding, overflow: Overflow) -> u8 {
    const INFINITY: u64 = 0x7ff << 52;
    let magnitude = bits & (u64::MAX >> 1);
    if magnitude > INFINITY {
        return 0xff;
    }
    // The only significand bit is always 1, so a tie rounds up (see `Rounding`).
    let increment = match rounding {
        Rounding::NearestEven | Rounding::NearestAway => 1 << 51,
        Rounding::TowardZero => 0,
        Rounding::AwayFromZero => (1 << 52) - 1,
    };
    let code = ((magnitude + increment) >> 52).saturating_sub(1023 - 127);
    if code <= 0xfe {
        code as u8
    } else if matches!(rounding, Rounding::TowardZero) && magnitude != INFINITY {
        0xfe
    } else {
        ScalarType::FLOAT8_E8M0FNU.overflow_code(overflow) as u8
    }
}

macro_rules! widening {
    ($(#[$doc:meta])* $name:ident, $word:ty, mantissa $m:literal, bias $bias:literal) => {
        $(#[$doc])*
        ///
        /// Exact. Infinities stay; a NaN keeps its sign and payload and becomes quiet.
        #[inline(always)]
        pub(super) const fn $name(code: u32, from: ScalarType) -> $word {
            const INFINITY: $word = (1 << (<$word>::BITS - 1)) - (1 << $m);
            let m = from.mantissa as u32;
            let magnitude = code & from.magnitude_mask();
            let sign = if from.signed {
                (code >> (from.exponent as u32 + m) & 1) as $word << (<$word>::BITS - 1)
            } else {
                0
            };
            let rebias = ($bias - from.exponent_bias()) as $word;
            let field = magnitude >> m;
            let shifted = (magnitude as $word) << ($m - m);
            let value = if magnitude > from.max_finite_code() {
                if !from.finite_values_only && magnitude == from.infinity_code() {
                    INFINITY
                } else {
                    // A quiet NaN: top exponent, top mantissa bit, and the payload.
                    INFINITY | 1 << ($m - 1) | (shifted & ((1 << $m) - 1))
                }
            } else if m == 0 {
                // e8m0: code 0 is 2^−127; other codes are the exponent field.
                if field as $word + rebias == 0 {
                    1 << ($m - 1)
                } else {
                    (field as $word + rebias) << $m
                }
            } else if field != 0 || rebias == 0 {
                shifted + (rebias << $m)
            } else if magnitude == 0 {
                0
            } else {
                // Subnormal in the source, normal in the target: shift the leading bit to the hidden
                // position.
                let up = m - (31 - magnitude.leading_zeros());
                ((magnitude as $word) << ($m - m + up) & ((1 << $m) - 1))
                    | (rebias + 1 - up as $word) << $m
            };
            sign | value
        }
    };
}

widening! {
    /// The bits of the f32 with the value of `code` in `from` (at most 8 exponent bits and 23
    /// mantissa bits).
    widen_to_f32, u32, mantissa 23, bias 127
}
widening! {
    /// The bits of the f64 with the value of `code` in `from` (any float [`ScalarType`]).
    widen_to_f64, u64, mantissa 52, bias 1023
}

impl ScalarType {
    /// The code of `value` in this type, the code in the low [`Self::size_bits`] bits.
    ///
    /// Floats follow [`Rounding`] and [`Overflow`]. e8m0 has neither sign nor zero: the sign is
    /// dropped, and values below 2^−127 become 2^−127. Integers are rounded, saturated with every
    /// policy (NaN counts as 0), and their [bias](Self::bias) is added; the code is two's complement.
    pub fn encode(self, value: f64, rounding: Rounding, overflow: Overflow) -> u32 {
        if !self.is_floating_point() {
            return self.encode_integer(value, rounding);
        }
        if self.mantissa == 0 {
            return u32::from(narrow_f64_to_e8m0(value.to_bits(), rounding, overflow));
        }
        narrow_f64(value.to_bits(), self, rounding, overflow)
    }

    /// [`Self::encode`] to nearest even, with overflow to infinity (or NaN): IEEE 754's default, and
    /// PyTorch's `.to(dtype)`.
    pub fn encode_rne(self, value: f64) -> u32 {
        let (bits, nearest, infinity) =
            (value.to_bits(), Rounding::NearestEven, Overflow::Infinity);
        // The commonest types as constants, which the encoder's shifts depend on.
        match self {
            Self::FLOAT16 => narrow_f64(bits, Self::FLOAT16, nearest, infinity),
            Self::BFLOAT16 => narrow_f64(bits, Self::BFLOAT16, nearest, infinity),
            _ => self.encode(value, nearest, infinity),
        }
    }

    /// [`Self::encode`] to nearest even, saturating, as quantizers do.
    pub fn encode_rne_saturating(self, value: f64) -> u32 {
        self.encode(value, Rounding::NearestEven, Overflow::Saturate)
    }

    fn encode_integer(self, value: f64, rounding: Rounding) -> u32 {
        let rounded = match rounding {
            Rounding::NearestEven => value.round_ties_even(),
            Rounding::NearestAway => value.round(),
            Rounding::TowardZero => value.trunc(),
            Rounding::AwayFromZero => {
                if value < 0.0 {
                    value.floor()
                } else {
                    value.ceil()
                }
            }
        };
        // `as` saturates to i64 and maps NaN to 0.
        let (min, max) = self.integer_limits();
        let stored = (rounded as i64).clamp(min, max) + i64::from(self.bias);
        stored as u32 & (u32::MAX >> (32 - self.size_bits()))
    }
}
