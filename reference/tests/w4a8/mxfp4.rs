//! MXFP4 weights with int8 activations: every kernel of this CPU around the edges of blocks, and the
//! engine for any division of work, compared with loops over the formulas.

use marlinspike::case::ActivationRounding;
use marlinspike::container::{Container, write_container};
use marlinspike::formats::mxfp4::Mxfp4Tensors;
use marlinspike::layouts::CPU_E2M1;
use marlinspike::layouts::cpu::CpuTables;
use marlinspike::layouts::e2m1::{E2m1Layout, E2m1Part, E2m1Rows, E2m1Stack, PackedE2m1};
use marlinspike::moe::ScoringFunc;
use marlinspike::moe::activation::Activation;
use marlinspike::moe::families::{Renormalize, RoutingRule};
use marlinspike::moe::layer::Routed;
use marlinspike::moe::router::Router;
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::{ScalarType, bf16_to_f32, f32_to_bf16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::Rng;
use marlinspike::w4a8::e2m1::{E2m1Layer, Linear, kernels, quantize_groups, scalar};
use marlinspike::w4a8::experts::{kernel_names, load};
use marlinspike::w4a8::moe::{ExpertOptions, GatedActivation, Mode, MoeConfig, Workspace};
use marlinspike::w4a8::stored::{self, MoeDescription, OperatorRouting, StoredRouting};
use marlinspike::w4a8::{FamilyRouting, LinearWorkspace, Values};
use marlinspike::weight::Weight;
use marlinspike_golden::Manifest;

/// e2m1 by code.
const E2M1: [f64; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

struct Given {
    shape: Shape,
    blocks: Vec<u8>,
    scales: Vec<u8>,
    bias: Vec<f32>,
}

impl Given {
    fn new(size_k: usize, size_n: usize, rng: &mut Rng) -> Self {
        let mut blocks = Vec::new();
        for _ in 0..size_n {
            // Some columns hold only extreme codes, which gives the largest sums.
            let fixed = [0x77, 0xff, 0xf7][rng.below(3)];
            let extreme = rng.below(4) == 0;
            let byte = |rng: &mut Rng| if extreme { fixed } else { rng.below(256) as u8 };
            blocks.extend((0..size_k / 2).map(|_| byte(rng)));
        }
        let scales = (0..size_n * size_k / 32).map(|_| 115 + rng.below(10) as u8).collect();
        let bias = (0..size_n).map(|_| rng.below(999) as f32 / 37.0 - 13.0).collect();
        Self { shape: Shape::new(size_k, size_n), blocks, scales, bias }
    }

    fn rows(&self) -> E2m1Rows<'_> {
        E2m1Rows { blocks: &self.blocks, scales: &self.scales, bias: Some(&self.bias) }
    }

    fn packed(&self) -> PackedE2m1<'static> {
        E2m1Layout::new(self.shape).unwrap().pack(self.rows(), |n| n).unwrap()
    }

    fn code(&self, k: usize, n: usize) -> usize {
        let byte = self.blocks[n * self.shape.size_k / 2 + k / 2];
        usize::from(if k.is_multiple_of(2) { byte & 15 } else { byte >> 4 })
    }

    /// y of a row and column by the formulas, from the activations.
    fn y(&self, x: &[f32], n: usize) -> f32 {
        let mut a = 0f32;
        for g in 0..self.shape.size_k / 32 {
            let group = &x[32 * g..][..32];
            let top = group.iter().fold(0f32, |a, x| a.max(x.abs()));
            let d = if top == 0.0 { 0.0 } else { top / 127.0 };
            let q = |x: f32| if top == 0.0 { 0.0 } else { (x * (127.0 / top)).round_ties_even() };
            let sum: f64 = (0..32)
                .map(|k| f64::from(q(group[k])) * 2.0 * E2M1[self.code(32 * g + k, n)])
                .sum();
            let scale = 2f64.powi(i32::from(self.scales[n * self.shape.size_k / 32 + g]) - 127);
            a = (sum as f32).mul_add(d / 2.0 * scale as f32, a);
        }
        a + self.bias[n]
    }

    fn expected(&self, x: &[f32]) -> Vec<f32> {
        let rows = x.chunks_exact(self.shape.size_k);
        rows.flat_map(|x| (0..self.shape.size_n).map(|n| self.y(x, n)).collect::<Vec<_>>())
            .collect()
    }
}

