//! The layer on the int4 path compared with a token-by-token computation, and the parameters that
//! do not change a bit.

use marlinspike::Error;
use marlinspike::case::{Activation, ActivationRounding, ScoringFunc};
use marlinspike::layouts::kleidi::{Columns, PackedRhs, RhsLayout};
use marlinspike::moe::layer::Routed;
use marlinspike::moe::math;
use marlinspike::moe::router::Router;
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::{ScalarType, bf16_to_f32, f32_to_bf16_rne};
use marlinspike::vectors::Rng;
use marlinspike::w4a8::moe::{Layer, Mode, Refusal, Settings};
use marlinspike::w4a8::{Values, fastest, kernels, quantize, scalar};

const H: usize = 64;
const I: usize = 32;
const EXPERTS: usize = 5;
const TOKENS: usize = 11;
const TOP_K: usize = 2;

/// Weights, tokens and their routing.
struct Given {
    columns: [Vec<Columns>; 2],
    packed: [Vec<PackedRhs<'static>>; 2],
    x: Vec<f32>,
    topk_ids: Vec<i32>,
    topk_weights: Vec<f32>,
}

impl Given {
    fn new(group: i64, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let group = GroupSize::from_config(group).unwrap();
        let mut stack = |size_k: usize, size_n: usize| -> Vec<Columns> {
            let shape = Shape::new(size_k, size_n);
            (0..EXPERTS)
                .map(|_| {
                    let codes = (0..shape.len()).map(|_| rng.below(16) as i8 - 8).collect();
                    let mut float = || (1 + rng.below(300)) as f32 / 8192.0;
                    let bias: Vec<f32> = (0..size_n).map(|_| float()).collect();
                    match group {
                        GroupSize::Of(g) if g < size_k => {
                            let scales = (0..size_n * size_k / g).map(|_| f32_to_bf16_rne(float()));
                            let scales = scales.collect();
                            Columns::group_wise(shape, g, codes, scales, Some(&bias)).unwrap()
                        }
                        _ => {
                            let scales: Vec<f32> = (0..size_n).map(|_| float()).collect();
                            Columns::channel_wise(shape, codes, &scales, Some(&bias)).unwrap()
                        }
                    }
                })
                .collect()
        };
        let columns = [stack(H, 2 * I), stack(I, H)];
        let pack = |columns: &[Columns]| {
            let layout = |c: &Columns| RhsLayout::new(c.shape(), c.group_size(), 8).unwrap();
            columns.iter().map(|c| layout(c).pack(c).unwrap()).collect()
        };
        let packed = [pack(&columns[0]), pack(&columns[1])];
        let x = (0..TOKENS * H).map(|_| (rng.below(4001) as f32 - 1800.0) / 512.0).collect();
        let logits: Vec<f32> =
            (0..TOKENS * EXPERTS).map(|_| rng.below(1000) as f32 / 250.0).collect();
        let routing = Router::new(ScoringFunc::Softmax, TOP_K, true)
            .route(rows_of("x", &logits, EXPERTS).unwrap());
        let routing = routing.unwrap();
        let topk_ids = routing.topk_ids.into_raw_vec_and_offset().0;
        let topk_weights = routing.topk_weights.into_raw_vec_and_offset().0;
        Self { columns, packed, x, topk_ids, topk_weights }
    }

    fn layer(&self, mode: Mode) -> Layer<'_> {
        Layer {
            w13: &self.packed[0],
            w2: &self.packed[1],
            num_experts: EXPERTS,
            expert_map: None,
            activation: Activation::Silu,
            rounding: ActivationRounding::HalfAway,
            router_weight_on_input: false,
            mode,
        }
    }

