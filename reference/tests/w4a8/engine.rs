//! The fast layer has the bits of the plain one for all shapes, routes, kernels and thread counts.

use super::layers::{Batch, Given, Sizes};
#[allow(dead_code, reason = "each test uses a part")]
use marlinspike::Error;
use marlinspike::case::{Activation, ActivationRounding, ScoringFunc};
use marlinspike::moe::layer::Routed;
use marlinspike::moe::router::{Groups, Router};
use marlinspike::num::array::{FloatView2, rows_of};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::element::f16;
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::w4a8::moe::{MoeLayer, Workspace};
use marlinspike::w4a8::{Values, fastest, kernels, scalar::Scalar};
use ndarray::{Array2, ArrayView2, s};

const TYPES: [ScalarType; 2] = [ScalarType::FLOAT32, ScalarType::BFLOAT16];

fn sizes(rng: &mut Rng) -> Sizes {
    // K of each product, and its groups: channel-wise any K, also with a tail.
    let side = |rng: &mut Rng| match rng.below(6) {
        0 => (1 + rng.below(70), GroupSize::Channel),
        1 => (160, GroupSize::Channel),
        2 => (64, GroupSize::Of(32)),
        3 => (192, GroupSize::Of(64)),
        4 => (96, GroupSize::Of(32)),
        _ => (384, GroupSize::Of(128)),
    };
    let ((size_h, first), (size_i, second)) = (side(rng), side(rng));
    let nr = [4, 8, 8, 8][rng.below(4)];
    Sizes { experts: 1 + rng.below(6), size_h, size_i, groups: [first, second], nr }
}

fn forward(layer: &MoeLayer<'_>, batch: &Batch, workspace: &mut Workspace) -> Values {
    let mut out = batch.output();
    let h = layer.hidden_size();
    let (x, y) = (batch.x.view(h).unwrap(), out.view_mut(h).unwrap());
    layer.forward_routed(x, batch.routed(), workspace, y).unwrap();
    out
}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

#[test]
fn every_shape_route_and_kernel() {
    let mut rng = Rng::new(0xe1);
    let pools = [pool(1), pool(2), pool(3)];
    // One workspace for all: remains of a call must not affect the next one.
    let mut workspace = Workspace::default();
    // Fewer on targets that an emulator may run.
    for round in 0..if cfg!(target_arch = "aarch64") { 12 } else { 60 } {
        let sizes = sizes(&mut rng);
        let mut given = Given::new(sizes, rng.next_u64());
        let config = &mut given.config;
        config.activation = [Activation::Silu, Activation::SwigluOai][round % 2];
        config.rounding =
            [ActivationRounding::HalfAway, ActivationRounding::HalfEven][round / 2 % 2];
        config.router_weight_on_input = round / 4 % 2 == 1;
        let experts = sizes.experts;
        let (tokens, top_k) = ([0, 1, 2, 7, 8, 9, 17, 40][rng.below(8)], 1 + rng.below(3));
        let (one, route) = (rng.below(experts) as i32, rng.below(4));
        let ty = TYPES[rng.below(2)];
        let batch = Batch::new(sizes, ty, tokens, top_k, &mut rng, |rng, i| match route {
            0 => rng.below(experts) as i32,
            1 => one,
            2 => -1,
            _ => (i % (experts + 1)) as i32 - 1,
        });
        let expected = given.oracle().forward(&Scalar, &batch.x, batch.routed()).unwrap();
        for kernel in kernels() {
            let what = format!("round {round}, {sizes:?}, {tokens} tokens, {}", kernel.name());
            let layer = given.engine().with_kernel(kernel);
            let y = pools[rng.below(3)].install(|| forward(&layer, &batch, &mut workspace));
            assert_eq!(y.bits(), expected.bits(), "{what}");
        }
    }
}

