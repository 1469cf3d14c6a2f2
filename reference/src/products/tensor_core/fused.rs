//! The fused sum.
//!
//! Every product is significand × 2^exponent: the exponent is the sum of the factors' exponents, the
//! significand their exact product, in [0, 4). E is the largest exponent among the products and the
//! accumulator, and F the unit's fraction bits. Every term is truncated toward zero to a multiple of
//! 2^(E − F), the truncated terms are added exactly, and the sum is rounded once. Zeros have no
//! exponent, and E is at least −133.

use super::operand::{FRACTION, Operand, Special, ZERO_EXPONENT};
use super::units::Accumulator;
use super::{NAN_F16, NAN_F32};
use crate::products::rows::two_to;

/// Fraction bits of a product's significand.
const PRODUCT_FRACTION: i32 = 2 * FRACTION;

/// An accumulator in parts: signed significand, exponent, fraction bits of the significand.
struct Parts {
    significand: i64,
    exponent: i32,
    fraction: i32,
    special: Special,
    negative: bool,
}

impl Parts {
    fn new(bits: u32, accumulator: Accumulator) -> Self {
        let (exponent_bits, fraction, bits) = match accumulator {
            Accumulator::F16 => (5, 10, bits & 0xffff),
            _ => (8, 23, bits),
        };
        let field = (bits >> fraction) as i32 & ((1 << exponent_bits) - 1);
        let mantissa = i64::from(bits) & ((1 << fraction) - 1);
        let negative = bits >> (exponent_bits + fraction) & 1 != 0;
        let special = match (field == (1 << exponent_bits) - 1, mantissa) {
            (false, _) => Special::Finite,
            (true, 0) => Special::Infinity,
            (true, _) => Special::Nan,
        };
        let magnitude = if field == 0 { mantissa } else { mantissa | 1 << fraction };
        let bias = (1 << (exponent_bits - 1)) - 1;
        Self {
            significand: if negative { -magnitude } else { magnitude },
            exponent: if magnitude == 0 { ZERO_EXPONENT.into() } else { field.max(1) - bias },
            fraction,
            special,
            negative,
        }
    }
}

/// Moves a signed significand by `shift` bits to the left, truncating toward zero.
fn shift(significand: i64, shift: i32) -> i64 {
    if shift >= 0 {
        significand << shift
    } else {
        let magnitude = significand.unsigned_abs() >> (-shift).min(63);
        if significand < 0 { -(magnitude as i64) } else { magnitude as i64 }
    }
}

/// Smallest E: measured on Hopper with bf16 and tf32, whose products reach it.
const LEAST_EXPONENT: i32 = -133;

/// Largest number of products in one sum.
pub(super) const MAX_TERMS: usize = 32;

/// One fused sum of the products `a[k]·b[k]`, k in `order`, and the accumulator `c`; returns the
/// accumulator's bits. At most [`MAX_TERMS`] products and F at most 25.
pub(super) fn sum(
    a: &[Operand],
    b: &[Operand],
    order: impl Iterator<Item = usize> + Clone,
    c: u32,
    accumulator: Accumulator,
    fraction_bits: i32,
) -> u32 {
    let c = Parts::new(c, accumulator);
    // Fixed arrays and plain loops, so that the compiler vectorizes them. A product of significands
    // is below 2^22.
    let mut products = [0i32; MAX_TERMS];
    let mut exponents = [i32::from(ZERO_EXPONENT); MAX_TERMS];
    let mut terms = 0;
    let mut special = c.special != Special::Finite;
    for k in order.clone() {
        let (a, b) = (&a[k], &b[k]);
        products[terms] = a.significand * b.significand;
        exponents[terms] = i32::from(a.exponent) + i32::from(b.exponent);
        special |= a.special != Special::Finite || b.special != Special::Finite;
        terms += 1;
    }
    if special {
        return special_sum(order.map(|k| (a[k], b[k])), &c, accumulator);
    }
    let (products, exponents) = (&products[..terms], &exponents[..terms]);
    // A zero factor gives an exponent below every real one, whatever the other factor is.
    let largest = exponents.iter().fold(c.exponent.max(LEAST_EXPONENT), |e, &x| e.max(x));
    let unit = largest - fraction_bits;
    let mut total = 0i64;
    for (&product, &exponent) in products.iter().zip(exponents) {
        // At most 2^22 · 2^5: an aligned term fits 32 bits.
        let by = exponent - PRODUCT_FRACTION - unit;
        let magnitude = product.unsigned_abs();
        let aligned = if by >= 0 { magnitude << (by & 31) } else { magnitude >> (-by).min(31) };
        total += i64::from(if product < 0 { -(aligned as i32) } else { aligned as i32 });
    }
    total += shift(c.significand, c.exponent - c.fraction - unit);
    round(total, unit, accumulator)
}

