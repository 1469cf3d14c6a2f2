//! A whole expert layer on a GPU, against the reference's canonical arithmetic.

use crate::common;

use crate::common::{Experts, HALVES, Law, Random, Tokens, forward, some_to_none, weight};
use marlinspike::case::Activation;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::Layer;
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike_accel::ops::MarlinLayer;

/// Experts per token.
const TOP_K: usize = 3;

#[test]
fn layers_equal_the_canonical_arithmetic() {
    let Some(device) = common::device_or_skip("layers_equal_the_canonical_arithmetic") else {
        return;
    };
    let mut law = Law::new("expert layer");
    let mut random = Random(0x1A7E_0001_2345_6789);
    // H, I, local experts, k per group, kind.
    use Activation as A;
    let silu = Definition::new(A::Silu);
    let layers = [
        (512, 384, 6, 32, ScalarType::UINT4B8, silu),
        (2048, 128, 4, 128, ScalarType::UINT4B8, Definition::new(A::SwigluOai)),
        (256, 1024, 5, 64, ScalarType::UINT4, Definition::new(A::Gelu)),
        (384, 256, 4, 128, ScalarType::UINT8B128, Definition::new(A::SiluNoMul)),
        (256, 192, 3, 64, ScalarType::UINT8B128, Definition::new(A::SwigluStep)),
        (256, 64, 40, 64, ScalarType::UINT4, silu.with_limit(0.7)),
        (256, 128, 3, 32, ScalarType::UINT4B8, Definition { exchanged: true, ..silu }),
        (256, 128, 130, 128, ScalarType::UINT4B8, Definition::new(A::Relu2)),
        (128, 64, 3, 64, ScalarType::UINT4B8, Definition::new(A::GeluTanhNoMul)),
    ];
    for (i, (h, size_i, experts, group, ty, activation)) in layers.into_iter().enumerate() {
        for dtype in HALVES {
            let group = GroupSize::Of(group);
            let parts = Experts::new([h, size_i], activation, dtype, |shape| {
                let bias = i % 2 == 0;
                (0..experts).map(|_| weight(&mut random, ty, dtype, shape, group, bias)).collect()
            });
            let map = parts.every_other();
            for (expert_map, router_weight_on_input) in
                [(None, false), (None, true), (Some(map.as_slice()), false)]
            {
                let num_experts = expert_map.map_or(experts, <[i32]>::len);
                let layer =
                    Layer { num_experts, expert_map, router_weight_on_input, ..parts.layer() };
                let on_device = MarlinLayer::new(&device, &layer).unwrap();
                for tokens in [1, 7, 10, 40, 130] {
                    let id = |place: usize, expert| match (tokens, place % TOP_K, expert) {
                        // Ten rows of one expert, or forty: more than a block of eight.
                        (10, 0, _) | (40, 1, _) => 0,
                        (10, _, 0) => -1,
                        _ => some_to_none(place, expert),
                    };
                    let inputs = Tokens::new(&mut random, &layer, (tokens, TOP_K), id);
                    let wanted = inputs.canonical(&layer);
                    let Tokens { x, ids, weights, .. } = inputs;
                    let found = forward(&device, &on_device, &x, TOP_K, &ids, &weights);
                    let context = format!(
                        "{dtype}, {ty}, H {h}, I {size_i}, {activation:?}, {tokens} tokens, map {}",
                        expert_map.is_some()
                    );
                    law.equal(&context, &found, &wanted);
                    // A token alone, in another workspace with other tiles.
                    let m = random.below(tokens);
                    let (of, slots) = (m * h..(m + 1) * h, m * TOP_K..(m + 1) * TOP_K);
                    let alone = forward(
                        &device,
                        &on_device,
                        &x[of.clone()],
                        TOP_K,
                        &ids[slots.clone()],
                        &weights[slots],
                    );
                    law.equal(&format!("{context}, token {m} alone"), &alone, &wanted[of]);
                }
            }
        }
    }
    law.held();
}
