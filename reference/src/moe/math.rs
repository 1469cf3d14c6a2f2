//! Transcendental functions as sequences of IEEE-754 binary32 operations.
//!
//! Every step is an addition, a multiplication, a division, a fused multiply-add or a rounding to
//! an integral value, each correctly rounded to nearest even: the same bits on any processor.

/// log₂ e, to nearest.
const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2's leading bits: eleven trailing zeros make `n · LN2_HI` exact for |n| < 2^11.
const LN2_HI: f32 = f32::from_bits(0x3f31_7000);
/// ln 2 − [`LN2_HI`], to nearest.
const LN2_LO: f32 = f32::from_bits(0x3805_fdf4);
/// 1/7!, 1/6!, …, 1/1!, 1/0!, each to nearest. The series' remainder on |r| ≤ 0.347 is below 2^-27.
const SERIES: [f32; 8] =
    [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// Adding it moves an integer below 2^22 in magnitude to the lowest bits.
const MAGIC: f32 = 12_582_912.0;

/// An integral value below 2^22 in magnitude as an integer; any other as some integer. A cast saturates, which
/// compilers do not vectorize.
#[inline(always)]
fn integer(x: f32) -> i32 {
    (x + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits()) as i32
}

/// 2^n for −126 ≤ n ≤ 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// e^x, within one unit in the last place.
///
/// 1. n = x · log₂e, rounded to integral, ties to even.
/// 2. r = fma(−n, `LN2_HI`, x); r = fma(−n, `LN2_LO`, r).
/// 3. p = 1/7!; then p = fma(p, r, 1/i!) for i = 6 down to 0.
/// 4. p · 2^⌊n/2⌋ · 2^(n − ⌊n/2⌋): the first product is exact, the second rounds where the result
///    overflows or is subnormal.
///
/// Above 89 the result is infinite, below −104 zero; NaN gives NaN.
///
/// ```
/// use marlinspike::moe::math::exp;
/// assert_eq!(exp(0.0), 1.0);
/// assert_eq!(exp(1.0), std::f32::consts::E);
/// ```
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Uses selects instead of early returns, so loops over it vectorize.
    let inside = if x > 89.0 { 89.0 } else { x };
    let inside = if inside < -104.0 { -104.0 } else { inside };
    let n = (inside * LOG2_E).round_ties_even();
    let r = (-n).mul_add(LN2_HI, inside);
    let r = (-n).mul_add(LN2_LO, r);
    let mut p = SERIES[0];
    for c in &SERIES[1..] {
        p = p.mul_add(r, *c);
    }
    let n = integer(n);
    let first = n >> 1;
    let value = p * power_of_two(first) * power_of_two(n.wrapping_sub(first));
    let value = if x > 89.0 { f32::INFINITY } else { value };
    let value = if x < -104.0 { 0.0 } else { value };
    if x.is_nan() { x } else { value }
}

/// 1 / (1 + e^−x), with [`exp`], one addition and one division.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// (tanh(x)/x − 1)/x² on x² ≤ 0.504 as a polynomial of x², highest power first: minimax to 2^-30
/// of tanh(x)/x, coefficients to nearest.
const TANH: [f32; 6] = [
    f32::from_bits(0x3af5_1453),
    f32::from_bits(0xbc00_9abc),
    f32::from_bits(0x3cb0_9390),
    f32::from_bits(0xbd5c_d88c),
    f32::from_bits(0x3e08_8788),
    f32::from_bits(0xbeaa_aaa7),
];

/// Horner's rule, one fused multiply-add for each coefficient after the first.
fn polynomial(coefficients: &[f32], x: f32) -> f32 {
    let mut p = coefficients[0];
    for c in &coefficients[1..] {
        p = p.mul_add(x, *c);
    }
    p
}

/// tanh x, within two units in the last place.
///
/// With a = |x|: for a < 0.7, s = a · a, p = a polynomial of degree 5 by Horner's rule in s, then
/// fma(p · s, a, a). Else 1 − 2 / (e^(a + a) + 1), with [`exp`]. The sign is x's, so ±0 gives ±0.
/// NaN gives NaN.
///
/// ```
/// use marlinspike::moe::math::tanh;
/// assert_eq!(tanh(f32::NEG_INFINITY), -1.0);
/// ```
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let magnitude = if a < 0.7 {
        let s = a * a;
        (polynomial(&TANH, s) * s).mul_add(a, a)
    } else {
        1.0 - 2.0 / (exp(a + a) + 1.0)
    };
    magnitude.copysign(x)
}

/// erf(x)/x − 1 on x² ≤ 0.757 as a polynomial of x², highest power first: minimax to 2^-32.
const ERF: [f32; 7] = [
    f32::from_bits(0x38b7_1955),
    f32::from_bits(0xba57_9101),
    f32::from_bits(0x3baa_a5a9),
    f32::from_bits(0xbcdc_0d9b),
    f32::from_bits(0x3de7_174b),
    f32::from_bits(0xbec0_93a3),
    f32::from_bits(0x3e03_75d4),
];
/// ln(erfc x) on 0.86 ≤ x ≤ 4 as a polynomial of x, highest power first: minimax to 2^-34 of erf.
const LN_ERFC: [f32; 9] = [
    -f32::from_bits(0x35a2_59f6),
    -f32::from_bits(0x36a2_1ec0),
    -f32::from_bits(0xb9b2_b3e5),
    -f32::from_bits(0x3b7d_9a8f),
    -f32::from_bits(0xbcc8_ea28),
    -f32::from_bits(0x3ddc_418d),
    -f32::from_bits(0x3f22_475e),
    -f32::from_bits(0x3f90_8c3e),
    -f32::from_bits(0xb90a_5602),
];

/// erf x, within two units in the last place.
///
/// With a = |x|: for a < 0.87, s = a · a, p = a polynomial of degree 6 by Horner's rule in s, then
/// fma(p, a, a). Else 1 − e^q with [`exp`], where q is a polynomial of degree 8 in the smaller of
/// a and 4 (from 3.92 on the result is 1). The sign is x's, so ±0 gives ±0. NaN gives NaN.
///
/// ```
/// use marlinspike::moe::math::erf;
/// assert_eq!(erf(f32::INFINITY), 1.0);
/// ```
pub fn erf(x: f32) -> f32 {
    let a = x.abs();
    let magnitude = if a < 0.87 {
        polynomial(&ERF, a * a).mul_add(a, a)
    } else {
        // Not `min`, which would drop a NaN.
        let a = if a > 4.0 { 4.0 } else { a };
        1.0 - exp(polynomial(&LN_ERFC, a))
    };
    magnitude.copysign(x)
}
