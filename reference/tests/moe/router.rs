//! Routing and alignment as functions: the exponential, ties, groups, expert maps, rejected
//! inputs.

use approx::assert_abs_diff_eq;
use marlinspike::Error;
use marlinspike::case::ScoringFunc::{Sigmoid, Softmax};
use marlinspike::moe::align::{Absent, Align};
use marlinspike::moe::bound::Bounds;
use marlinspike::moe::layer::Routed;
use marlinspike::moe::math::{exp, sigmoid};
use marlinspike::moe::router::{Groups, Router};
use marlinspike::num::array::rows_of;
use marlinspike::num::scalar::ScalarType;
use ndarray::{Array2, array, s};
use proptest::prelude::*;

/// Error of `found` in units of the last place that f32 has at `exact`.
fn ulps(exact: f64, found: f32) -> f64 {
    let exponent = exact.abs().log2().floor().max(-126.0) as i32;
    (f64::from(found) - exact).abs() / 2f64.powi(exponent - 23)
}

#[test]
fn exponential_is_within_one_ulp_everywhere() {
    // Every 61st of the 2^32 bit patterns that give neither zero nor infinity; fewer under emulation.
    let (mut worst, mut at) = (0.0, 0.0);
    for bits in (0..=u32::MAX).step_by(if cfg!(emulated) { 977 } else { 61 }) {
        let x = f32::from_bits(bits);
        if !(-103.9..=88.7228).contains(&x) {
            continue;
        }
        let error = ulps(f64::from(x).exp(), exp(x));
        if error > worst {
            (worst, at) = (error, x);
        }
    }
    assert!(worst < 1.0, "{worst} ulp at {at}");
    assert!(worst > 0.5, "nothing was measured");
    assert_eq!((exp(f32::INFINITY), exp(88.73)), (f32::INFINITY, f32::INFINITY));
    assert_eq!((exp(f32::NEG_INFINITY), exp(-104.1)), (0.0, 0.0));
    assert!(exp(f32::NAN).is_nan());
    assert_eq!((sigmoid(0.0), sigmoid(200.0), sigmoid(-200.0)), (0.5, 1.0, 0.0));
}

#[test]
fn ties_go_to_the_lower_id() {
    let routing = Router::new(Softmax, 3, true).route(array![[1.0, 2.0, 1.0, 1.0, 2.0]].view());
    let routing = routing.expect("a row");
    assert_eq!(routing.topk_ids, array![[1, 4, 0]]);
    let [a, b, c] = [0, 1, 2].map(|j| routing.topk_weights[[0, j]]);
    assert!(a == b && c < b);
    // Seven roundings (three quotients, two additions in their divisor, two here) of half an ulp each.
    assert_abs_diff_eq!(a + b + c, 1.0, epsilon = 7.0 * f32::EPSILON / 2.0);
    let two = Router::new(Sigmoid, 2, false).route(Array2::zeros((2, 3)).view());
    let two = two.expect("rows");
    assert_eq!(two.topk_ids, array![[0, 1], [0, 1]]);
    assert_eq!(two.topk_weights, array![[0.5, 0.5], [0.5, 0.5]]);
    assert_eq!(two.token_expert_indices, array![[0, 2], [1, 3]]);
}

#[test]
fn groups_are_chosen_by_their_two_best_with_a_bias() {
    // Group 0 has the best expert, group 1 the best pair.
    let logits = array![[3.0, -9.0, -9.0, 2.0, 2.0, -9.0]];
    let groups = Some(Groups { num_expert_group: 2, topk_group: 1 });
    let plain = Router { groups, ..Router::new(Sigmoid, 2, false) };
    assert_eq!(plain.route(logits.view()).expect("a row").topk_ids, array![[0, 1]]);
    let bias = [0.0; 6];
    let biased = Router { bias: Some(&bias), routed_scaling_factor: 2.5, ..plain };
    let routing = biased.route(logits.view()).expect("a row");
    assert_eq!(routing.topk_ids, array![[3, 4]]);
    assert_eq!(routing.topk_weights, array![[sigmoid(2.0) * 2.5, sigmoid(2.0) * 2.5]]);
    // The bias affects the selection, not the weights.
    let bias = [0.0, 0.0, 0.0, 0.0, 0.0, 9.0];
    let biased = Router { bias: Some(&bias), renormalize: false, ..biased };
    let routing = biased.route(logits.view()).expect("a row");
    assert_eq!(routing.topk_ids, array![[5, 3]]);
    assert_eq!(routing.topk_weights[[0, 0]], sigmoid(-9.0) * 2.5);
    // Scores 0.9 and 0.1 against 0.5 and 0.45: the larger sum, the smaller product.
    let logits = array![[2.2, -2.2, -9.0, 0.0, -0.2, -9.0]];
    let bias = [0.0; 6];
    let biased = Router { bias: Some(&bias), top_k: 1, ..biased };
    assert_eq!(biased.route(logits.view()).expect("a row").topk_ids, array![[0]]);
}