/// Rows with an outlier, groups of zeros, and ties.
fn activations(rows: usize, size_k: usize, rng: &mut Rng) -> Vec<f32> {
    let mut x: Vec<f32> =
        (0..rows * size_k).map(|_| (rng.below(2001) as f32 - 1000.0) / 331.0).collect();
    for group in x.chunks_exact_mut(32) {
        match rng.below(8) {
            0 => group.fill(0.0),
            1 => group[rng.below(32)] = -977.0,
            2 => group.iter_mut().enumerate().for_each(|(i, x)| *x = i as f32 * 8.0 - 127.0),
            3 => group.fill(-3.25),
            _ => {}
        }
    }
    x.iter().map(|&x| bf16_to_f32(f32_to_bf16_rne(x))).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn every_kernel_gives_the_bits_of_the_formulas() {
    let rng = &mut Rng::new(4);
    for (size_k, size_n) in
        [(32, 1), (64, 15), (96, 16), (32, 17), (288, 31), (64, 32), (96, 33), (160, 48), (64, 50)]
    {
        let given = Given::new(size_k, size_n, rng);
        for rows in 1..=17 {
            let x = activations(rows, size_k, rng);
            let expected = given.expected(&x);
            let quantized = quantize_groups(&Values::F32(x.clone()), size_k).unwrap();
            let plain = scalar::product(&quantized, given.rows(), ScalarType::FLOAT32).unwrap();
            assert_eq!(plain.bits(), bits(&expected), "{size_k} x {size_n}, {rows} rows");
            for kernel in kernels() {
                let name = kernel.name();
                let linear = Linear::new(given.packed()).with_kernel(kernel);
                let mut y = Values::F32(vec![7.0; rows * size_n]);
                let x = rows_of("x", &x, size_k).unwrap();
                let mut workspace = LinearWorkspace::default();
                linear.forward(x, &mut workspace, y.view_mut(size_n).unwrap()).unwrap();
                assert_eq!(y.bits(), bits(&expected), "{name}, {size_k} x {size_n}, {rows} rows");
            }
        }
    }
}

/// The extremes of scales, groups with NaN and infinities, and groups too small for a scale.
#[test]
fn extreme_scales_and_activations() {
    let rng = &mut Rng::new(5);
    let mut given = Given::new(64, 20, rng);
    for (i, scale) in given.scales.iter_mut().enumerate() {
        *scale = [0, 1, 2, 127, 253, 254][i % 6];
    }
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-36, 1e-40, 1e30] {
        let mut x = activations(3, 64, rng);
        x[64..96].fill(special);
        let quantized = quantize_groups(&Values::F32(x.clone()), 64).unwrap();
        let expected = scalar::product(&quantized, given.rows(), ScalarType::FLOAT32).unwrap();
        let Values::F32(expected) = expected else { panic!("f32") };
        if !special.is_finite() {
            assert!(expected[20..40].iter().all(|y| y.is_nan()), "{special}");
        }
        for kernel in kernels() {
            let name = kernel.name();
            let linear = Linear::new(given.packed()).with_kernel(kernel);
            let mut y = vec![0f32; 60];
            let out = marlinspike::num::array::rows_mut("y", &mut y, 20).unwrap();
            let x = rows_of("x", &x, 64).unwrap();
            linear.forward(x, &mut LinearWorkspace::default(), out).unwrap();
            for (i, (y, e)) in y.iter().zip(&expected).enumerate() {
                let same = y.to_bits() == e.to_bits() || y.is_nan() && e.is_nan();
                assert!(same, "{name}, {special}: output {i} is {y}, expected {e}");
            }
        }
    }
}