/// Many tokens on few experts: several panels each, and rows whose sums depend on the order.
#[test]
fn neither_threads_nor_cuts_nor_names_change_a_bit() {
    let mut rng = Rng::new(7);
    let groups = [GroupSize::Of(32), GroupSize::Of(64)];
    let sizes = Sizes { experts: 5, size_h: 288, size_i: 320, groups, nr: 8 };
    let given = Given::new(sizes, 8);
    let (tokens, top_k) = (75, 3);
    for ty in TYPES {
        let any = |rng: &mut Rng, _| rng.below(5) as i32;
        let batch = Batch::new(sizes, ty, tokens, top_k, &mut rng, any);
        let layer = given.engine();
        let expected =
            given.oracle().forward(fastest().as_ref(), &batch.x, batch.routed()).unwrap().bits();
        for threads in 1..=4 {
            let mut workspace = layer.workspace(threads);
            let y = pool(threads).install(|| forward(&layer, &batch, &mut workspace));
            assert_eq!(y.bits(), expected, "{threads} threads");
        }
        let mut workspace = Workspace::default();
        let part = |range: std::ops::Range<usize>| Batch {
            x: match &batch.x {
                Values::F32(x) => {
                    Values::F32(x[range.start * sizes.size_h..range.end * sizes.size_h].to_vec())
                }
                Values::Bf16(x) => {
                    Values::Bf16(x[range.start * sizes.size_h..range.end * sizes.size_h].to_vec())
                }
            },
            top_k,
            topk_ids: batch.topk_ids[range.start * top_k..range.end * top_k].to_vec(),
            topk_weights: batch.topk_weights[range.start * top_k..range.end * top_k].to_vec(),
        };
        for cut in [0, 1, 8, 33, tokens] {
            let parts = [part(0..cut), part(cut..tokens)];
            let y = parts.map(|batch| forward(&layer, &batch, &mut workspace).bits());
            assert_eq!(y.concat(), expected, "cut at {cut}");
        }
        // Other places in memory, the same global order: a permuting map.
        let map: Vec<i32> = vec![3, 0, 4, 1, 2];
        let moved = |stack: &[_]| -> Vec<_> {
            let of = |local: i32| map.iter().position(|&e| e == local).unwrap();
            (0..5).map(|local| Clone::clone(&stack[of(local)])).collect()
        };
        let (w13, w2) = (moved(&given.w13), moved(&given.w2));
        let config = marlinspike::w4a8::moe::MoeConfig {
            expert_map: Some(map.clone()),
            ..given.config.clone()
        };
        let permuted = Given { w13, w2, config };
        let y = forward(&permuted.engine(), &batch, &mut workspace);
        assert_eq!(y.bits(), expected, "experts permuted");
    }
}

/// A rank with only experts 1 and 3.
#[test]
fn experts_elsewhere_add_nothing() {
    let mut rng = Rng::new(9);
    let groups = [GroupSize::Channel, GroupSize::Of(32)];
    let sizes = Sizes { experts: 2, size_h: 40, size_i: 64, groups, nr: 4 };
    let mut given = Given::new(sizes, 10);
    given.config.num_experts = 4;
    given.config.expert_map = Some(vec![-1, 1, -1, 0]);
    for ty in TYPES {
        let any = |rng: &mut Rng, _| rng.below(5) as i32 - 1;
        let batch = Batch::new(sizes, ty, 23, 2, &mut rng, any);
        let expected = given.oracle().forward(&Scalar, &batch.x, batch.routed()).unwrap();
        let y = forward(&given.engine(), &batch, &mut Workspace::default());
        assert_eq!(y.bits(), expected.bits(), "{ty}");
    }
}

/// Routing inside the layer equals the router's, for every kind of router.
#[test]
fn logits_go_where_the_router_says() {
    let mut rng = Rng::new(11);
    let groups = [GroupSize::Channel; 2];
    let sizes = Sizes { experts: 12, size_h: 16, size_i: 16, groups, nr: 8 };
    let bias: Vec<f32> = (0..12).map(|_| rng.below(64) as f32 / 64.0 - 0.5).collect();
    let bias: &'static [f32] = bias.leak();
    for round in 0..48 {
        let mut given = Given::new(sizes, 12 + round);
        let scoring = [ScoringFunc::Softmax, ScoringFunc::Sigmoid][rng.below(2)];
        let top_k = 1 + rng.below(6);
        let mut router = Router::new(scoring, top_k, rng.below(2) == 0);
        if round % 3 > 0 {
            let topk_group = 2 + rng.below(2);
            router.groups = Some(Groups { num_expert_group: 4, topk_group });
            router.routed_scaling_factor = 2.5;
            router.logits_type = [ScalarType::FLOAT32, ScalarType::BFLOAT16][rng.below(2)];
        }
        router.bias = (round % 2 == 0).then_some(bias);
        given.config.router = router.clone().into();
        let tokens = rng.below(40);
        // Few values: many ties.
        let logits: Vec<f32> = (0..tokens * 12).map(|_| rng.below(9) as f32 / 4.0 - 1.0).collect();
        let routing = router.route(rows_of("x", &logits, 12).unwrap()).unwrap();
        let batch = Batch {
            topk_ids: routing.topk_ids.into_raw_vec_and_offset().0,
            topk_weights: routing.topk_weights.into_raw_vec_and_offset().0,
            ..Batch::new(sizes, ScalarType::FLOAT32, tokens, top_k, &mut rng, |_, _| 0)
        };
        let (layer, mut workspace) = (given.engine(), Workspace::default());
        let expected = forward(&layer, &batch, &mut workspace);
        let mut y = batch.output();
        let (x, out) = (batch.x.view(sizes.size_h).unwrap(), y.view_mut(sizes.size_h).unwrap());
        layer.forward(x, rows_of("x", &logits, 12).unwrap(), &mut workspace, out).unwrap();
        assert_eq!(y.bits(), expected.bits(), "{router:?}");
    }
}