#[test]
fn refusals_name_what_is_wrong() {
    let router = Router::new(Softmax, 3, true);
    assert!(matches!(router.route(array![[0.0, 0.0], [0.0, 0.0]].view()), Err(Error::Size { .. })));
    assert!(matches!(rows_of("router_logits", &[0.0; 5], 4), Err(Error::Shape { .. })));
    let none = Array2::zeros((3, 0));
    assert!(matches!(router.route(none.view()), Err(Error::Size { .. })));
    let e = router.route(array![[0.0, 1.0, 0.0, f32::NAN]].view()).expect_err("NaN");
    assert!(matches!(e, Error::Value { ref index, .. } if index[..] == [0, 3]), "{e}");
    let bias = [1e6, 0.0, 0.0, 0.0];
    let groups = Some(Groups { num_expert_group: 2, topk_group: 2 });
    let logits_type = ScalarType::FLOAT16;
    let biased = Router { bias: Some(&bias), groups, logits_type, ..router.clone() };
    assert!(
        matches!(biased.route(array![[0.0, 0.0, 0.0, 0.0]].view()), Err(Error::Value { .. })),
        "infinite as f16"
    );
    let groups = Some(Groups { num_expert_group: 3, topk_group: 1 });
    let uneven = Router { groups, ..router };
    assert!(matches!(uneven.route(array![[0.0, 0.0, 0.0, 0.0]].view()), Err(Error::Size { .. })));
    let align = Align { block_size: 0, num_experts: 4, expert_map: None, absent: Absent::Ignore };
    assert!(matches!(align.run(&[0]), Err(Error::Size { .. })));
    let align = Align { block_size: 4, ..align };
    assert!(matches!(align.run(&[-1]), Err(Error::Value { .. })));
    let twice = Align { expert_map: Some(&[0, 0, -1, -1]), ..align };
    assert!(matches!(twice.run(&[0]), Err(Error::Value { .. })));
    let huge = Align { block_size: usize::MAX / 2, ..align };
    assert!(matches!(huge.run(&[0]), Err(Error::Size { .. })));
}

#[test]
fn alignment_of_the_documented_example() {
    // Upstream's own example: four tokens, top 3, ids 1 to 4 of five experts, blocks of four.
    let ids = [2, 3, 4, 1, 2, 4, 1, 3, 4, 1, 2, 3];
    let align = Align { block_size: 4, num_experts: 5, expert_map: None, absent: Absent::Ignore };
    let all = align.run(&ids).expect("aligned");
    let sorted = [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12];
    assert_eq!(all.sorted_token_ids, sorted);
    assert_eq!((all.expert_ids, all.num_tokens_post_padded), (vec![1, 2, 3, 4], 16));
    // This rank has experts 4 and 2, as 0 and 1.
    let map = Some(&[-1, -1, 1, -1, 0][..]);
    let here = Align { expert_map: map, ..align }.run(&ids).expect("aligned");
    assert_eq!(here.sorted_token_ids, [2, 5, 8, 12, 0, 4, 10, 12]);
    assert_eq!(here.expert_ids, [0, 1]);
    let marked = Align { expert_map: map, absent: Absent::Mark, ..align };
    let marked = marked.run(&ids).expect("aligned");
    assert_eq!(marked.sorted_token_ids, sorted);
    assert_eq!(marked.expert_ids, [-1, 1, -1, 0]);
    // Ids beyond the number of experts are dropped.
    let few = Align { num_experts: 3, ..align }.run(&ids).expect("aligned");
    assert_eq!(few.expert_ids, [1, 2]);
}

