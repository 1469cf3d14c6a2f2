//! The parts of an expert layer around its products, on a GPU, against the reference.

use crate::common;

use crate::common::{HALVES, Law, Random};
use marlinspike::case::{Activation, ScoringFunc};
use marlinspike::moe::Chain;
use marlinspike::moe::activation::{Columns, Definition};
use marlinspike::moe::align::{Absent, Align};
use marlinspike::moe::router::{Groups, Router, Routing};
use marlinspike::moe::sum::sum;
use marlinspike::num::array::{FloatView2, FloatView3, rows_of};
use marlinspike::num::scalar::ScalarType;
use marlinspike_accel::ops::{
    align::{Runs, align_on_device},
    moe_activation, moe_align_block_size, moe_sum, topk_router,
};

#[test]
fn routing_equals_the_reference() {
    let Some(device) = common::device_or_skip("routing_equals_the_reference") else { return };
    let mut law = Law::new("topk_router");
    let mut random = Random(0x0E0E_0001_2345_6789);
    // rows, experts, top_k, groups kept of all.
    let sizes = [
        (64, 8, 2, None),
        (33, 128, 8, None),
        (17, 300, 1, None),
        (40, 256, 8, Some((4, 8))),
        (16, 64, 6, Some((1, 1))),
        (5, 3, 3, None),
    ];
    let types = [ScalarType::FLOAT32, ScalarType::FLOAT16, ScalarType::BFLOAT16];
    for (rows, experts, top_k, groups) in sizes {
        for scoring_func in [ScoringFunc::Softmax, ScoringFunc::Sigmoid] {
            for logits_type in types {
                for variant in 0..4 {
                    let round = |v: f64| logits_type.to_f64(logits_type.encode_rne(v)) as f32;
                    // Variant 2: many equal logits, so that the lower id decides.
                    let coarse = |v: f64| if variant == 2 { v.round() } else { v * 3.0 };
                    let logits: Vec<f32> =
                        (0..rows * experts).map(|_| round(coarse(random.normal()))).collect();
                    let bias: Vec<f32> = (0..experts).map(|_| random.normal() as f32).collect();
                    let router = Router {
                        renormalize: variant % 2 == 1,
                        groups: groups.map(|(topk_group, num_expert_group)| Groups {
                            num_expert_group,
                            topk_group,
                        }),
                        routed_scaling_factor: if variant == 3 { 2.5 } else { 1.0 },
                        bias: (variant >= 2).then_some(&bias),
                        logits_type,
                        ..Router::new(scoring_func, top_k, false)
                    };
                    let wanted =
                        router.route(rows_of("router_logits", &logits, experts).unwrap()).unwrap();
                    let found = topk_router(&device, &router, &logits, experts).unwrap();
                    let context = format!(
                        "[{rows}, {experts}], {scoring_func:?}, {logits_type}, variant {variant}"
                    );
                    let bits = |r: &Routing| {
                        r.topk_weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>()
                    };
                    let ids = |r: &Routing| r.topk_ids.iter().copied().collect::<Vec<_>>();
                    law.equal(&context, &ids(&found), &ids(&wanted));
                    law.equal(&context, &bits(&found), &bits(&wanted));
                }
            }
        }
    }
    law.held();
}

#[test]
fn alignment_equals_the_reference() {
    let Some(device) = common::device_or_skip("alignment_equals_the_reference") else { return };
    let mut law = Law::new("moe_align_block_size");
    let mut random = Random(0x0E0E_0002_2345_6789);
    let sizes = [
        (0, 4),
        (1, 1),
        (40, 8),
        (1000, 128),
        (5000, 300),
        (9000, 8192),
        (32768, 256),
        (70_001, 8),
    ];
    for (entries, num_experts) in sizes {
        // Ids beyond the experts are left out.
        let ids: Vec<i32> = (0..entries).map(|_| random.below(num_experts + 1) as i32).collect();
        let local = random.permutation(num_experts);
        let map: Vec<i32> =
            local.iter().map(|&l| if l % 3 == 0 { l as i32 / 3 } else { -1 }).collect();
        for block_size in [1, 8, 16, 64] {
            for (expert_map, absent) in [
                (None, Absent::Ignore),
                (Some(map.as_slice()), Absent::Ignore),
                (Some(map.as_slice()), Absent::Mark),
            ] {
                let align = Align { block_size, num_experts, expert_map, absent };
                let wanted = align.run(&ids).unwrap();
                let found = moe_align_block_size(&device, &align, &ids).unwrap();
                let context = format!(
                    "{entries} entries, {num_experts} experts, blocks of {block_size}, map {}, \
                     {absent:?}",
                    expert_map.is_some()
                );
                law.equal(&context, &found.sorted_token_ids, &wanted.sorted_token_ids);
                law.equal(&context, &found.expert_ids, &wanted.expert_ids);
                let totals = (found.num_tokens_post_padded, wanted.num_tokens_post_padded);
                assert_eq!(totals.0, totals.1, "{context}");
                let mut places = vec![-1; entries];
                for (place, &entry) in wanted.sorted_token_ids.iter().enumerate() {
                    if let Some(of) = places.get_mut(entry as usize) {
                        *of = place as i32;
                    }
                }
                let runs = Runs::new(&device, &align).unwrap();
                let mut blocks = runs.room(&device, entries, block_size).unwrap();
                let there = device.upload(&ids).unwrap();
                align_on_device(&device, &runs, &there, &mut blocks).unwrap();
                law.equal(&context, &device.download(blocks.place_of()).unwrap(), &places);
            }
        }
    }
    law.held();
}