#[test]
fn threads_and_cuts_change_no_bit() {
    let rng = &mut Rng::new(6);
    let (size_k, size_n, rows) = (288, 700, 21);
    let given = Given::new(size_k, size_n, rng);
    let x = activations(rows, size_k, rng);
    let narrow: Vec<u16> = x.iter().map(|&x| f32_to_bf16_rne(x)).collect();
    let quantized = quantize_groups(&Values::F32(x.clone()), size_k).unwrap();
    for ty in [ScalarType::FLOAT32, ScalarType::BFLOAT16] {
        let expected = scalar::product(&quantized, given.rows(), ty).unwrap();
        let input = match ty {
            ScalarType::FLOAT32 => Values::F32(x.clone()),
            _ => Values::Bf16(narrow.clone()),
        };
        for threads in [1, 2, 3, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let linear = Linear::new(given.packed());
            let mut y = Values::from_f32(vec![0.0; rows * size_n], ty).unwrap();
            pool.install(|| {
                let (x, out) = (input.view(size_k).unwrap(), y.view_mut(size_n).unwrap());
                linear.forward(x, &mut LinearWorkspace::default(), out).unwrap();
            });
            assert_eq!(y.bits(), expected.bits(), "{ty}, {threads} threads");
        }
    }
}

#[test]
fn positions_agree_with_packed_bytes() {
    let rng = &mut Rng::new(7);
    let given = Given::new(96, 37, rng);
    let (packed, layout) = (given.packed(), E2m1Layout::new(given.shape).unwrap());
    let unpacked = packed.unpack();
    assert_eq!((&unpacked.blocks, &unpacked.scales), (&given.blocks, &given.scales));
    assert_eq!(unpacked.bias, given.bias);
    for byte in 0..layout.packed_len() {
        for bit in [0, 4] {
            let place = layout.locate(byte, bit);
            let n = place.column;
            if n >= 37 {
                assert_eq!(packed.bytes()[byte], 0, "padding at {byte}");
                continue;
            }
            match place.part {
                E2m1Part::Code { k } => {
                    assert_eq!(layout.code_offset(k, n), (byte, bit));
                    assert_eq!(usize::from(packed.bytes()[byte] >> bit & 15), given.code(k, n));
                }
                E2m1Part::Scale { group } => assert_eq!(layout.scale_offset(group, n), byte),
                E2m1Part::Bias => assert_eq!(layout.bias_offset(n), byte / 4 * 4),
            }
        }
    }
}

#[test]
fn wrong_parts_are_named() {
    let rng = &mut Rng::new(8);
    let mut given = Given::new(64, 5, rng);
    let layout = E2m1Layout::new(given.shape).unwrap();
    let message = |e: marlinspike::Error| e.to_string();
    for (size_k, size_n, word) in [(48, 5, "size_k"), (0, 5, "size_k"), (32, 0, "size_n")] {
        let error = message(E2m1Layout::new(Shape::new(size_k, size_n)).unwrap_err());
        assert!(error.contains(word), "{error}");
    }
    let short = E2m1Rows { bias: Some(&given.bias[1..]), ..given.rows() };
    assert!(message(layout.pack(short, |n| n).unwrap_err()).contains("bias"));
    let short = E2m1Rows { blocks: &given.blocks[1..], ..given.rows() };
    assert!(message(layout.pack(short, |n| n).unwrap_err()).contains("blocks"));
    given.scales[3] = 0xff;
    let error = message(layout.pack(given.rows(), |n| n).unwrap_err());
    assert!(error.contains("NaN") && error.contains("[1, 1]"), "{error}");
    assert!(PackedE2m1::new(layout, vec![0; layout.packed_len() - 1]).is_err());
    assert!(E2m1Stack::new("w13", layout, vec![0u8; 0]).is_err());
}

