//! The bounds of a token's sum and of its router weights, compared with what implementations compute: sums in
//! every order, and upstream's chain of 16-bit sums.

use marlinspike::moe::ScoringFunc;
use marlinspike::moe::bound::Bounds;
use marlinspike::moe::router::{Groups, Router};
use marlinspike::moe::sum::bound;
use marlinspike::num::element::{bf16, f16};
use marlinspike::num::interval::{Bound, Interval};
use marlinspike::num::scalar::ScalarType;

const UP: f64 = f64::INFINITY;
const DOWN: f64 = f64::NEG_INFINITY;

/// The orders of up to three terms.
fn orders(len: usize) -> &'static [&'static [usize]] {
    match len {
        1 => &[&[0]],
        2 => &[&[0, 1], &[1, 0]],
        _ => &[&[0, 1, 2], &[0, 2, 1], &[1, 0, 2], &[1, 2, 0], &[2, 0, 1], &[2, 1, 0]],
    }
}

/// What f32 in every order, and for two terms and more the chain in f16, make of known terms.
fn results(terms: &[f64]) -> Vec<f64> {
    let half = |x: f32| f16::from_f32(x).to_f32();
    let in_order = |order: &&[usize]| order.iter().fold(0.0, |acc, &i| acc + terms[i] as f32);
    let mut all: Vec<f64> =
        orders(terms.len()).iter().map(|order| half(in_order(order)).into()).collect();
    if terms.len() > 1 {
        all.push(terms.iter().fold(0.0, |acc: f32, &x| half(acc + x as f32)).into());
    }
    all
}

/// Every choice of an end of each interval.
fn ends(slots: &[Bound]) -> Vec<Vec<f64>> {
    slots.iter().fold(vec![Vec::new()], |all, slot| {
        let Interval { lo, hi } = slot.interval;
        let both = if lo == hi { vec![lo] } else { vec![lo, hi] };
        all.iter().flat_map(|terms| both.iter().map(|&x| [&terms[..], &[x]].concat())).collect()
    })
}

fn between(lo: f64, hi: f64) -> Bound {
    Bound { exact: lo.max(-1.0).min(hi), interval: Interval { lo, hi }, nan: false }
}

/// Every list of one to three of `palette`.
fn lists(palette: &[Bound]) -> Vec<Vec<Bound>> {
    let longer = |short: &[Vec<Bound>]| -> Vec<Vec<Bound>> {
        let add = |list: &Vec<Bound>| palette.iter().map(|&x| [&list[..], &[x]].concat()).collect();
        short.iter().flat_map::<Vec<_>, _>(add).collect()
    };
    let one = longer(&[Vec::new()]);
    let two = longer(&one);
    let three = longer(&two);
    [one, two, three].concat()
}

#[test]
fn a_bound_holds_the_results_of_all_orders_and_nan_where_one_is() {
    let points = [0.0, 1.0, -1.0, 2f64.powi(-24), 65504.0, -65504.0, UP, DOWN].map(Bound::exactly);
    let ranges = [between(1.0, UP), between(65504.0, UP), between(DOWN, 1.0), between(DOWN, UP)];
    for slots in lists(&[&points[..], &ranges].concat()) {
        let made = bound(&slots, ScalarType::FLOAT16);
        let all: Vec<f64> = ends(&slots).iter().flat_map(|terms| results(terms)).collect();
        let nan = all.iter().any(|y| y.is_nan());
        // Of three terms, one that may be either infinity counts as two: the bound is wider than it must be.
        let both = slots.iter().any(|s| s.interval == Interval { lo: DOWN, hi: UP });
        let wide = slots.len() == 3 && both;
        assert!(made.nan == nan || wide && made.nan, "{slots:?}: {made:?}, NaN {nan}");
        for y in all.iter().filter(|y| !y.is_nan()) {
            assert!(made.interval.contains(*y), "{slots:?}: {y} is outside of {made:?}");
        }
    }
    let unknown = bound(&[Bound::exactly(1.0), Bound::NAN], ScalarType::FLOAT16);
    assert!(unknown.nan && unknown.interval.is_empty(), "{unknown:?}");
}