    fn routed(&self) -> Routed<'_> {
        Routed::from_rows(TOP_K, &self.topk_ids, &self.topk_weights).unwrap()
    }

    fn values(&self, ty: ScalarType) -> Values {
        Values::from_f32(self.x.clone(), ty).unwrap()
    }

    /// One token after the other, with its experts in ascending order and explicit roundings.
    fn expected(&self, layer: &Layer<'_>, ty: ScalarType) -> Vec<u32> {
        let bf16 = ty == ScalarType::BFLOAT16;
        let round = |x: f32| if bf16 { bf16_to_f32(f32_to_bf16_rne(x)) } else { x };
        let on_input = layer.router_weight_on_input;
        // With weights on the input, everything up to the sum is f32.
        let (inner, inner_round): (_, &dyn Fn(f32) -> f32) =
            if on_input { (ScalarType::FLOAT32, &|x| x) } else { (ty, &round) };
        let product = |x: Vec<f32>, columns: &Columns| {
            let x = Values::from_f32(x, inner).unwrap();
            let rows = quantize(&x, columns.shape().size_k, layer.rounding).unwrap();
            scalar::product(&rows, columns, inner).unwrap().to_f32()
        };
        let x = self.values(ty).to_f32();
        let mut y = Vec::new();
        for token in 0..TOKENS {
            let mut slots: Vec<usize> = (token * TOP_K..(token + 1) * TOP_K).collect();
            slots.sort_by_key(|&slot| self.topk_ids[slot]);
            let mut sum = vec![0f32; H];
            for slot in slots {
                let (expert, weight) = (self.topk_ids[slot] as usize, self.topk_weights[slot]);
                let scaled = |x: &f32| if on_input { x * weight } else { *x };
                let row = x[token * H..][..H].iter().map(scaled).collect();
                let gate_up = product(row, &self.columns[0][expert]);
                let activated = (0..I).map(|i| {
                    let (g, u) = (gate_up[i], gate_up[I + i]);
                    let r = inner_round;
                    match layer.activation {
                        Activation::SwigluOai => {
                            let (g, u) = (g.min(7.0), u.clamp(-7.0, 7.0));
                            let sigmoid = r(1.0 / (1.0 + math::exp(-r(g * 1.702))));
                            r(r(u + 1.0) * r(g * sigmoid))
                        }
                        _ => r(g / (1.0 + math::exp(-g)) * u),
                    }
                });
                let down = product(activated.collect(), &self.columns[1][expert]);
                for (sum, down) in sum.iter_mut().zip(down) {
                    *sum = match (on_input, bf16) {
                        (true, _) => round(*sum + round(down)),
                        (false, _) => *sum + down * weight,
                    };
                }
            }
            y.extend(sum);
        }
        Values::from_f32(y, ty).unwrap().bits()
    }
}

#[test]
fn the_layer_is_what_its_tokens_say() {
    for (group, seed) in [(-1, 1), (32, 2)] {
        let given = Given::new(group, seed);
        for activation in [Activation::Silu, Activation::SwigluOai, Activation::SwigluStep] {
            for ty in [ScalarType::FLOAT32, ScalarType::BFLOAT16] {
                for router_weight_on_input in [false, true] {
                    let layer =
                        Layer { activation, router_weight_on_input, ..given.layer(Mode::Extended) };
                    let expected = given.expected(&layer, ty);
                    for kernel in kernels() {
                        let y = layer.forward(kernel.as_ref(), &given.values(ty), given.routed());
                        let name = kernel.name();
                        assert_eq!(
                            y.unwrap().bits(),
                            expected,
                            "{activation} {ty} on input {router_weight_on_input} {name}"
                        );
                    }
                }
            }
        }
    }
}