/// The layer against products, activation and sum row by row.
#[test]
fn the_layer_is_its_products() {
    let rng = &mut Rng::new(9);
    let (experts, h, i, tokens, top_k) = (5, 64, 96, 23, 3);
    let w13: Vec<Given> = (0..experts).map(|_| Given::new(h, 2 * i, rng)).collect();
    let w2: Vec<Given> = (0..experts).map(|_| Given::new(i, h, rng)).collect();
    let bytes = |all: &[Given]| -> Vec<u8> {
        all.iter().flat_map(|g| g.packed().bytes().to_vec()).collect()
    };
    let stack = |all: &[Given]| {
        E2m1Stack::new("w", E2m1Layout::new(all[0].shape).unwrap(), bytes(all)).unwrap()
    };
    let config = MoeConfig {
        num_experts: experts,
        expert_map: None,
        router: Router::new(ScoringFunc::Softmax, top_k, true).into(),
        activation: Activation::SwigluOai,
        rounding: ActivationRounding::HalfEven,
        router_weight_on_input: false,
        mode: Mode::Extended,
    };
    let x = activations(tokens, h, rng);
    let logits: Vec<f32> = (0..tokens * experts).map(|_| rng.below(977) as f32 / 99.0).collect();
    let view = rows_of("router_logits", &logits, experts).unwrap();
    let routing = config.router.route(view).unwrap();
    let (ids, weights) = (routing.topk_ids, routing.topk_weights);
    let (ids, weights): (Vec<i32>, Vec<f32>) =
        (ids.iter().copied().collect(), weights.iter().copied().collect());
    for ty in [ScalarType::FLOAT32, ScalarType::BFLOAT16] {
        let round =
            |v: f32| if ty == ScalarType::FLOAT32 { v } else { bf16_to_f32(f32_to_bf16_rne(v)) };
        let mut y = vec![0f32; tokens * h];
        for expert in 0..experts {
            for slot in (0..tokens * top_k).filter(|&s| ids[s] as usize == expert) {
                let row = &x[slot / top_k * h..][..h];
                let gate_up = Values::from_f32(w13[expert].expected(row), ty).unwrap();
                let activated = GatedActivation::SwigluOai.apply(&gate_up, i).unwrap().to_f32();
                for (n, y) in y[slot / top_k * h..][..h].iter_mut().enumerate() {
                    *y += round(w2[expert].y(&activated, n)) * weights[slot];
                }
            }
        }
        let expected = Values::from_f32(y, ty).unwrap();
        let input = Values::from_f32(x.clone(), ty).unwrap();
        for name in kernels().iter().map(|k| k.name()) {
            for threads in [1, 3] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let kernel = kernels().into_iter().find(|k| k.name() == name).unwrap();
                let layer = E2m1Layer::new(stack(&w13), stack(&w2), config.clone()).unwrap();
                let layer = layer.with_kernel(kernel);
                let mut out = Values::from_f32(vec![0.0; tokens * h], ty).unwrap();
                let mut workspace = layer.workspace(tokens);
                pool.install(|| {
                    let (x, y) = (input.view(h).unwrap(), out.view_mut(h).unwrap());
                    layer.forward(x, view, &mut workspace, y).unwrap();
                });
                assert_eq!(out.bits(), expected.bits(), "{name}, {ty}, {threads} threads");
                // One token at a time, with given routes.
                for t in 0..tokens {
                    let slots = t * top_k..(t + 1) * top_k;
                    let routed =
                        Routed::from_rows(top_k, &ids[slots.clone()], &weights[slots]).unwrap();
                    let one = Values::from_f32(x[t * h..][..h].to_vec(), ty).unwrap();
                    let mut out = Values::from_f32(vec![0.0; h], ty).unwrap();
                    let y = out.view_mut(h).unwrap();
                    let mut workspace = Workspace::default();
                    layer.forward_routed(one.view(h).unwrap(), routed, &mut workspace, y).unwrap();
                    assert_eq!(
                        out.bits(),
                        expected.bits()[t * h..][..h],
                        "{name}, {ty}, token {t}"
                    );
                }
            }
        }
    }
}

