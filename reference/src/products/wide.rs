//! A real number held without error: the sum of any f64 values and products of two.

use crate::num::scalar::ScalarType;

/// Bits per digit. Digits are signed 64-bit words, so that 2^31 additions need no carry.
const DIGIT: u32 = 32;
/// Exponent of bit 0: below the smallest product of two f64 that the project forms. Factors are
/// at least 2^-149 · 2^-149 (f32 scales), so that products of four stay above 2^-600.
const LOWEST: i32 = -1216;
/// Digits: up to 2^1216, above the product of two f32 scales and two bf16 factors.
const DIGITS: usize = 76;

/// A fixed-point accumulator of 2432 bits (Kulisch): every f64 between 2^-1164 and 2^1150, and the
/// product of every two of them that stays in that range, is added without error.
///
/// Infinities and NaN are kept apart and follow IEEE 754.
///
/// ```
/// use marlinspike::products::Wide;
/// use marlinspike::num::scalar::ScalarType;
///
/// let mut sum = Wide::new();
/// sum.add(1e30);
/// sum.add(1.0);
/// sum.add(-1e30);
/// assert_eq!(sum.round(ScalarType::FLOAT16), 0x3c00);
/// ```
#[derive(Clone)]
pub struct Wide {
    digits: [i64; DIGITS],
    /// Digits outside `first..end` are zero.
    first: usize,
    end: usize,
    /// Additions since the last carry.
    pending: u32,
    /// Sum of what is not finite; zero when all is.
    special: f64,
}

impl Default for Wide {
    fn default() -> Self {
        Self::new()
    }
}

/// `x` = ±significand · 2^exponent.
fn decompose(x: f64) -> (bool, u64, i32) {
    let bits = x.to_bits();
    let field = (bits >> 52) as i32 & 0x7ff;
    let mantissa = bits & ((1 << 52) - 1);
    let significand = if field == 0 { mantissa } else { mantissa | 1 << 52 };
    (x.is_sign_negative(), significand, field.max(1) - 1075)
}

impl Wide {
    /// Zero.
    pub const fn new() -> Self {
        Self { digits: [0; DIGITS], first: DIGITS, end: 0, pending: 0, special: 0.0 }
    }

    /// Zero again.
    pub fn clear(&mut self) {
        if self.first < self.end {
            self.digits[self.first..self.end].fill(0);
        }
        (self.first, self.end, self.pending, self.special) = (DIGITS, 0, 0, 0.0);
    }

    /// Adds `x`.
    pub fn add(&mut self, x: f64) {
        if !x.is_finite() {
            self.special += x;
            return;
        }
        let (negative, significand, exponent) = decompose(x);
        self.add_bits(negative, u128::from(significand), exponent);
    }

    /// Adds `x · y`.
    pub fn add_product(&mut self, x: f64, y: f64) {
        if !x.is_finite() || !y.is_finite() {
            self.special += x * y;
            return;
        }
        let ((xn, xs, xe), (yn, ys, ye)) = (decompose(x), decompose(y));
        self.add_bits(xn != yn, u128::from(xs) * u128::from(ys), xe + ye);
    }

    /// Adds the number times `factor` to `into`.
    pub fn add_scaled_to(&self, factor: f64, into: &mut Self) {
        if self.special != 0.0 || !factor.is_finite() {
            into.special += self.to_f64() * factor;
            return;
        }
        let mut carried = self.clone();
        carried.carry();
        let (negative, significand, exponent) = decompose(factor);
        for i in carried.first..carried.end {
            let digit = carried.digits[i];
            let product = u128::from(digit.unsigned_abs()) * u128::from(significand);
            let exponent = exponent + i as i32 * DIGIT as i32 + LOWEST;
            into.add_bits(negative != (digit < 0), product, exponent);
        }
    }

    /// Adds ±significand · 2^exponent.
    ///
    /// # Panics
    /// Where the number lies outside the accumulator: the factors were no 32-bit scalars.
    fn add_bits(&mut self, negative: bool, significand: u128, exponent: i32) {
        if significand == 0 {
            return;
        }
        // Trailing zeros make room at the lower end.
        let zeros = significand.trailing_zeros();
        let (significand, exponent) = (significand >> zeros, exponent + zeros as i32);
        let offset = usize::try_from(exponent - LOWEST).expect("above the accumulator's last bit");
        let (first, shift) = (offset / DIGIT as usize, offset as u32 % DIGIT);
        let last = if significand >> 64 == 0 && first + 2 < DIGITS {
            // At most 64 bits, moved by at most 31: three digits.
            let moved = significand << shift;
            for (i, digit) in self.digits[first..first + 3].iter_mut().enumerate() {
                let part = i64::from((moved >> (DIGIT * i as u32)) as u32);
                *digit += if negative { -part } else { part };
            }
            first + 2
        } else {
            self.add_digits(negative, significand, first, shift)
        };
        self.first = self.first.min(first);
        self.end = self.end.max(last + 1);
        self.pending += 1;
        if self.pending == 1 << 30 {
            self.carry();
        }
    }

    /// Adds ±significand · 2^shift to the digits from `first` on. Returns the last digit that it adds to.
    fn add_digits(&mut self, negative: bool, significand: u128, first: usize, shift: u32) -> usize {
        // At most 106 bits, moved by at most 31: five digits.
        let (low, high) = (significand << shift, significand.checked_shr(128 - shift).unwrap_or(0));
        let mut last = first;
        for i in 0..5 {
            let digit = if i < 4 { (low >> (DIGIT * i)) as u32 } else { high as u32 };
            if digit != 0 {
                let at = first + i as usize;
                let digit = i64::from(digit);
                self.digits[at] += if negative { -digit } else { digit };
                last = at;
            }
        }
        last
    }

