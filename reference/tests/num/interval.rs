//! Intervals from their definition: widths of roundings, products, and how far a value is outside.

use marlinspike::num::interval::{Bound, FLUSH, Interval, U, WIDEN};
use marlinspike::num::scalar::ScalarType;

const INFINITY: f64 = f64::INFINITY;
const MAX: f64 = f32::MAX as f64;
/// Half of it is the error of a rounding to a subnormal f32.
const SUBNORMAL: f64 = f32::from_bits(1) as f64;

fn of(lo: f64, hi: f64) -> Interval {
    Interval { lo, hi }
}

/// An end that was computed in f64: within 2^-50 of its distance and of its size.
fn expect_end(found: f64, stated: f64, moved: f64) {
    let error = (found - stated).abs();
    let most = 2f64.powi(-50) * stated.abs() + moved * 1e-9;
    assert!(found == stated || error <= most, "{found:e}, expected {stated:e}");
}

#[test]
fn widths_are_the_stated_errors() {
    for relative in [0.0, U, 6.0 * U, 0.25] {
        for x in [1.0, -1.0, 3.7e-5, -1e20, 2e30, 1e-30] {
            let error = f64::abs(x) * (relative + WIDEN);
            let around = Interval::around(x, relative);
            expect_end(around.lo, x - error - FLUSH, error + FLUSH);
            expect_end(around.hi, x + error + FLUSH, error + FLUSH);
            let rounded = Interval::point(x).after_f32(relative);
            expect_end(rounded.lo, x - error - SUBNORMAL, error);
            expect_end(rounded.hi, x + error + SUBNORMAL, error);
            let scaled = Interval::point(x.abs()).scaled(relative);
            expect_end(scaled.lo, (x.abs() - error - FLUSH).max(0.0), error + FLUSH);
            expect_end(scaled.hi, x.abs() + error + FLUSH, error + FLUSH);
        }
    }
    // Ends have errors of their own: the lower and the upper one.
    let wide = of(-3.0, 5.0).after_f32(0.5);
    expect_end(wide.lo, -4.5 - 3.0 * WIDEN - SUBNORMAL, 1.5);
    expect_end(wide.hi, 7.5 + 5.0 * WIDEN + SUBNORMAL, 2.5);
    assert_eq!(of(-2.0, 3.0).at_least_zero(), of(0.0, 3.0));
    assert_eq!(of(1.0, 3.0).at_least_zero(), of(1.0, 3.0));
}

/// Results below 2^-126 may be zero, those above the largest f32 infinite; zeros and infinities stay.
#[test]
fn f32_flushes_and_overflows() {
    assert_eq!(of(0.0, 0.0).after_f32(0.5), of(0.0, 0.0));
    assert_eq!(of(-INFINITY, INFINITY).after_f32(0.5), of(-INFINITY, INFINITY));
    let least = FLUSH / 2.0;
    assert_eq!(of(least, 1.0).after_f32(0.0).lo, 0.0);
    assert_eq!(of(-1.0, -least).after_f32(0.0).hi, 0.0);
    assert!(of(4.0 * FLUSH, 1.0).after_f32(0.0).lo > 3.9 * FLUSH);
    assert!(of(-1.0, -4.0 * FLUSH).after_f32(0.0).hi < -3.9 * FLUSH);
    // A tiny number of the other sign is not one that f32 flushes.
    assert!(of(-least, 1.0).after_f32(0.0).lo < 0.0 && of(-1.0, least).after_f32(0.0).hi > 0.0);
    assert_eq!(of(-MAX, MAX).after_f32(0.0), of(-INFINITY, INFINITY));
    let below = MAX * (1.0 - 4.0 * U);
    let near = of(-below, below).after_f32(U);
    assert!(near.lo.is_finite() && near.hi.is_finite(), "{near:?}");
    let one_side = of(1.0, MAX).after_f32(U);
    assert!(one_side.lo.is_finite() && one_side.hi == INFINITY);
}

/// All products of numbers of two intervals, by sampling; NaN exactly if 0 · ∞ is among them.
#[test]
fn products_contain_every_product() {
    let ends = [-INFINITY, -3.0, -0.5, 0.0, 0.25, 2.0, INFINITY];
    let all: Vec<Interval> = (0..ends.len())
        .flat_map(|i| (i..ends.len()).map(move |j| of(ends[i], ends[j])))
        .filter(|i| !(i.is_point() && i.lo.is_infinite()))
        .chain([Interval::point(INFINITY), Interval::point(-INFINITY)])
        .collect();
    let samples = |i: Interval| ends.into_iter().filter(move |&x| i.contains(x));
    for &a in &all {
        for &b in &all {
            let (product, nan) = a.times(b);
            let each: Vec<f64> = samples(a).flat_map(|x| samples(b).map(move |y| x * y)).collect();
            assert_eq!(nan, each.iter().any(|p| p.is_nan()), "{a:?} {b:?}");
            let numbers = || each.iter().copied().filter(|p| !p.is_nan());
            // The products of ends are samples, so the smallest interval is known.
            let lo = numbers().fold(INFINITY, f64::min);
            let hi = numbers().fold(-INFINITY, f64::max);
            if lo.is_finite() && hi.is_finite() {
                assert_eq!(product, of(lo, hi), "{a:?} {b:?}");
            } else {
                assert!(product.lo <= lo && product.hi >= hi, "{a:?} {b:?}: {product:?}");
            }
        }
    }
}