/// Infinities and NaN follow IEEE 754: infinity times zero and opposite infinities are NaN.
fn special_sum(
    terms: impl Iterator<Item = (Operand, Operand)>,
    c: &Parts,
    accumulator: Accumulator,
) -> u32 {
    let mut nan = c.special == Special::Nan;
    let infinite = c.special == Special::Infinity;
    let (mut positive, mut negative) = (infinite && !c.negative, infinite && c.negative);
    for (a, b) in terms {
        nan |= a.special == Special::Nan || b.special == Special::Nan;
        if a.special == Special::Infinity || b.special == Special::Infinity {
            // An infinity's significand is its sign; a finite zero's is zero.
            match a.significand.signum() * b.significand.signum() {
                0 => nan = true,
                1 => positive = true,
                _ => negative = true,
            }
        }
    }
    let (nan_bits, infinity, sign) = match accumulator {
        Accumulator::F16 => (u32::from(NAN_F16), 0x7c00, 0x8000),
        _ => (NAN_F32, 0x7f80_0000, 0x8000_0000),
    };
    match (nan || positive && negative, negative) {
        (true, _) => nan_bits,
        (false, true) => infinity | sign,
        (false, false) => infinity,
    }
}

/// `total · 2^unit` in the accumulator's type.
fn round(total: i64, unit: i32, accumulator: Accumulator) -> u32 {
    match accumulator {
        Accumulator::F32 { kept_bits } => truncate_f32(total, unit, kept_bits),
        Accumulator::F16 => nearest_f16(total, unit),
        Accumulator::S32 => total as u32,
    }
}

/// f32 by truncation to `kept_bits` significant bits. Overflow is infinity; a result truncated to
/// zero is +0.
pub(super) fn truncate_f32(total: i64, unit: i32, kept_bits: u32) -> u32 {
    let magnitude = total.unsigned_abs();
    if magnitude == 0 {
        return 0;
    }
    let sign = if total < 0 { 0x8000_0000 } else { 0 };
    let top = 63 - magnitude.leading_zeros() as i32;
    let exponent = unit + top;
    if exponent > 127 {
        return sign | 0x7f80_0000;
    }
    // Weight of the last kept bit, at least that of f32's smallest subnormal.
    let last = (exponent - (kept_bits as i32 - 1)).max(-149);
    let drop = last - unit;
    let kept = if drop >= 0 { magnitude >> drop.min(63) } else { magnitude << -drop };
    if kept == 0 {
        return 0;
    }
    // `kept · 2^last` in f32's own scale.
    let scale = (exponent - 23).max(-149);
    let mantissa = (kept << (last - scale)) as u32;
    let field = if exponent < -126 { 0 } else { (exponent + 126) as u32 };
    // The hidden bit adds the last one to the exponent field.
    sign | (field << 23).wrapping_add(mantissa)
}

/// f16 to nearest even. Overflow is infinity; a result that rounds to zero is +0.
fn nearest_f16(total: i64, unit: i32) -> u32 {
    // The sum has at most 36 bits, so it is exact in f64 and is rounded once, to f16.
    let value = total as f64 * two_to(unit);
    match crate::num::scalar::f64_to_f16_rne(value) {
        0x8000 => 0,
        bits => bits.into(),
    }
}

/// int8 products: exact integers modulo 2^32.
pub(super) fn integer(a: &[Operand], b: &[Operand], c: u32) -> u32 {
    let products = a.iter().zip(b).map(|(a, b)| a.significand * b.significand);
    products.fold(c, |c, p| c.wrapping_add(p as u32))
}