#[test]
fn a_bound_of_small_integers_is_no_wider_than_their_results() {
    let points = [0.0, 1.0, -1.0, 3.0, -4.0, 2048.0, 65504.0, -65504.0].map(Bound::exactly);
    for slots in lists(&points) {
        let made = bound(&slots, ScalarType::FLOAT16).interval;
        let all: Vec<f64> = ends(&slots).iter().flat_map(|terms| results(terms)).collect();
        let lo = all.iter().copied().fold(UP, f64::min);
        let hi = all.iter().copied().fold(DOWN, f64::max);
        assert_eq!((made.lo, made.hi), (lo, hi), "{slots:?}");
    }
}

/// 2^-130 is no normal f32: an implementation may flush it to zero, and each sum to zero or not.
#[test]
fn sums_of_subnormals_may_be_flushed() {
    let term = f64::from(bf16::from_f32(2f32.powi(-130)).to_f32());
    let made = bound(&[Bound::exactly(term); 3], ScalarType::BFLOAT16).interval;
    assert!(made.contains(0.0) && made.contains(3.0 * term), "{made:?}");
    // At most three results are below 2^-126.
    assert!(made.hi <= 4.0 * 2f64.powi(-126) && made.lo >= -4.0 * 2f64.powi(-126), "{made:?}");
}

#[test]
fn exact_weights_are_shares_of_the_chosen_scores() {
    let router = Router::new(ScoringFunc::Softmax, 3, true);
    let row = [0.5f32, -1.25, 2.0, 0.0, 1.5];
    let ids = [2, 4, 0];
    let bounds = Bounds::new(&router, &row);
    let sum: f64 = ids.iter().map(|&id| f64::from(row[id]).exp()).sum();
    for (j, &id) in ids.iter().enumerate() {
        let expected = f64::from(row[id]).exp() / sum;
        let (exact, interval) = bounds.weight(&router, &ids, j);
        assert!((exact / expected - 1.0).abs() < 1e-12, "{j}: {exact}, expected {expected}");
        assert!(interval.contains(expected), "{j}: {interval:?}");
    }
}

#[test]
fn the_choice_is_by_score_and_bias() {
    let bias = [0.25f32, -0.5, 3.0, 0.0];
    let row = [0.5f32, -1.25, 2.0, 0.0];
    let groups = Some(Groups { num_expert_group: 1, topk_group: 1 });
    let plain = Router::new(ScoringFunc::Sigmoid, 2, true);
    let router = Router { groups, bias: Some(&bias), ..plain };
    let bounds = Bounds::new(&router, &row);
    assert_eq!(bounds.choice().len(), 4);
    for (i, interval) in bounds.choice().iter().enumerate() {
        let expected = 1.0 / (1.0 + (-f64::from(row[i])).exp()) + f64::from(bias[i]);
        assert!(interval.contains(expected), "{i}: {expected}, {interval:?}");
        assert!(interval.hi - interval.lo < 1e-5, "{i}: {interval:?}");
    }
}

/// Weights that lost the bits of their bias, by f32 itself.
#[test]
fn bounds_less_bias_hold_the_recovered_scores() {
    let bias = [13.142_965f32, -7.5];
    let row = [1.0f32, -3.0];
    let groups = Some(Groups { num_expert_group: 1, topk_group: 1 });
    let plain = Router::new(ScoringFunc::Sigmoid, 1, false);
    let router = Router { groups, bias: Some(&bias), ..plain };
    let lost = Bounds::new(&router, &row).less_bias(&bias);
    for i in 0..2 {
        let score = (1.0 / (1.0 + (-f64::from(row[i])).exp())) as f32;
        let recovered = f64::from((score + bias[i]) - bias[i]);
        let (exact, interval) = lost.weight(&router, &[i], 0);
        assert!(interval.contains(recovered), "{i}: {recovered}, {interval:?}");
        assert!((exact - recovered).abs() < 2e-6, "{i}: {exact}, {recovered}");
        assert!(interval.hi - interval.lo < 5e-6, "{i}: {interval:?}");
    }
}