/// A rounding takes the ends outward by 2^-40 first: a tie may go either way.
#[test]
fn roundings_of_ends() {
    let ulp = 2f64.powi(-10);
    let tie = Interval::point(1.0 + ulp / 2.0).rounded(ScalarType::FLOAT16);
    assert_eq!(tie, of(1.0, 1.0 + ulp));
    let negative = Interval::point(-1.0 - ulp / 2.0).rounded(ScalarType::FLOAT16);
    assert_eq!(negative, of(-1.0 - ulp, -1.0));
    let odd = Interval::point(1.0 + 1.5 * ulp).rounded(ScalarType::FLOAT16);
    assert_eq!(odd, of(1.0 + ulp, 1.0 + 2.0 * ulp));
    assert_eq!(Interval::point(1.0 + ulp / 2.0).rounded_once(ScalarType::FLOAT16), of(1.0, 1.0));
    // Not further than that.
    let off = 1.0 + ulp / 2.0 + 2f64.powi(-38);
    assert_eq!(Interval::point(off).rounded(ScalarType::BFLOAT16), of(1.0, 1.0));
    let infinite = of(-INFINITY, INFINITY).rounded(ScalarType::BFLOAT16);
    assert_eq!(infinite, of(-INFINITY, INFINITY));
}

#[test]
fn ratios_are_errors_over_their_side_of_the_interval() {
    let ratio = |i: Interval, exact: f64, found: f32| i.ratio(exact, found);
    let side = of(-3.0, 2.0);
    // Exact value 1: 1 above it, 4 below it.
    assert_eq!(ratio(side, 1.0, 1.0), 0.0);
    assert_eq!(ratio(side, 1.0, 1.5), 0.5);
    assert_eq!(ratio(side, 1.0, 2.0), 1.0);
    assert_eq!(ratio(side, 1.0, 3.0), 2.0);
    assert_eq!(ratio(side, 1.0, -1.0), 0.5);
    assert_eq!(ratio(side, 1.0, -3.0), 1.0);
    assert_eq!(ratio(side, 1.0, -7.0), 2.0);
    assert_eq!(ratio(side, 1.0, f32::NAN), INFINITY);
    assert_eq!(ratio(side, 1.0, f32::INFINITY), INFINITY);
    // The least step outside is above 1, however wide the interval is.
    let end = of(0.0, 1e30);
    let outside = f32::from_bits((1e30f32).to_bits() + 1);
    assert!(!end.contains(outside.into()) && ratio(end, 0.5e30, outside) > 1.0);
    let next = f32::from_bits(1.0f32.to_bits() + 1);
    assert!(ratio(of(1.0 - 1e300, 1.0), 1.0 - 1e300, next) > 1.0);
    // Infinite ends: on them is 1, before them 0; nothing is outside.
    let open = of(-INFINITY, INFINITY);
    assert_eq!(ratio(open, 1.0, f32::INFINITY), 1.0);
    assert_eq!(ratio(open, 1.0, f32::NEG_INFINITY), 1.0);
    assert_eq!(ratio(open, 1.0, 5.0), 0.0);
    // An exact value beyond the interval, as where every implementation overflows or rounds up.
    assert_eq!(ratio(Interval::point(2.0), 1.0, 2.0), 1.0);
    assert_eq!(ratio(of(2.0, 3.0), 1.0, 2.0), 0.5);
    assert_eq!(ratio(of(2.0, 3.0), 4.0, 3.0), 0.5);
    assert_eq!(ratio(of(2.0, 3.0), 4.0, 5.0), INFINITY);
    assert_eq!(ratio(of(2.0, 3.0), 1.0, 0.5), INFINITY);
    assert_eq!(ratio(Interval::point(1.0), 1.0, next), INFINITY);
    assert_eq!(ratio(Interval::point(1.0), 1.0, 0.5), INFINITY);
}

#[test]
fn bounds_judge_numbers_and_nan() {
    let bound = Bound { exact: 1.0, interval: of(0.0, 3.0), nan: false };
    assert_eq!(bound.ratio(2.0), 0.5);
    assert!(bound.allows(3.0) && !bound.allows(3.0000002) && !bound.allows(f32::NAN));
    assert!(Bound { nan: true, ..bound }.allows(f32::NAN));
    assert!(Bound::NAN.allows(f32::NAN) && !Bound::NAN.allows(0.0));
    // Without an exact value: inside or not.
    let unknown = Bound { exact: f64::NAN, interval: of(0.0, 3.0), nan: true };
    assert_eq!((unknown.ratio(1.0), unknown.ratio(4.0)), (0.0, INFINITY));
    let nan = Bound::exactly(f64::NAN);
    assert!(nan.exact.is_nan() && nan.interval.is_empty() && nan.nan);
    assert!(Bound::exactly(2.0).allows(2.0) && !Bound::exactly(2.0).allows(2.0000002));
}