/// Gate and up interleaved, as gpt-oss stores them, against the separated rows.
#[test]
fn interleaved_rows_are_separated() {
    let rng = &mut Rng::new(10);
    let given = Given::new(64, 12, rng);
    let layout = E2m1Layout::new(given.shape).unwrap();
    let source = |n: usize| if n < 6 { 2 * n } else { 2 * (n - 6) + 1 };
    let unpacked = layout.pack(given.rows(), source).unwrap().unpack();
    for n in 0..12 {
        let from = source(n);
        assert_eq!(unpacked.blocks[n * 32..][..32], given.blocks[from * 32..][..32], "row {n}");
        assert_eq!(unpacked.scales[n * 2..][..2], given.scales[from * 2..][..2], "row {n}");
        assert_eq!(unpacked.bias[n], given.bias[from], "row {n}");
    }
}

/// The layer of a gpt-oss checkpoint against loops over the checkpoint's own tensors.
#[test]
fn a_gpt_oss_checkpoint_runs() {
    let golden = Manifest::load().expect("the golden manifest");
    let dir = golden.path("data/checkpoints/gpt-oss-mxfp4");
    let bytes = std::fs::read(dir.join("model.safetensors")).expect("a golden checkpoint");
    let file = Container::parse(&bytes).expect("a container");
    let tensor = |name: &str| file.tensor(&format!("model.layers.0.mlp.experts.{name}"));
    let layer = E2m1Layer::from_checkpoint(tensor, 1).expect("a layer");
    assert_eq!((layer.hidden_size(), layer.intermediate_size()), (128, 128));
    let given = |name: &str, expert: usize, size_n: usize| {
        let part = |end: &str| tensor(&format!("{name}_{end}")).unwrap();
        let (blocks, scales) = (part("blocks").into_bytes(), part("scales").into_bytes());
        let bias = part("bias");
        let bias = bias.elements::<u16>();
        Given {
            shape: Shape::new(128, size_n),
            blocks: blocks[expert * size_n * 64..][..size_n * 64].to_vec(),
            scales: scales[expert * size_n * 4..][..size_n * 4].to_vec(),
            bias: bias[expert * size_n..][..size_n].iter().map(|&b| bf16_to_f32(b)).collect(),
        }
    };
    let rng = &mut Rng::new(11);
    let tokens = 6;
    let x = activations(tokens, 128, rng);
    let ids: Vec<i32> = (0..tokens).map(|t| (t % 2) as i32).collect();
    let weights: Vec<f32> = (0..tokens).map(|t| 0.25 + t as f32 / 8.0).collect();
    let mut expected = Vec::new();
    for t in 0..tokens {
        let gate_up = given("gate_up_proj", t % 2, 256).expected(&x[t * 128..][..128]);
        let inner: Vec<f32> = (0..128)
            .map(|i| {
                let (g, u) = (gate_up[2 * i].min(7.0), gate_up[2 * i + 1].clamp(-7.0, 7.0));
                let half = Values::F32(vec![g, u]);
                GatedActivation::SwigluOai.apply(&half, 1).unwrap().to_f32()[0]
            })
            .collect();
        let down = given("down_proj", t % 2, 128).expected(&inner);
        expected.extend(down.iter().map(|y| 0.0 + y * weights[t]));
    }
    let routed = Routed::from_rows(1, &ids, &weights).unwrap();
    let mut y = Values::F32(vec![0.0; tokens * 128]);
    let mut workspace = Workspace::default();
    let out = y.view_mut(128).unwrap();
    layer.forward_routed(rows_of("x", &x, 128).unwrap(), routed, &mut workspace, out).unwrap();
    assert_eq!(y.bits(), bits(&expected));

    let missing = |name: &str| match name {
        "down_proj_bias" => Err(marlinspike::Error::missing(name, "a layer")),
        _ => tensor(name),
    };
    let error = E2m1Layer::from_checkpoint(missing, 1).unwrap_err().to_string();
    assert!(error.contains("down_proj_bias"), "{error}");
    let other =
        |name: &str| tensor(if name == "down_proj_scales" { "down_proj_blocks" } else { name });
    let error = E2m1Layer::from_checkpoint(other, 1).unwrap_err().to_string();
    assert!(error.contains("down_proj_blocks") && error.contains("[2, 128, 4]"), "{error}");
    assert!(E2m1Layer::from_checkpoint(tensor, 3).is_err(), "three of two experts");
}