/// Threads, batches and experts without tokens do not change a bit.
#[test]
fn nothing_else_changes_a_bit() {
    let given = Given::new(32, 3);
    let layer = given.layer(Mode::Upstream);
    let x = given.values(ScalarType::FLOAT32);
    let whole = layer.forward(fastest().as_ref(), &x, given.routed()).unwrap();
    for threads in [1, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let y = pool.install(|| layer.forward(fastest().as_ref(), &x, given.routed()));
        assert_eq!(y.unwrap(), whole, "{threads} threads");
    }
    let part = |tokens: std::ops::Range<usize>| {
        let x = Values::F32(given.x[tokens.start * H..tokens.end * H].to_vec());
        let slots = tokens.start * TOP_K..tokens.end * TOP_K;
        let topk_ids = &given.topk_ids[slots.clone()];
        let routed = Routed::from_rows(TOP_K, topk_ids, &given.topk_weights[slots]).unwrap();
        layer.forward(fastest().as_ref(), &x, routed).unwrap().bits()
    };
    for cut in 0..=TOKENS {
        assert_eq!([part(0..cut), part(cut..TOKENS)].concat(), whole.bits(), "cut at {cut}");
    }
    // Two more experts without tokens: one before and one after the others.
    for at in [0, EXPERTS] {
        let mut packed = given.packed.clone();
        packed.iter_mut().for_each(|stack| {
            let other = stack[1].clone();
            stack.splice(at..at, [other.clone(), other]);
        });
        let shift = if at == 0 { 2 } else { 0 };
        let topk_ids: Vec<i32> = given.topk_ids.iter().map(|id| id + shift).collect();
        let layer = Layer { w13: &packed[0], w2: &packed[1], num_experts: EXPERTS + 2, ..layer };
        let routed = Routed::from_rows(TOP_K, &topk_ids, &given.topk_weights).unwrap();
        let y = layer.forward(fastest().as_ref(), &x, routed).unwrap();
        assert_eq!(y, whole, "experts added at {at}");
    }
}

/// Ranks that share the experts: in f32, a token whose experts are on one rank has its bits there,
/// and zeros on the others; the parts of all other tokens add up.
#[test]
fn expert_maps_work_beyond_upstream() {
    let given = Given::new(-1, 4);
    let x = given.values(ScalarType::FLOAT32);
    let whole = given.layer(Mode::Upstream).forward(fastest().as_ref(), &x, given.routed());
    let whole = whole.unwrap().to_f32();
    let mut parts = Vec::new();
    for rank in 0..2 {
        let local = |e: usize| e % 2 == rank;
        let here: Vec<usize> = (0..EXPERTS).filter(|&e| local(e)).collect();
        let map: Vec<i32> =
            (0..EXPERTS).map(|e| if local(e) { (e / 2) as i32 } else { -1 }).collect();
        let take = |stack: &[PackedRhs<'static>]| -> Vec<_> {
            here.iter().map(|&e| stack[e].clone()).collect()
        };
        let (w13, w2) = (take(&given.packed[0]), take(&given.packed[1]));
        let layer =
            Layer { w13: &w13, w2: &w2, expert_map: Some(&map), ..given.layer(Mode::Extended) };
        parts.push(layer.forward(fastest().as_ref(), &x, given.routed()).unwrap().to_f32());
        // The same layer in upstream's form.
        let upstream = Layer { mode: Mode::Upstream, ..layer };
        let refused = upstream.forward(fastest().as_ref(), &x, given.routed()).unwrap_err();
        assert_eq!(refused, Refusal::ExpertMap.into());
    }
    for (i, &y) in whole.iter().enumerate() {
        let ids = &given.topk_ids[i / H * TOP_K..][..TOP_K];
        let (a, b) = (parts[0][i], parts[1][i]);
        match ids.iter().map(|id| id % 2).sum::<i32>() {
            0 => assert_eq!((a.to_bits(), b), (y.to_bits(), 0.0)),
            2 => assert_eq!((a, b.to_bits()), (0.0, y.to_bits())),
            // Two rows, one on each rank: a sum of two terms does not depend on the order.
            _ => assert_eq!(a + b, y),
        }
    }
}

