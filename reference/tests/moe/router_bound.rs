//! The widths of the bounds of router weights, from the errors that their table states.

use marlinspike::case::ScoringFunc::{Sigmoid, Softmax};
use marlinspike::moe::bound::Bounds;
use marlinspike::moe::router::{Groups, Router};

/// Half an ulp of f32 at 1.
const U: f64 = 1.0 / (1u64 << 24) as f64;
/// What the bounds add for f64's own rounding and for flushed results.
const OWN: f64 = 1.0 / (1u64 << 39) as f64;
const LEAST: f64 = f32::MIN_POSITIVE as f64;

/// The exact weight of expert 0, and the ends of its interval.
fn weight(router: &Router<'_>, logits: &[f32]) -> (f64, [f64; 2]) {
    let (exact, interval) = Bounds::new(router, logits).weight(router, &[0], 0);
    (exact, [interval.lo, interval.hi])
}

/// At least the stated ends, and beyond them by one rounding and a fiftieth of the width at most.
fn expect_ends(what: &str, exact: f64, found: [f64; 2], stated: [f64; 2]) {
    for (found, stated) in found.into_iter().zip(stated) {
        let (found, stated) = ((found - exact).abs(), (stated - exact).abs());
        assert!(found >= stated, "{what}: {found:e} of {stated:e}");
        let most = stated * 1.02 + exact * (1.01 * U + OWN) + 2.0 * LEAST;
        assert!(found <= most, "{what}: {found:e}, at most {most:e}");
    }
}

#[test]
fn sigmoid_of_an_exponential() {
    let router = Router::new(Sigmoid, 1, false);
    for x in [-60.0f32, -20.5, -8.0, -2.0, -0.75, 0.0, 0.3, 1.0, 4.0, 9.5] {
        let (exact, found) = weight(&router, &[x, -3.0]);
        let e = f64::from(-x).exp();
        assert!((exact - 1.0 / (1.0 + e)).abs() <= exact * 1e-15, "{x}");
        // `__expf` in ulps of 2 u, then a sum, a quotient and the factor.
        let error = 2.0 * U * (2.0 + (1.173 * f64::from(x).abs()).floor());
        let low = 1.0 / (1.0 + e * (1.0 + error)) * (1.0 - U).powi(3);
        let high = (1.0 / (1.0 + e * (1.0 - error)) / (1.0 - U).powi(2)).min(1.0) * (1.0 + U);
        expect_ends(&format!("sigmoid of {x}"), exact, found, [low, high]);
    }
}

/// e^89 is infinite in f32, so that the quotient is zero; at the other end the sum is 1.
#[test]
fn sigmoid_beyond_the_exponential() {
    let router = Router::new(Sigmoid, 1, false);
    let ends = |x: f32| weight(&router, &[x, -3.0]).1;
    assert!(ends(-80.0)[0] > 0.0 && ends(-89.0)[0] <= 0.0 && ends(-89.0)[1] > 0.0);
    assert!(ends(-1000.0)[0] <= 0.0 && ends(-1000.0)[1] < 4.0 * LEAST);
    assert!(ends(200.0)[0] > 1.0 - 8.0 * U && ends(200.0)[1] <= 1.0 + 3.0 * U);
    assert_eq!(weight(&router, &[f32::NEG_INFINITY, 0.0]).0, 0.0);
}

/// Grouped top-k may take the form with the tangent, whose error is absolute.
#[test]
fn sigmoid_of_a_tangent() {
    let groups = Some(Groups { num_expert_group: 1, topk_group: 1 });
    let router = Router { groups, ..Router::new(Sigmoid, 1, false) };
    for x in [-12.0f32, -9.0, -6.0] {
        let (exact, found) = weight(&router, &[x, -3.0]);
        // ½ · tanh: 2 ulp of at most 2 u, halved; its sum with ½: u / 2 below 1. The factor: u.
        let error = 1.5 * U;
        let stated = [(exact - error) * (1.0 - U), (exact + error) * (1.0 + U)];
        let stated = [if exact > error { stated[0] } else { 0.0 }, stated[1]];
        expect_ends(&format!("tangent of {x}"), exact, found, stated);
    }
}

#[test]
fn softmax_weights() {
    let router = Router::new(Softmax, 1, false);
    for far in [0.0f32, -1.0, -6.5] {
        let logits = [far, 0.0, -2.0, 0.0];
        let (exact, found) = weight(&router, &logits);
        let e = logits.map(|x| f64::from(x).exp());
        let sum: f64 = e.iter().sum();
        assert!((exact - e[0] / sum).abs() <= exact * 1e-15, "{far}");
        // The argument's rounding, 2 ulp of 2 u; those of the other terms, the sum's, two for the probability,
        // one for the factor.
        let one = |x: f32| f64::from(x).abs() * U + 4.0 * U;
        let of_sum: f64 = logits.iter().zip(e).map(|(&x, e)| one(x) * e / sum).sum();
        let error = one(far) + of_sum + (4.0 - 1.0) * U + 3.0 * U;
        expect_ends(
            &format!("softmax, {far}"),
            exact,
            found,
            [exact * (1.0 - error), exact * (1.0 + error)],
        );
    }
}