/// More tokens than one pass of the steps processes.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation")]
fn long_batches_are_cut() {
    let mut rng = Rng::new(13);
    let groups = [GroupSize::Channel; 2];
    let sizes = Sizes { experts: 3, size_h: 32, size_i: 32, groups, nr: 8 };
    let given = Given::new(sizes, 14);
    let any = |rng: &mut Rng, _| rng.below(3) as i32;
    let batch = Batch::new(sizes, ScalarType::FLOAT32, 2100, 1, &mut rng, any);
    let kernel = fastest();
    let expected = given.oracle().forward(kernel.as_ref(), &batch.x, batch.routed()).unwrap();
    let y = forward(&given.engine(), &batch, &mut Workspace::default());
    assert_eq!(y.bits(), expected.bits());
}

#[test]
fn inputs_that_do_not_fit_are_refused_and_nothing_is_written() {
    let mut rng = Rng::new(15);
    let groups = [GroupSize::Of(32); 2];
    let sizes = Sizes { experts: 3, size_h: 64, size_i: 32, groups, nr: 8 };
    let given = Given::new(sizes, 16);
    let layer = given.engine();
    let batch = Batch::new(sizes, ScalarType::FLOAT32, 4, 2, &mut rng, |_, i| i as i32 % 3);
    let mut workspace = Workspace::default();
    let mut refuse = |x: &Values, routed: Routed<'_>, out: &mut Values| {
        let before = out.bits();
        let refused = x
            .view(64)
            .and_then(|x| layer.forward_routed(x, routed, &mut workspace, out.view_mut(64)?));
        assert_eq!(out.bits(), before);
        refused.unwrap_err()
    };
    let short = Values::F32(vec![0.0; 63]);
    let refused = refuse(&short, batch.routed(), &mut batch.output());
    assert!(matches!(&refused, Error::Shape { tensor, .. } if tensor == "x"), "{refused}");
    let refused = refuse(&batch.x, batch.routed(), &mut short.clone());
    assert!(matches!(&refused, Error::Shape { tensor, .. } if tensor == "out"), "{refused}");
    let refused = refuse(&batch.x, batch.routed(), &mut Values::Bf16(vec![0; 256]));
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
    let refused = Routed::from_rows(3, &batch.topk_ids, &batch.topk_weights).unwrap_err();
    assert!(matches!(refused, Error::Shape { .. }), "{refused}");
    let topk_ids = [0, 1, 2, 3, 0, 1, 2, 0];
    let routed = Routed::from_rows(batch.top_k, &topk_ids, &batch.topk_weights).unwrap();
    let Error::Value { index, .. } = refuse(&batch.x, routed, &mut batch.output()) else {
        panic!("another error")
    };
    assert_eq!(index, [1, 1]);
    let mut logits = Array2::zeros((4, 3));
    logits[[2, 1]] = f32::NAN;
    let (x, mut out) = (batch.x.view(64).unwrap(), batch.output());
    let mut refuse = |x: FloatView2<'_>, logits: ArrayView2<'_, f32>| {
        let refused = layer.forward(x, logits, &mut workspace, out.view_mut(64).unwrap());
        assert_eq!(out.bits(), batch.output().bits());
        refused.unwrap_err()
    };
    let refused = refuse(x, logits.view());
    assert!(matches!(refused, Error::Value { .. }), "{refused:?}");
    let refused = refuse(x, logits.slice(s![.., ..2]));
    assert!(
        matches!(&refused, Error::Shape { tensor, .. } if tensor == "router_logits"),
        "{refused}"
    );
    let refused = refuse(x, logits.slice(s![..2, ..]));
    assert!(matches!(&refused, Error::Shape { tensor, .. } if tensor == "x"), "{refused}");
    // The same number of values in other rows, a type that the path lacks, other strides.
    logits[[2, 1]] = 0.0;
    let refused = refuse(batch.x.view(32).unwrap(), logits.view());
    assert!(matches!(&refused, Error::Shape { tensor, .. } if tensor == "x"), "{refused}");
    let halves = Array2::from_elem((4, 64), f16::ZERO);
    let refused = refuse(halves.view().into(), logits.view());
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
    let columns = Array2::<f32>::zeros((64, 4));
    let refused = refuse(columns.t().into(), logits.view());
    assert!(matches!(&refused, Error::NotContiguous { tensor, .. } if tensor == "x"), "{refused}");
}