/// The hub's weight of the same columns.
fn hub(given: &Given) -> Weight<'static> {
    let Shape { size_k, size_n } = given.shape;
    let tensor = |name: &str, shape: Vec<usize>, bytes: &[u8]| {
        Tensor::new(name, DType::U8, shape, bytes.to_vec()).unwrap()
    };
    let bias: Vec<f32> = given.bias.clone();
    let tensors = Mxfp4Tensors {
        weight: tensor("w.weight_packed", vec![size_n, size_k / 2], &given.blocks),
        weight_scale: tensor("w.weight_scale", vec![size_n, size_k / 32], &given.scales),
        bias: Some(Tensor::from_vec("w.bias", DType::F32, vec![size_n], bias).unwrap()),
    };
    tensors.unpack("w").unwrap()
}

#[test]
fn packing_the_hubs_weight_gives_the_bytes_of_the_rows() {
    let rng = &mut Rng::new(21);
    for (size_k, size_n) in [(32, 1), (96, 16), (64, 37), (160, 48)] {
        let given = Given::new(size_k, size_n, rng);
        let layout = E2m1Layout::new(given.shape).unwrap();
        let weight = hub(&given);
        let packed = layout.pack_weight(&weight).unwrap();
        assert_eq!(packed, given.packed(), "{size_k} x {size_n}");
        let plain = Weight { bias: None, ..weight.clone() };
        let zeros = vec![0.0; size_n];
        let rows = E2m1Rows { bias: Some(&zeros), ..given.rows() };
        assert_eq!(layout.pack_weight(&plain).unwrap(), layout.pack(rows, |n| n).unwrap());
        assert_eq!((CPU_E2M1.pack)(&weight, 16).unwrap(), packed.bytes());
        let sizes = (CPU_E2M1.sizes)(given.shape, GroupSize::Of(32), 16, CpuTables::NONE).unwrap();
        assert_eq!((sizes.packed_len, sizes.groups), (packed.bytes().len(), size_k / 32));
    }
    let given = Given::new(64, 5, rng);
    let (weight, layout) = (hub(&given), E2m1Layout::new(given.shape).unwrap());
    let refused = |weight: &Weight<'_>| layout.pack_weight(weight).unwrap_err().to_string();
    let nan = weight.scales.map(weight.scales.ty(), |_| 0xff);
    assert!(refused(&Weight { scales: nan, ..weight.clone() }).contains("NaN"));
    let other = Weight { ty: ScalarType::UINT4B8, ..weight.clone() };
    assert!(refused(&other).contains("uint4b8 codes"));
    let global = Weight { global_scale: Some(2.0), ..weight.clone() };
    assert!(refused(&global).contains("global scale"));
    let narrow = E2m1Layout::new(Shape::new(64, 4)).unwrap();
    assert!(narrow.pack_weight(&weight).unwrap_err().to_string().contains("[64, 5]"));
    for (group, nr, word) in [(GroupSize::Of(64), 16, "group_size"), (GroupSize::Of(32), 8, "nr")] {
        let error =
            (CPU_E2M1.sizes)(given.shape, group, nr, CpuTables::NONE).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}

/// A file with experts, and their description.
fn stored_experts(limit: f32, rng: &mut Rng) -> (MoeDescription, Vec<Given>, Vec<Given>) {
    let (experts, h, i) = (3, 64, 32);
    let w13 = (0..experts).map(|_| Given::new(h, 2 * i, rng)).collect();
    let w2 = (0..experts).map(|_| Given::new(i, h, rng)).collect();
    let rule = RoutingRule {
        activation: Activation::SwigluOai,
        swiglu_limit: Some(limit),
        ..RoutingRule::softmax(2, Renormalize::SUM)
    };
    let family = FamilyRouting::new(rule, experts, None, None).unwrap();
    let described = MoeDescription {
        format: &CPU_E2M1,
        hidden_size: h,
        intermediate_size: i,
        num_experts: experts,
        expert_map: None,
        group_size: GroupSize::Of(32),
        nr: 16,
        tables: CpuTables::NONE,
        routing: StoredRouting::Family(Box::new(family)),
    };
    (described, w13, w2)
}

/// The bytes of a packed file.
fn file(description: &serde_json::Value, w13: &[Given], w2: &[Given]) -> Vec<u8> {
    let tensor = |which: &str, all: &[Given]| {
        let bytes: Vec<u8> = all.iter().flat_map(|g| g.packed().bytes().to_vec()).collect();
        let shape = vec![all.len(), bytes.len() / all.len()];
        Tensor::new(format!("m.experts.{which}_packed"), DType::U8, shape, bytes).unwrap()
    };
    let metadata = [("marlinspike.w4a8.m.experts".to_owned(), description.to_string())];
    let tensors = [tensor("w13", w13), tensor("w2", w2)];
    write_container(&tensors, &metadata.into(), Vec::new()).unwrap()
}

const OPTIONS: ExpertOptions<'static> =
    ExpertOptions { rounding: ActivationRounding::HalfAway, mode: Mode::Extended, kernel: None };

#[test]
fn a_stored_layer_is_its_products() {
    let rng = &mut Rng::new(22);
    // Small, so that it matters.
    let limit = 2.5;
    let (described, w13, w2) = stored_experts(limit, rng);
    let bytes = file(&described.to_json(), &w13, &w2);
    let container = Container::parse(&bytes).unwrap();
    assert_eq!(MoeDescription::read(&container, "m.experts").unwrap(), described);
    let (tokens, x) = (9, activations(9, 64, rng));
    let logits: Vec<f32> = (0..tokens * 3).map(|_| rng.below(977) as f32 / 99.0).collect();
    // Softmax over the two best of three.
    let mut expected = Vec::new();
    for (x, logits) in x.chunks_exact(64).zip(logits.chunks_exact(3)) {
        let worst = (0..3).min_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
        let mut y = vec![0f64; 64];
        let exp = |e: usize| f64::from(logits[e]).exp();
        let sum: f64 = (0..3).filter(|&e| e != worst).map(exp).sum();
        for e in (0..3).filter(|&e| e != worst) {
            let gate_up = w13[e].expected(x);
            let (gate, up) = gate_up.split_at(32);
            let activated: Vec<f32> = gate
                .iter()
                .zip(up)
                .map(|(&g, &u)| {
                    let g = f64::from(g.min(limit));
                    let u = f64::from(u.clamp(-limit, limit));
                    (g / (1.0 + (-1.702 * g).exp()) * (u + 1.0)) as f32
                })
                .collect();
            let down = w2[e].expected(&activated);
            y.iter_mut().zip(down).for_each(|(y, d)| *y += exp(e) / sum * f64::from(d));
        }
        expected.extend(y);
    }
    let view = rows_of("router_logits", &logits, 3).unwrap();
    let rows = rows_of("x", &x, 64).unwrap();
    for name in kernel_names(&CPU_E2M1) {
        let options = ExpertOptions { kernel: Some(name), ..OPTIONS };
        let layer = load(&container, "m.experts", options).unwrap();
        assert_eq!(layer.kernel_name(), name);
        let mut y = vec![0f32; tokens * 64];
        let out = marlinspike::num::array::rows_mut("y", &mut y, 64).unwrap();
        let mut workspace = layer.workspace(tokens);
        layer.forward(rows.into(), view, &mut workspace, out.into()).unwrap();
        let routing = layer.router().route(view).unwrap();
        let definition = layer.definition(&Values::F32(x.clone()), routing.routed().unwrap());
        assert_eq!(bits(&y), definition.unwrap().bits(), "{name}");
        // A code of the activated rows that f64 rounds the other way changes a result by less than
        // 1/127 of a group; everything else is f32's rounding.
        let size = expected.iter().fold(0f64, |a, y| a.max(y.abs()));
        for (i, (y, e)) in y.iter().zip(&expected).enumerate() {
            assert!((f64::from(*y) - e).abs() < 0.01 * size, "{name} {i}: {y}, expected {e}");
        }
        let close =
            y.iter().zip(&expected).filter(|(y, e)| (f64::from(**y) - **e).abs() < 1e-5 * size);
        assert!(close.count() * 10 > y.len() * 9, "{name}: most have no such code");
    }
    let unknown = ExpertOptions { kernel: Some("mmx"), ..OPTIONS };
    let error = load(&container, "m.experts", unknown).unwrap_err().to_string();
    assert!(error.contains("mmx") && error.contains("scalar"), "{error}");
    // The int4 layer does not take these bytes.
    let error = stored::experts(&container, "m.experts").unwrap_err().to_string();
    assert!(error.contains("mxfp4_int8") && error.contains("int4"), "{error}");
}

#[test]
fn a_wrong_description_is_named() {
    let rng = &mut Rng::new(23);
    let (described, w13, w2) = stored_experts(7.0, rng);
    let good = described.to_json();
    let changes: [(&str, serde_json::Value, &str); 9] = [
        ("weights", "mxfp5".into(), "one of int4, mxfp4_int8"),
        ("weights", serde_json::Value::Null, "weights"),
        ("version", 2.into(), "weights"),
        ("version", 5.into(), "1 to 4"),
        ("version", 4.into(), "zero_points"),
        ("nr", 8.into(), "nr"),
        ("group_size", 64.into(), "group_size"),
        ("hidden_size", 96.into(), "w13_packed"),
        ("intermediate_size", 48.into(), "size_k"),
    ];
    for (key, value, word) in changes {
        let mut wrong = good.clone();
        wrong[key] = value.clone();
        let bytes = file(&wrong, &w13, &w2);
        let error = load(&Container::parse(&bytes).unwrap(), "m.experts", OPTIONS).unwrap_err();
        assert!(error.to_string().contains(word), "{key} {value}: {error}");
    }
    let mut rule = good.clone();
    rule["routing"]["apply_router_weight_on_input"] = true.into();
    let bytes = file(&rule, &w13, &w2);
    let error = load(&Container::parse(&bytes).unwrap(), "m.experts", OPTIONS).unwrap_err();
    assert!(error.to_string().contains("on the input"), "{error}");
    // Upstream's settings become a family's rule.
    let operator = MoeDescription {
        routing: StoredRouting::Operator(OperatorRouting {
            top_k: 2,
            scoring_func: ScoringFunc::Softmax,
            renormalize: true,
            activation: Activation::Silu,
            router_weight_on_input: false,
        }),
        ..described
    };
    let bytes = file(&operator.to_json(), &w13, &w2);
    let layer = load(&Container::parse(&bytes).unwrap(), "m.experts", OPTIONS).unwrap();
    assert_eq!(layer.activation(), GatedActivation::Silu);
}
