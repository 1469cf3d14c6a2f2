//! The result of a conversion, derived without the code under test.
//!
//! A format is the ascending list of its finite values from zero up; a value's index is its code.
//! Values have at most 24 significand bits, so f64 represents them, the sum of two neighbours and
//! hence the midpoint exactly: comparing f64s decides every rounding without error.

#![allow(dead_code, reason = "each test file uses its part")]

use marlinspike::num::scalar::{Overflow, Rounding, ScalarType};

/// A format by its finite values and special codes, from its specification.
pub(crate) struct Grid {
    /// The library's type that this grid checks.
    pub(crate) kind: ScalarType,
    /// The finite values that are not negative; index = code.
    pub(crate) values: Vec<f64>,
    /// The next value if the exponent were unbounded.
    pub(crate) next: f64,
    pub(crate) infinity: Option<u32>,
    pub(crate) nan: Option<u32>,
    /// The code's sign bit; 0 for an unsigned type.
    pub(crate) sign: u32,
    /// At a midpoint, take the larger value (e8m0) instead of the even one.
    pub(crate) ties_up: bool,
}

/// 2^e, doubled or halved step by step: exact.
pub(crate) fn power(e: i32) -> f64 {
    let factor = if e < 0 { 0.5 } else { 2.0 };
    (0..e.abs()).fold(1.0, |x, _| x * factor)
}

impl Grid {
    /// `mantissa` bits, smallest normal value 2^`min_exponent`, `count` finite codes from 0.
    fn float(kind: ScalarType, mantissa: u32, min_exponent: i32, count: u32) -> Self {
        let step = power(min_exponent - mantissa as i32);
        let one = 1 << mantissa;
        let value = |code: u32| match code / one {
            0 => f64::from(code) * step,
            field => f64::from(code % one + one) * step * power(field as i32 - 1),
        };
        Self {
            kind,
            values: (0..count).map(value).collect(),
            next: value(count),
            infinity: None,
            nan: None,
            sign: 0,
            ties_up: false,
        }
    }

    pub(crate) fn f16() -> Self {
        Self {
            infinity: Some(0x7c00),
            nan: Some(0x7e00),
            sign: 0x8000,
            ..Self::float(ScalarType::FLOAT16, 10, -14, 0x7c00)
        }
    }

    pub(crate) fn bf16() -> Self {
        Self {
            infinity: Some(0x7f80),
            nan: Some(0x7fc0),
            sign: 0x8000,
            ..Self::float(ScalarType::BFLOAT16, 7, -126, 0x7f80)
        }
    }

    pub(crate) fn e4m3fn() -> Self {
        Self { nan: Some(0x7f), sign: 0x80, ..Self::float(ScalarType::FLOAT8_E4M3FN, 3, -6, 0x7f) }
    }

    pub(crate) fn e5m2() -> Self {
        Self {
            infinity: Some(0x7c),
            nan: Some(0x7f),
            sign: 0x80,
            ..Self::float(ScalarType::FLOAT8_E5M2, 2, -14, 0x7c)
        }
    }

    pub(crate) fn e2m1() -> Self {
        Self {
            kind: ScalarType::FLOAT4_E2M1F,
            values: vec![0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
            next: 8.0,
            infinity: None,
            nan: None,
            sign: 8,
            ties_up: false,
        }
    }

    pub(crate) fn e2m3() -> Self {
        Self { sign: 32, ..Self::float(ScalarType::FLOAT6_E2M3F, 3, 0, 32) }
    }

    pub(crate) fn e3m2() -> Self {
        Self { sign: 32, ..Self::float(ScalarType::FLOAT6_E3M2F, 2, -2, 32) }
    }

    pub(crate) fn e8m0() -> Self {
        Self {
            kind: ScalarType::FLOAT8_E8M0FNU,
            values: (0..255).map(|code| power(code - 127)).collect(),
            next: power(128),
            infinity: None,
            nan: Some(0xff),
            sign: 0,
            ties_up: true,
        }
    }

    pub(crate) fn all() -> Vec<Self> {
        vec![
            Self::f16(),
            Self::bf16(),
            Self::e4m3fn(),
            Self::e5m2(),
            Self::e8m0(),
            Self::e2m1(),
            Self::e2m3(),
            Self::e3m2(),
        ]
    }

    fn max(&self) -> u32 {
        self.values.len() as u32 - 1
    }

    /// The code that `value` must become.
    pub(crate) fn expected(&self, value: f64, rounding: Rounding, overflow: Overflow) -> u32 {
        let sign = if value.is_sign_negative() { self.sign } else { 0 };
        if value.is_nan() {
            return self.nan.map_or(self.max(), |nan| nan | sign);
        }
        let magnitude = value.abs();
        let beyond = match overflow {
            Overflow::Infinity => self.infinity.or(self.nan).unwrap_or(self.max()),
            Overflow::Nan => self.nan.unwrap_or(self.max()),
            Overflow::Saturate => self.max(),
        };
        let toward_zero = rounding == Rounding::TowardZero;
        if magnitude.is_infinite() || (magnitude >= self.next && !toward_zero) {
            return beyond | sign;
        }
        // The number of values that are not larger; zero only below e8m0's smallest.
        let Some(lower) = self.values.partition_point(|&v| v <= magnitude).checked_sub(1) else {
            return 0;
        };
        let (a, b) = (self.values[lower], *self.values.get(lower + 1).unwrap_or(&self.next));
        let middle = (a + b) / 2.0;
        let up = match rounding {
            Rounding::TowardZero => false,
            Rounding::AwayFromZero => magnitude > a,
            Rounding::NearestAway => magnitude >= middle,
            Rounding::NearestEven => {
                magnitude > middle || (magnitude == middle && (self.ties_up || lower % 2 == 1))
            }
        };
        let code = lower as u32 + u32::from(up);
        (if code > self.max() { beyond } else { code }) | sign
    }

    /// Calls `visit` with every rounding boundary: both neighbours' values, the midpoint, and the
    /// numbers `below` and `above` each of them, the overflow and underflow thresholds included.
    pub(crate) fn boundaries(
        &self,
        below: impl Fn(f64) -> f64,
        above: impl Fn(f64) -> f64,
        mut visit: impl FnMut(f64),
    ) {
        let mut around = |x: f64| {
            for y in [below(x), x, above(x)] {
                visit(y);
                visit(-y);
            }
        };
        for (i, &a) in self.values.iter().enumerate() {
            let b = *self.values.get(i + 1).unwrap_or(&self.next);
            around(a);
            around((a + b) / 2.0);
        }
        around(self.next);
        around(2.0 * self.next);
        around(self.values[0] / 2.0);
        for x in [f64::MIN_POSITIVE, f64::MAX, 5e-324, f64::INFINITY, f64::NAN] {
            visit(x);
            visit(-x);
        }
    }
}

pub(crate) const ROUNDINGS: [Rounding; 4] =
    [Rounding::NearestEven, Rounding::NearestAway, Rounding::TowardZero, Rounding::AwayFromZero];

pub(crate) const OVERFLOWS: [Overflow; 3] = [Overflow::Infinity, Overflow::Saturate, Overflow::Nan];
