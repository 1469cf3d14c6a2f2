//! The power of intervals, compared with an enumeration of all numbers of a type.

use super::*;

const TY: ScalarType = ScalarType::BFLOAT16;

/// Intervals of `radius` around numbers of the type.
fn around(values: &[f64], radius: f64) -> Vec<Accepted> {
    let one = |&x: &f64| {
        let (lo, hi) = (round_once(TY, x - radius), round_once(TY, x + radius));
        Accepted { exact: x, lo, hi, nan: false }
    };
    values.iter().map(one).collect()
}

/// All numbers of the type from `lo` to `hi`.
fn numbers(lo: f64, hi: f64) -> impl Iterator<Item = f64> {
    (0..=0xffffu32).map(|b| TY.to_f64(b)).filter(move |x| (lo..=hi).contains(x))
}

/// Whether every right answer times 1 ± e is rejected, by enumeration.
fn rejects_factor(elements: &[Accepted], factor: f64) -> bool {
    elements.iter().any(|e| numbers(e.lo, e.hi).all(|y| !e.accepts(round_once(TY, y * factor))))
}

#[test]
fn the_uniform_error_is_that_of_all_right_answers() {
    for (values, radius) in [
        (&[1.0, -3.0, 100.0, 0.25][..], 0.0),
        (&[1.0, -3.0, 100.0, 0.25], 0.02),
        (&[5.0, 7.5, -8.0], 0.7),
        (&[0.01, 0.02], 0.02),
    ] {
        let elements = around(values, radius);
        let power = Power::of(&elements, values.len(), TY);
        match power.uniform_error {
            Some(e) => {
                for factor in [1.0 + e * 1.0001, 1.0 - e * 1.0001] {
                    assert!(rejects_factor(&elements, factor), "{values:?} {radius} {e}");
                }
                // No more than half a unit in the last place too large.
                let below = (e - 0.005).max(0.0);
                let both = [1.0 + below, 1.0 - below].map(|f| rejects_factor(&elements, f));
                assert!(both.contains(&false), "{values:?} {radius} {e}");
            }
            None => assert!(!rejects_factor(&elements, 1.5), "{values:?} {radius}"),
        }
    }
}

#[test]
fn wide_intervals_reject_nothing() {
    let values = [1.0, 2.0, -3.0, 4.0];
    let narrow = Power::of(&around(&values, 0.1), 4, TY).rejects;
    let yes = Some(true);
    assert_eq!(
        (narrow.zeros, narrow.negated, narrow.halved, narrow.columns_permuted),
        (yes, yes, yes, yes)
    );
    let wide = Power::of(&around(&values, 50.0), 4, TY);
    assert_eq!(wide.gaps(), ["zeros", "-y", "y/2", "permuted columns"]);
    assert_eq!(wide.uniform_error, None);
    // Halves may be rejected where zeros are accepted, and vice versa.
    let some = Power::of(&around(&[2.0, 2.0], 1.5), 2, TY);
    assert_eq!(some.rejects.zeros, yes);
    assert_eq!(some.rejects.halved, Some(false));
}

#[test]
fn one_weak_row_is_enough() {
    let mut elements = around(&[1.0, 2.0, 1.0, 2.0], 0.1);
    elements[2..].copy_from_slice(&around(&[1.0, 2.0], 5.0));
    let power = Power::of(&elements, 2, TY);
    assert_eq!(power.rejects.zeros, Some(false));
    // Of one row of four columns, two are enough.
    assert_eq!(Power::of(&elements, 4, TY).rejects.zeros, Some(true));
}

#[test]
fn what_is_no_error_is_not_applicable() {
    let zeros = Power::of(&around(&[0.0; 6], 0.0), 3, TY);
    assert_eq!(zeros.rejects, Rejects::default());
    assert!(zeros.gaps().is_empty());
    let equal = Power::of(&around(&[2.0; 6], 0.1), 3, TY).rejects;
    assert_eq!((equal.columns_permuted, equal.zeros), (None, Some(true)));
    let single = Power::of(&around(&[2.0, 3.0], 0.1), 1, TY).rejects;
    assert_eq!((single.columns_permuted, single.zeros), (None, Some(true)));
}