    /// Brings every digit but the top one into 0..2^32; the top one keeps the sign.
    fn carry(&mut self) {
        self.pending = 0;
        let mut i = self.first;
        while i < self.end {
            let carry = self.digits[i] >> DIGIT;
            if i + 1 == self.end {
                if carry == 0 || carry == -1 {
                    break;
                }
                self.end += 1;
            }
            self.digits[i] -= carry << DIGIT;
            self.digits[i + 1] += carry;
            i += 1;
        }
    }

    /// Sign, the 64 bits from the highest set one on, the exponent of the lowest of them, and
    /// whether a lower bit is set. `None` for zero.
    fn leading(&self) -> Option<(bool, u64, i32, bool)> {
        let mut carried = self.clone();
        carried.carry();
        let top = (carried.first..carried.end).rev().find(|&i| carried.digits[i] != 0)?;
        let negative = carried.digits[top] < 0;
        if negative {
            for i in carried.first..carried.end {
                carried.digits[i] = -carried.digits[i];
            }
            carried.carry();
        }
        let top = (carried.first..carried.end).rev().find(|&i| carried.digits[i] != 0)?;
        let digit = |i: usize, down: usize| match i.checked_sub(down) {
            Some(i) => carried.digits[i] as u128,
            None => 0,
        };
        // The top digit may hold up to 33 bits after a negation; three digits hold 97.
        let joined = digit(top, 0) << 64 | digit(top, 1) << 32 | digit(top, 2);
        let spare = joined.leading_zeros();
        let bits = (joined << spare >> 64) as u64;
        let exponent = (top as i32 - 2) * DIGIT as i32 + LOWEST + 64 - spare as i32;
        let dropped = (joined << spare) as u64 != 0;
        let below = top.saturating_sub(2);
        let lower = &carried.digits[carried.first.min(below)..below];
        Some((negative, bits, exponent, dropped || lower.iter().any(|&d| d != 0)))
    }

    /// Rounded once to `ty` (float16, bfloat16 or float32), to nearest even; overflow is infinity,
    /// an exact zero is +0.
    pub fn round(&self, ty: ScalarType) -> u32 {
        if self.special != 0.0 {
            return special_bits(ty, self.special);
        }
        let Some((negative, bits, exponent, sticky)) = self.leading() else { return 0 };
        let (exponent_bits, mantissa_bits) = exponent_and_mantissa(ty);
        let bias = (1 << (exponent_bits - 1)) - 1;
        // Weight of the last bit that the type keeps at this size.
        let top = exponent + 63;
        let last = (top - mantissa_bits).max(1 - bias - mantissa_bits);
        let drop = (last - exponent) as u32;
        let kept = bits.checked_shr(drop).unwrap_or(0);
        let half = drop.checked_sub(1).map_or(0, |d| bits.checked_shr(d).unwrap_or(0) & 1);
        let below = match drop {
            0 | 1 => false,
            d if d > 64 => bits != 0,
            d => bits & ((1u64 << (d - 1)) - 1) != 0,
        };
        let up = half == 1 && (below || sticky || kept & 1 == 1);
        let kept = kept + u64::from(up);
        // A significand that lacks the hidden bit is a subnormal; the carry of the rounding moves
        // on to the exponent by itself.
        let field = if top < 1 - bias { 0 } else { (top + bias - 1) as u64 };
        let limit = ((1u64 << exponent_bits) - 1) << mantissa_bits;
        let magnitude =
            if top > bias { limit } else { ((field << mantissa_bits) + kept).min(limit) };
        let sign = u64::from(negative) << (exponent_bits + mantissa_bits);
        (sign | magnitude) as u32
    }

    /// The nearest f64, to within one unit in the last place of the exact number; exact where
    /// 53 bits hold it and the number is not subnormal.
    pub fn to_f64(&self) -> f64 {
        if self.special != 0.0 {
            return self.special;
        }
        let Some((negative, bits, exponent, _)) = self.leading() else { return 0.0 };
        // Two steps, since the power of two alone may be out of range.
        let value = bits as f64 * power(exponent / 2) * power(exponent - exponent / 2);
        if negative { -value } else { value }
    }

    /// Whether the number is finite.
    pub fn is_finite(&self) -> bool {
        self.special == 0.0
    }

    /// Whether the number is exactly zero.
    pub fn is_zero(&self) -> bool {
        self.special == 0.0 && self.leading().is_none()
    }
}

/// 2^e, for |e| below 1022.
fn power(e: i32) -> f64 {
    f64::from_bits(((e + 1023) as u64) << 52)
}

/// Exponent and mantissa bits of an IEEE type of 16 or 32 bits.
fn exponent_and_mantissa(ty: ScalarType) -> (i32, i32) {
    match ty {
        ScalarType::FLOAT16 => (5, 10),
        ScalarType::BFLOAT16 => (8, 7),
        _ => (8, 23),
    }
}

/// Infinity or NaN as bits of `ty`.
fn special_bits(ty: ScalarType, value: f64) -> u32 {
    let (exponent_bits, mantissa_bits) = exponent_and_mantissa(ty);
    let infinity = ((1u32 << exponent_bits) - 1) << mantissa_bits;
    if value.is_nan() {
        return infinity | 1 << (mantissa_bits - 1);
    }
    infinity | u32::from(value < 0.0) << (exponent_bits + mantissa_bits)
}

impl std::fmt::Debug for Wide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Wide({:e})", self.to_f64())
    }
}
