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

/// 2^n for −126 ≤ n ≤ 127.
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
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
pub fn exp(x: f32) -> f32 {
    if x > 89.0 {
        return f32::INFINITY;
    }
    if x < -104.0 {
        return 0.0;
    }
    if x.is_nan() {
        return x;
    }
    let n = (x * LOG2_E).round_ties_even();
    let r = (-n).mul_add(LN2_HI, x);
    let r = (-n).mul_add(LN2_LO, r);
    let mut p = SERIES[0];
    for c in &SERIES[1..] {
        p = p.mul_add(r, *c);
    }
    let n = n as i32;
    let first = n >> 1;
    p * power_of_two(first) * power_of_two(n - first)
}

/// 1 / (1 + e^−x), with [`exp`], one addition and one division.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}