#[test]
fn activations_equal_the_canonical_chain() {
    let Some(device) = common::device_or_skip("activations_equal_the_canonical_chain") else {
        return;
    };
    let mut law = Law::new("moe_activation");
    let mut random = Random(0x0E0E_0003_2345_6789);
    use Activation as A;
    let kinds = [
        A::Silu,
        A::Gelu,
        A::GeluTanh,
        A::Relu2,
        A::SwigluOai,
        A::SwigluStep,
        A::SiluNoMul,
        A::GeluNoMul,
        A::GeluTanhNoMul,
        A::Relu2NoMul,
    ];
    for dtype in HALVES {
        for kind in kinds {
            let plain = Definition::new(kind);
            let mut all = vec![plain, Definition { exchanged: true, ..plain }];
            if plain.is_gated() {
                all.push(plain.with_limit(1.3));
            }
            for (i, definition) in all.into_iter().enumerate() {
                // Every gate of the type with any up, eight neighbours in a row and, another form of the
                // kernel, one; then rows of ordinary numbers.
                let mut every = |size_i: usize| -> Vec<u16> {
                    let gates: Vec<u16> = (0..=u16::MAX).collect();
                    let row = |gates: &[u16]| -> Vec<u16> {
                        let pair = |&gate| {
                            let up = random.next() as u16;
                            if definition.exchanged { [up, gate] } else { [gate, up] }
                        };
                        let pairs: Vec<[u16; 2]> = gates.iter().map(pair).collect();
                        let part = |i: usize| pairs.iter().map(move |pair| pair[i]);
                        match definition.columns {
                            Columns::Gate => gates.to_vec(),
                            Columns::Interleaved => pairs.concat(),
                            Columns::Halves => part(0).chain(part(1)).collect(),
                        }
                    };
                    gates.chunks(size_i).flat_map(row).collect()
                };
                let (eights, ones) = (every(8), every(1));
                let ordinary = random.halves(dtype, 7 * definition.width_in(96), 2.0);
                for (gate_up, size_i) in [(eights, 8), (ones, 1), (ordinary, 96)] {
                    let width = definition.width_in(size_i);
                    let rows = FloatView2::from_rows("gate_up", dtype, width, &gate_up).unwrap();
                    let wanted = definition.apply(rows, Chain::Canonical).unwrap().into_bits();
                    let found =
                        moe_activation(&device, &definition, &gate_up, dtype, size_i).unwrap();
                    law.equal(&format!("{kind:?} ({i}), {dtype}, I {size_i}"), &found, &wanted);
                }
            }
        }
    }
    law.held();
}

#[test]
fn sums_equal_the_canonical_chain() {
    let Some(device) = common::device_or_skip("sums_equal_the_canonical_chain") else { return };
    let mut law = Law::new("moe_sum");
    let mut random = Random(0x0E0E_0004_2345_6789);
    for dtype in HALVES {
        for (tokens, top_k, size_n) in [(1, 1, 1), (9, 2, 64), (5, 8, 300), (3, 10, 1024)] {
            let len = tokens * top_k * size_n;
            for down in [
                random.halves(dtype, len, 1.0),
                random.any_finite(dtype, len),
                (0..len).map(|_| random.next() as u16).collect(),
            ] {
                let shape = [tokens, top_k, size_n];
                let slots = FloatView3::from_bits("down", dtype, shape, &down).unwrap();
                let wanted = sum(slots, Chain::Canonical).unwrap().into_bits();
                let found = moe_sum(&device, &down, dtype, top_k, size_n).unwrap();
                law.equal(&format!("{dtype}, [{tokens}, {top_k}, {size_n}]"), &found, &wanted);
            }
        }
    }
    law.held();
}