#[test]
fn elements_without_a_number_are_compared() {
    let nan = Accepted::only(f64::NAN, f64::NAN);
    let infinite = Accepted::only(f64::INFINITY, f64::INFINITY);
    let power = Power::of(&[nan, infinite], 2, TY);
    assert_eq!(power.rejects.zeros, Some(true));
    assert_eq!(power.unbounded, 0);
    let all = Accepted { exact: 1.0, lo: f64::NEG_INFINITY, hi: f64::INFINITY, nan: true };
    assert_eq!(Power::of(&[all], 1, TY).unbounded, 1);
}

#[test]
fn truncation_shows_where_results_are_not_numbers_of_the_type() {
    let third = [1.0 / 3.0, -1.0 / 3.0, 2.0 / 3.0, 1e-40];
    for x in third {
        let (value, right) = (truncated(TY, x), round_once(TY, x));
        assert!(value.abs() <= x.abs() && (value - right).abs() <= unit(TY, x), "{x}");
        // The next number away from zero is beyond x.
        assert!(value.abs() + unit(TY, value.abs()) > x.abs(), "{x}");
    }
    assert_eq!(truncated(TY, 1.0 - 1e-9), 1.0 - 2f64.powi(-8));
    assert_eq!(truncated(ScalarType::FLOAT16, 65519.9), 65504.0);
    let exactly = |x: f64| Accepted::only(x, round_once(TY, x));
    assert_eq!(rejects_truncated(&[exactly(2.0 / 3.0)], TY), Some(true));
    assert_eq!(rejects_truncated(&[exactly(0.5)], TY), None);
    assert_eq!(rejects_truncated(&around(&[2.0 / 3.0], 0.1), TY), Some(false));
}

#[test]
fn power_in_words() {
    assert_eq!(Power::every_bit().text(), "every bit");
    let text = Power::of(&around(&[1.0, 2.0, -3.0], 0.01), 3, TY).text();
    assert!(text.starts_with("rejects zeros, -y, y/2, permuted columns and any uniform"), "{text}");
    assert!(text.ends_with("not applicable: a missing half of k"), "{text}");
    assert_eq!(percent(0.0019531), "0.2 %");
    assert_eq!(percent(0.5), "50 %");
    assert_eq!(percent(1.2345), "124 %");
}

#[test]
fn results_that_overflow_alike_are_no_error() {
    let overflown = |exact: f64| Accepted::only(exact, exact.signum() * f64::INFINITY);
    let half = ScalarType::FLOAT16;
    let rejects = Power::of(&[overflown(1e7), overflown(4e6)], 2, half).rejects;
    assert_eq!((rejects.halved, rejects.columns_permuted), (None, None));
    assert_eq!((rejects.zeros, rejects.negated), (Some(true), Some(true)));
}

/// Near zero a step of the type is a large share of a value, which no bound has to exclude; elsewhere not.
#[test]
fn units_of_subnormals_hide_an_error() {
    let ty = ScalarType::FLOAT16;
    let of = |value: f64, steps: f64| {
        let step = steps * unit(ty, value);
        [Accepted { exact: value, lo: value - step, hi: value + step, nan: false }]
    };
    let step = (-24f64).exp2();
    for multiple in [3.0, 4.0, 9.0] {
        let narrow = of(multiple * step, 1.0);
        let error = Power::of(&narrow, 1, ty).uniform_error.expect("an error");
        assert!(error > 0.02 && error <= attainable(ty, &narrow), "{error}");
    }
    // A wide bound is weak near zero as well, and no unit excuses a value of ordinary size.
    let wide = of(64.0 * step, 16.0);
    assert!(Power::of(&wide, 1, ty).uniform_error.expect("an error") > attainable(ty, &wide));
    assert!(attainable(ty, &of(1.5, 1.0)) < 0.005);
}