#[test]
fn upstreams_refusals_have_names() {
    use Mode::{Extended, Upstream};
    let f32s = Settings::new(Activation::Silu, ScalarType::FLOAT32);
    let bf16 = Settings::new(Activation::SwigluOai, ScalarType::BFLOAT16);
    for good in [f32s, bf16, Settings { activation: Activation::SwigluStep, ..f32s }] {
        assert_eq!((Upstream.admit(&good), Extended.admit(&good)), (Ok(()), Ok(())));
    }
    let half = ScalarType::FLOAT16;
    let both = [
        (Settings { num_bits: 8, ..f32s }, Refusal::Bits { found: 8 }),
        (
            Settings { dynamic: false, ..f32s },
            Refusal::InputQuantization { dynamic: false, per_token: true },
        ),
        (
            Settings { per_token: false, ..f32s },
            Refusal::InputQuantization { dynamic: true, per_token: false },
        ),
        (Settings { enable_eplb: true, ..f32s }, Refusal::Eplb),
        (
            Settings { activation: Activation::Gelu, ..f32s },
            Refusal::Activation { found: Activation::Gelu },
        ),
        (Settings { dtype: half, ..f32s }, Refusal::Dtype { found: half }),
    ];
    for (settings, refusal) in both {
        assert_eq!(Upstream.admit(&settings), Err(refusal));
        assert_eq!(Extended.admit(&settings), Err(refusal));
    }
    let upstream_only = [
        (Settings { has_expert_map: true, ..f32s }, Refusal::ExpertMap),
        (Settings { use_grouped_topk: true, ..f32s }, Refusal::GroupedTopk),
        (Settings { router_weight_on_input: false, ..bf16 }, Refusal::WeightedBf16),
    ];
    for (settings, refusal) in upstream_only {
        assert_eq!(Upstream.admit(&settings), Err(refusal));
        assert_eq!(Extended.admit(&settings), Ok(()));
    }
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let given = Given::new(32, 5);
    let kernel = fastest();
    let layer = given.layer(Mode::Extended);
    let x = given.values(ScalarType::FLOAT32);
    let run = |layer: Layer<'_>, x: &Values, routed: Routed<'_>| {
        layer.forward(kernel.as_ref(), x, routed).unwrap_err()
    };
    let routed = given.routed();
    let refused = run(Layer { w2: &given.packed[1][1..], ..layer }, &x, routed);
    assert!(matches!(refused, Error::Size { .. }), "{refused}");
    let refused = run(Layer { w13: &given.packed[1], ..layer }, &x, routed);
    assert!(matches!(refused, Error::Shape { .. }), "{refused}");
    let refused = run(Layer { num_experts: 7, ..layer }, &x, routed);
    assert!(matches!(refused, Error::Size { .. }), "{refused}");
    let refused = run(Layer { expert_map: Some(&[0, 1]), ..layer }, &x, routed);
    assert!(matches!(refused, Error::Shape { .. }), "{refused}");
    let refused = run(Layer { expert_map: Some(&[0, 1, 2, 3, 5]), ..layer }, &x, routed);
    assert!(matches!(refused, Error::Value { .. }), "{refused}");
    let refused = run(layer, &Values::F32(vec![0.0; 3]), routed);
    assert!(matches!(refused, Error::Shape { .. }), "{refused}");
    let refused = Routed::from_rows(TOP_K, &given.topk_ids, &[1.0]).unwrap_err();
    assert!(matches!(refused, Error::Shape { .. }), "{refused}");
    let mut ids = given.topk_ids.clone();
    ids[3] = EXPERTS as i32;
    let refused = run(layer, &x, Routed::from_rows(TOP_K, &ids, &given.topk_weights).unwrap());
    let Error::Value { index, .. } = &refused else { panic!("{refused}") };
    assert_eq!(index, &[1, 1]);
    // −1 means no expert; upstream has no such id.
    ids[3] = -1;
    let routed = Routed::from_rows(TOP_K, &ids, &given.topk_weights).unwrap();
    assert!(layer.forward(kernel.as_ref(), &x, routed).is_ok());
    let refused = run(Layer { mode: Mode::Upstream, ..layer }, &x, routed);
    assert!(matches!(refused, Error::Value { .. }), "{refused}");
}
