//! The widths of the bounds of router weights, from the errors that their table states.

use marlinspike::case::ScoringFunc::{Sigmoid, Softmax};
use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{Verdict, check_case};
use marlinspike::moe::bound::{Bounds, Roundings};
use marlinspike::moe::router::{Groups, Router};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use serde_json::json;

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

/// Weights of the first `k` scores of sigmoids in `ty`, by operations in f32 that `r` rounds to `ty`.
fn sixteen_bits(ty: ScalarType, logits: &[f32], k: usize, factor: f32, r: Roundings) -> Vec<f32> {
    let half = |x: f32| ty.to_f64(ty.encode_rne(x.into())) as f32;
    let rounded = |x: f32, is: bool| if is { half(x) } else { x };
    let scores: Vec<f32> =
        logits[..k].iter().map(|x| half((1.0 / (1.0 + (-f64::from(*x)).exp())) as f32)).collect();
    let sum = rounded(scores.iter().sum(), r.sum);
    let weight = |s: &f32| rounded(rounded(s / sum, r.quotient) * factor, r.product);
    scores.iter().map(weight).collect()
}

/// Logits that f16 and bf16 hold.
fn eighths(seed: u32) -> Vec<f32> {
    let next = |i: u32| (seed * 97 + i).wrapping_mul(2_654_435_761) >> 26;
    (0..8).map(|i| (next(i) as f32 - 32.0) / 8.0).collect()
}

/// After scores in 16 bits, sum, quotient and product are in f32 or in 16 bits; nothing between passes.
#[test]
fn weights_in_sixteen_bits() {
    let groups = Some(Groups { num_expert_group: 1, topk_group: 1 });
    let (mut changed, mut kept) = (0, 0);
    for (logits_type, factor) in [
        (ScalarType::FLOAT16, 1.0f32),
        (ScalarType::FLOAT16, 2.5),
        (ScalarType::BFLOAT16, 1.0),
        (ScalarType::BFLOAT16, 2.5),
    ] {
        let plain = Router { groups, logits_type, ..Router::new(Sigmoid, 4, true) };
        let router = Router { routed_scaling_factor: factor, ..plain };
        let ids = [0, 1, 2, 3];
        let all = Roundings::of(&router);
        assert_eq!(all.len(), if factor == 1.0 { 4 } else { 8 });
        for seed in 0..40 {
            let logits = eighths(seed);
            let of = |roundings, j| {
                let mut bounds = Bounds::new(&router, &logits);
                bounds.set_roundings(roundings);
                bounds.weight(&router, &ids, j).1
            };
            for r in &all {
                let made = sixteen_bits(logits_type, &logits, 4, factor, *r);
                for (j, w) in made.into_iter().enumerate() {
                    let (w, found) = (f64::from(w), of(*r, j));
                    assert!(found.contains(w), "{logits_type} {r:?}: {w}, {found:?}");
                    let wrong = w * 1.0005;
                    kept += usize::from(all.iter().any(|r| of(*r, j).contains(wrong)));
                    changed += 1;
                }
            }
        }
    }
    // A sum that is a tie in 16 bits has both neighbours, whose distance in f16 is more than 0.0005.
    assert!(kept * 6 <= changed, "{kept} of {changed} weights times 1.0005 are within a bound");
}

/// A case with 16-bit logits passes by the operations of a fused kernel and of torch, and by no other.
#[test]
fn cases_in_sixteen_bits() {
    let logits: Vec<f32> = (0..3).flat_map(eighths).collect();
    let bits: Vec<u16> = logits.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
    let config = json!({"scoring_func": "sigmoid", "top_k": 4, "renormalize": true,
        "use_grouped_topk": true, "num_expert_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.5});
    let config = CaseConfig::from_json(Op::Router, config.as_object().unwrap()).unwrap();
    let verdict = |change: &dyn Fn(f32) -> f32, roundings: [bool; 3]| {
        let [sum, quotient, product] = roundings;
        let roundings = Roundings { sum, quotient, product };
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for row in logits.chunks_exact(8) {
            let mut order: Vec<usize> = (0..8).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            let best: Vec<f32> = order[..4].iter().map(|&e| row[e]).collect();
            ids.extend(order[..4].iter().map(|&e| e as i32));
            weights.extend(sixteen_bits(ScalarType::BFLOAT16, &best, 4, 2.5, roundings));
        }
        weights.iter_mut().for_each(|w| *w = change(*w));
        let mut case = Case::new("16 bits", config.clone(), "computed here");
        let logits = Tensor::from_vec("l", DType::BF16, vec![3, 8], bits.clone()).unwrap();
        case.add_input("router_logits", logits);
        let weights = Tensor::from_vec("w", DType::F32, vec![3, 4], weights).unwrap();
        case.add_output("topk_weights", weights);
        case.add_output("topk_ids", Tensor::from_vec("i", DType::I32, vec![3, 4], ids).unwrap());
        let outputs = check_case(&case).unwrap().outputs;
        outputs.iter().find(|o| o.name == "topk_weights").unwrap().verdict
    };
    for roundings in [[false; 3], [true; 3], [true, false, true], [false, true, false]] {
        assert_eq!(verdict(&|w| w, roundings), Verdict::Pass, "{roundings:?}");
        assert_eq!(verdict(&|w| w * 1.0005, roundings), Verdict::Fail, "{roundings:?}");
    }
    // The next bf16 is within three roundings of it, but no operation gives it.
    let next = |w: f32| f32::from_bits(w.to_bits() + 0x1_0000);
    assert_eq!(verdict(&next, [true; 3]), Verdict::Fail);
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