/// A column slice and a transposed array route as their copies do; ids and weights that are not
/// row-major are refused by name.
#[test]
fn strides_do_not_matter_or_are_refused() {
    let wide = Array2::from_shape_fn((5, 12), |(m, e)| ((m * 7 + e * 5) % 11) as f32);
    let router = Router::new(Softmax, 3, true);
    for view in
        [wide.slice(s![.., 2..10]), wide.slice(s![.., ..;2]), wide.t().slice_move(s![.., ..])]
    {
        let copied = view.as_standard_layout().into_owned();
        assert_eq!(router.route(view).unwrap(), router.route(copied.view()).unwrap());
    }
    let routing = router.route(wide.view()).unwrap();
    let routed = routing.routed().unwrap();
    assert_eq!((routed.top_k(), routed.topk_ids()), (3, routing.topk_ids.view()));
    let ids = routing.topk_ids.clone();
    let weights = Array2::<f32>::zeros((3, 5));
    let strided = Routed::new(ids.view(), weights.t());
    assert!(
        matches!(strided, Err(Error::NotContiguous { ref tensor, .. }) if tensor == "topk_weights")
    );
    let other = Routed::new(ids.view(), weights.view());
    assert!(matches!(other, Err(Error::Shape { ref tensor, .. }) if tensor == "topk_weights"));
    assert!(matches!(Routed::from_rows(3, &[0; 4], &[0.0; 4]), Err(Error::Shape { .. })));
    assert!(matches!(Routed::from_rows(0, &[], &[]), Err(Error::Size { .. })));
}

fn any_router() -> impl Strategy<Value = (Router<'static>, Vec<f32>)> {
    let logits = prop::collection::vec(-30f32..30.0, 16);
    let types =
        prop::sample::select(vec![ScalarType::FLOAT32, ScalarType::FLOAT16, ScalarType::BFLOAT16]);
    (logits, any::<[bool; 4]>(), 1usize..=8, types).prop_map(|(mut logits, b, top_k, ty)| {
        const BIAS: [f32; 16] =
            [0.1, -0.2, 0.0, 0.3, 0.0, 0.0, -0.1, 0.2, 0.05, 0.5, -0.4, 0.0, 0.0, 0.1, 0.2, -0.3];
        for l in &mut logits {
            *l = ty.to_f64(ty.encode_rne(f64::from(*l))) as f32;
        }
        let scoring = if b[0] { Sigmoid } else { Softmax };
        let mut router = Router::new(scoring, top_k, b[1]);
        router.logits_type = ty;
        router.bias = b[2].then_some(&BIAS[..]);
        if b[3] {
            router.groups = Some(Groups { num_expert_group: 4, topk_group: 2 });
            router.routed_scaling_factor = 2.5;
        }
        (router, logits)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// The reference's operations belong to the class of the bound.
    #[test]
    fn the_reference_is_within_its_bound((router, logits) in any_router()) {
        let routing = router.route(rows_of("x", &logits, 16).expect("rows")).expect("a row");
        let bounds = Bounds::new(&router, &logits);
        let ids: Vec<usize> = routing.topk_ids.iter().map(|&i| i as usize).collect();
        for (j, &w) in routing.topk_weights.iter().enumerate() {
            let (exact, interval) = bounds.weight(&router, &ids, j);
            let ratio = interval.ratio(exact, w);
            prop_assert!(ratio <= 1.0, "{w} is {ratio} of {interval:?} around {exact}");
        }
    }

    /// Permuting the tokens permutes the result.
    #[test]
    fn tokens_are_independent((router, logits) in any_router()) {
        let reversed: Vec<f32> = logits.iter().rev().copied().collect();
        let both = [&logits[..], &reversed].concat();
        let two = router.route(rows_of("x", &both, 16).expect("rows")).expect("rows");
        let second = router.route(rows_of("x", &reversed, 16).expect("rows")).expect("a row");
        prop_assert_eq!(two.topk_ids.row(1), second.topk_ids.row(0));
        prop_assert_eq!(two.topk_weights.row(1), second.topk_weights.row(0));
    }
}
