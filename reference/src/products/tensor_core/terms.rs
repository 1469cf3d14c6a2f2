//! The numbers of a panel's sums, and one sum of them by its definition.

use super::fused;
use super::operand::{FRACTION, Operand, Special, ZERO_EXPONENT};
use super::units::Accumulator;
use crate::products::rows::two_to;

/// Columns of a `Panel`.
pub const LANES: usize = 16;

/// One value per column.
pub type Lanes = [u32; LANES];

/// A factor for the vector loops: its value, and the exponent that the unit aligns by (a subnormal's
/// value does not determine it).
#[derive(Debug, Clone, Copy)]
pub(super) struct Factor {
    pub(super) value: f32,
    pub(super) exponent: i32,
}

impl Factor {
    pub(super) fn new(x: Operand) -> Self {
        let magnitude = match x.special {
            // 11 bits of significand, and an exponent of f32's range: exact.
            Special::Finite => f64::from(x.significand) * two_to(i32::from(x.exponent) - FRACTION),
            Special::Infinity => f64::from(x.significand.signum()) * f64::INFINITY,
            Special::Nan => f64::NAN,
        };
        Self { value: magnitude as f32, exponent: x.exponent.into() }
    }

    /// The factor of a code whose value is `value` and whose type's least exponent is `least`.
    #[inline]
    pub(super) fn widened(value: f32, least: i32) -> Self {
        let exponent = ((value.to_bits() >> 23 & 0xff) as i32 - 127).max(least);
        Self { value, exponent: if value == 0.0 { ZERO_EXPONENT.into() } else { exponent } }
    }

    fn operand(value: f32, exponent: i32) -> Operand {
        let special = match (value.is_nan(), value.is_infinite()) {
            (true, _) => Special::Nan,
            (_, true) => Special::Infinity,
            _ => Special::Finite,
        };
        let significand = match special {
            Special::Finite if exponent > ZERO_EXPONENT.into() => {
                (f64::from(value) * two_to(FRACTION - exponent)) as i32
            }
            Special::Infinity => value.signum() as i32,
            _ => 0,
        };
        Operand { significand, exponent: exponent as i16, special }
    }
}

/// Parameters of a unit's float sums, computed once per product.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sums {
    /// Terms of one sum.
    pub(super) terms: usize,
    /// F.
    pub(super) fraction_bits: i32,
    /// Significant bits kept of an f32 result.
    pub(super) kept_bits: u32,
}

/// The slices of one sum.
#[derive(Clone, Copy)]
pub(super) struct Terms<'t> {
    pub(super) a: &'t [f32],
    pub(super) a_exponents: &'t [i32],
    pub(super) b: &'t [[f32; LANES]],
    pub(super) b_exponents: &'t [[i32; LANES]],
}

impl<'t> Terms<'t> {
    #[inline(always)]
    pub(super) fn part(self, start: usize, len: usize) -> Self {
        Self {
            a: &self.a[start..start + len],
            a_exponents: &self.a_exponents[start..start + len],
            b: &self.b[start..start + len],
            b_exponents: &self.b_exponents[start..start + len],
        }
    }

    /// The sum by definition, lane by lane, for inputs that the vector loop cannot handle.
    #[cold]
    #[inline(never)]
    pub(super) fn defined(self, accumulator: Accumulator, fraction_bits: i32, c: &mut Lanes) {
        let n = self.a.len();
        let mut a = [Operand::ZERO; fused::MAX_TERMS];
        let mut b = a;
        for (a, (&value, &exponent)) in a.iter_mut().zip(self.a.iter().zip(self.a_exponents)) {
            *a = Factor::operand(value, exponent);
        }
        for (l, c) in c.iter_mut().enumerate() {
            let column = self.b.iter().zip(self.b_exponents);
            for (b, (values, exponents)) in b.iter_mut().zip(column) {
                *b = Factor::operand(values[l], exponents[l]);
            }
            *c = fused::sum(&a[..n], &b[..n], 0..n, *c, accumulator, fraction_bits);
        }
    }
}
