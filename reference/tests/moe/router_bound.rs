//! The widths of the bounds of router weights, from the errors that their table states.

use marlinspike::case::ScoringFunc::{Sigmoid, Softmax};
use marlinspike::moe::bound::Bounds;
use marlinspike::moe::router::{Groups, Router};
use marlinspike::num::scalar::ScalarType;

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

/// At least the stated ends, and beyond them by a fiftieth of the width at most.
fn expect_ends(what: &str, exact: f64, found: [f64; 2], stated: [f64; 2]) {
    for (found, stated) in found.into_iter().zip(stated) {
        let (found, stated) = ((found - exact).abs(), (stated - exact).abs());
        assert!(found >= stated, "{what}: {found:e} of {stated:e}");
        let most = stated * 1.02 + exact * OWN + 2.0 * LEAST;
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

/// In 16 bits without a bias, three roundings to the logits' type follow the score.
#[test]
fn weights_in_sixteen_bits() {
    let groups = Some(Groups { num_expert_group: 1, topk_group: 1 });
    for (logits_type, half_ulp) in
        [(ScalarType::FLOAT16, 1.0 / 2048.0), (ScalarType::BFLOAT16, 1.0 / 256.0)]
    {
        for routed_scaling_factor in [1.0f32, 2.5] {
            let router = Router {
                groups,
                logits_type,
                routed_scaling_factor,
                ..Router::new(Sigmoid, 1, false)
            };
            // Sigmoid of 0 is 1/2, which both types hold.
            let (exact, found) = weight(&router, &[0.0, -3.0]);
            assert_eq!(exact, 0.5 * f64::from(routed_scaling_factor));
            let error = (1.0f64 + half_ulp).powi(3) - 1.0;
            let stated = [exact * (1.0 - error), exact * (1.0 + error)];
            expect_ends(&format!("{logits_type}"), exact, found, stated);
        }
    }
}

/// A group's score: its best choice, or with a bias the rounded sum of its two best.
#[test]
fn scores_of_groups() {
    let logits = [0.25f32, -2.0, 1.5, 0.75, -1.0, -0.5, 3.0, -4.0];
    let bias = [0.5f32, 1.0, -0.75, 0.125, 2.0, 0.25, -3.0, 0.0];
    let groups = Groups { num_expert_group: 2, topk_group: 1 };
    for with_bias in [false, true] {
        let router = Router {
            groups: Some(groups),
            bias: with_bias.then_some(&bias[..]),
            ..Router::new(Sigmoid, 1, false)
        };
        let bounds = Bounds::new(&router, &logits);
        let found = bounds.groups(&router, groups);
        assert_eq!(found.len(), 2);
        for (group, found) in found.iter().enumerate() {
            let scores = (4 * group..4 * group + 4).map(|expert| {
                let score = 1.0 / (1.0 + (-f64::from(logits[expert])).exp());
                score + if with_bias { f64::from(bias[expert]) } else { 0.0 }
            });
            let mut scores: Vec<f64> = scores.collect();
            scores.sort_by(f64::total_cmp);
            let exact = if with_bias { scores[2] + scores[3] } else { scores[3] };
            // Two scores of 12 u at most, their biased sums, and the sum.
            let most = 40.0 * U * (1.0 + exact.abs());
            assert!(found.contains(exact), "{group}: {found:?}, {exact}");
            assert!(found.hi - found.lo <= 2.0 * most, "{group}: {found:?}, {exact}");
            assert!(found.hi - found.lo >= U * exact.abs(), "{group}: {found:?}");
        }
        for (expert, choice) in bounds.choice().iter().enumerate() {
            let score = 1.0 / (1.0 + (-f64::from(logits[expert])).exp());
            let exact = score + if with_bias { f64::from(bias[expert]) } else { 0.0 };
            assert!(choice.contains(exact), "{expert}: {choice:?}, {exact}");
            assert!(choice.hi - choice.lo <= 40.0 * U, "{expert}: {choice:?}");
        }
    }
}

/// A correction bias belongs to the choice: the softmax weight is as without it.
#[test]
fn softmax_weights_with_a_bias() {
    let groups = Some(Groups { num_expert_group: 1, topk_group: 1 });
    let (logits, bias) = ([0.5f32, 0.0, -2.0], [4.0f32, -1.0, 0.25]);
    let router = Router { groups, bias: Some(&bias), ..Router::new(Softmax, 1, false) };
    let e = logits.map(|x| f64::from(x - 0.5).exp());
    let sum: f64 = e.iter().sum();
    for expert in 0..3 {
        let (exact, found) = Bounds::new(&router, &logits).weight(&router, &[expert], 0);
        assert!((exact - e[expert] / sum).abs() <= exact * 1e-15, "{expert}");
        let one = |x: f32| f64::from(0.5 - x) * U + 4.0 * U;
        let of_sum: f64 = logits.iter().zip(e).map(|(&x, e)| one(x) * e / sum).sum();
        let error = one(logits[expert]) + of_sum + 2.0 * U + 3.0 * U;
        let stated = [exact * (1.0 - error), exact * (1.0 + error)];
        expect_ends(&format!("with a bias, {expert}"), exact, [found.lo, found.hi], stated);
    }
}
