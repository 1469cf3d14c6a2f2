//! Int8 weights with int8 activations: every kernel of this CPU around the edges of blocks, tiles and
//! panels, and the engine for any division of work, compared with loops over the formulas; the
//! quantization of activations and the epilogue compared with those of cases.

use marlinspike::container::{Container, write_container};
use marlinspike::layouts::CPU_INT8;
use marlinspike::layouts::cpu::CpuTables;
use marlinspike::layouts::int8::{Int8Layout, Int8Place, Int8Tail, MAX_K, PackedInt8};
use marlinspike::moe::ScoringFunc;
use marlinspike::moe::activation::Activation;
use marlinspike::moe::layer::Routed;
use marlinspike::moe::router::Router;
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::{ScalarType, bf16_to_f32, f32_to_bf16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::products::{Int8Epilogue, Int8Product};
use marlinspike::quantize::Int8Quantizer;
use marlinspike::vectors::Rng;
use marlinspike::w4a8::int8::{Int8Layer, Linear, kernels, quantize_tokens};
use marlinspike::w4a8::linears::{self, LinearOptions};
use marlinspike::w4a8::moe::{ExpertOptions, GatedActivation, Mode, MoeConfig, Workspace};
use marlinspike::w4a8::quantize::ActivationRounding::{self, HalfAway, HalfEven};
use marlinspike::w4a8::stored::{
    LinearDescription, MoeDescription, OperatorRouting, StoredRouting,
};
use marlinspike::w4a8::{LinearWorkspace, Values, experts};
use marlinspike::weight::{Codes, Groups, Table, Weight};

/// A weight row by output feature, as checkpoints store it.
#[derive(Debug, Clone)]
struct Given {
    shape: Shape,
    codes: Vec<i8>,
    scales: Vec<f32>,
    bias: Vec<f32>,
}

impl Given {
    /// Some columns hold only extreme codes, which gives the largest sums.
    fn new(size_k: usize, size_n: usize, rng: &mut Rng) -> Self {
        let mut codes = Vec::new();
        for _ in 0..size_n {
            let fixed = [-128, 127][rng.below(2)];
            let extreme = rng.below(4) == 0;
            let code = |rng: &mut Rng| if extreme { fixed } else { rng.below(256) as u8 as i8 };
            codes.extend((0..size_k).map(|_| code(rng)));
        }
        let scales = (0..size_n).map(|_| (1 + rng.below(999)) as f32 / 77_777.0).collect();
        let bias = (0..size_n).map(|_| rng.below(999) as f32 / 37.0 - 13.0).collect();
        Self { shape: Shape::new(size_k, size_n), codes, scales, bias }
    }

    fn weight(&self) -> Weight<'static> {
        let Shape { size_k, size_n } = self.shape;
        let code = |k: usize, n: usize| self.codes[n * size_k + k] as u8;
        let table = |values: &[f32]| {
            let array = ndarray::Array2::from_shape_vec((1, size_n), values.to_vec()).unwrap();
            Table::from_array(array).unwrap()
        };
        Weight {
            name: "w".to_owned(),
            ty: ScalarType::INT8,
            codes: Codes::from_fn(8, self.shape, code).unwrap(),
            scales: table(&self.scales),
            zeros: None,
            groups: Groups::Uniform(GroupSize::Channel),
            global_scale: None,
            bias: Some(table(&self.bias)),
        }
    }

    fn packed(&self) -> PackedInt8<'static> {
        Int8Layout::new(self.shape).unwrap().pack_weight(&self.weight()).unwrap()
    }

    /// y of rows by the formulas, from the activations.
    fn expected(&self, x: &[f32], rounding: ActivationRounding) -> Vec<f32> {
        let size_k = self.shape.size_k;
        let mut y = Vec::new();
        for x in x.chunks_exact(size_k) {
            let mut max = x.iter().fold(0f32, |a, x| a.max(x.abs()));
            if rounding == HalfAway {
                max = max.max(1e-10);
            }
            let factor = if max == 0.0 { 0.0 } else { 127.0 / max };
            let q: Vec<i64> = x
                .iter()
                .map(|x| match rounding == HalfAway {
                    true => (x * factor).round().clamp(-128.0, 127.0) as i64,
                    false => (x * factor).round_ties_even().clamp(-128.0, 127.0) as i64,
                })
                .collect();
            for n in 0..self.shape.size_n {
                let w = &self.codes[n * size_k..][..size_k];
                let sum: i64 = q.iter().zip(w).map(|(q, &w)| q * i64::from(w)).sum();
                y.push((sum as f32 * self.scales[n]).mul_add(max / 127.0, self.bias[n]));
            }
        }
        y
    }
}

/// Rows of zeros, of one value, with an outlier, and with ties.
fn activations(rows: usize, size_k: usize, rng: &mut Rng) -> Vec<f32> {
    let mut x: Vec<f32> =
        (0..rows * size_k).map(|_| (rng.below(2001) as f32 - 1000.0) / 331.0).collect();
    for row in x.chunks_exact_mut(size_k) {
        match rng.below(8) {
            0 => row.fill(0.0),
            1 => row[rng.below(size_k)] = -977.0,
            2 => row.iter_mut().enumerate().for_each(|(i, x)| *x = (i % 255) as f32 / 2.0 - 63.5),
            3 => row.fill(-3.25),
            _ => {}
        }
    }
    x.iter().map(|&x| bf16_to_f32(f32_to_bf16_rne(x))).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn run(linear: &Linear<'_>, x: &Values, ty: ScalarType) -> Values {
    let Shape { size_k, size_n } = linear.weight().layout().shape();
    let rows = x.len() / size_k;
    let mut y = Values::from_f32(vec![7.0; rows * size_n], ty).unwrap();
    let (x, out) = (x.view(size_k).unwrap(), y.view_mut(size_n).unwrap());
    linear.forward(x, &mut LinearWorkspace::default(), out).unwrap();
    y
}

#[test]
fn every_kernel_gives_the_bits_of_the_formulas() {
    let rng = &mut Rng::new(4);
    for (size_k, size_n) in
        [(4, 1), (60, 15), (64, 16), (68, 17), (96, 31), (128, 32), (196, 33), (320, 66), (36, 150)]
    {
        let given = Given::new(size_k, size_n, rng);
        for rows in (1..=17).chain([31, 33, 130]) {
            let x = activations(rows, size_k, rng);
            let expected = given.expected(&x, HalfEven);
            for kernel in kernels() {
                let name = kernel.name();
                let linear = Linear::new(given.packed()).with_kernel(kernel);
                let y = run(&linear, &Values::F32(x.clone()), ScalarType::FLOAT32);
                assert_eq!(y.bits(), bits(&expected), "{name}, {size_k} x {size_n}, {rows} rows");
            }
        }
    }
}

/// The largest sums of the largest K: every product of −127 or 127 with −128 has the same sign.
#[test]
fn the_largest_k_does_not_overflow() {
    let size_k = MAX_K / 4 * 4;
    let rng = &mut Rng::new(5);
    let mut given = Given::new(size_k, 3, rng);
    given.codes[..size_k].fill(-128);
    given.codes[size_k..2 * size_k].fill(127);
    let mut x = vec![1.0f32; 18 * size_k];
    x[size_k..].fill(-1.0);
    x[2 * size_k..].iter_mut().step_by(3).for_each(|x| *x = 0.5);
    let expected = given.expected(&x, HalfEven);
    assert_eq!(
        expected[0],
        ((-128 * 127 * size_k as i64) as f32 * given.scales[0]).mul_add(1.0 / 127.0, given.bias[0])
    );
    for kernel in kernels().into_iter().skip(1) {
        let name = kernel.name();
        let linear = Linear::new(given.packed()).with_kernel(kernel);
        let y = run(&linear, &Values::F32(x.clone()), ScalarType::FLOAT32);
        assert_eq!(y.bits(), bits(&expected), "{name}");
    }
    for (size_k, size_n, word) in [(MAX_K + 1, 1, "131071"), (0, 1, "size_k"), (4, 0, "size_n")] {
        let error = Int8Layout::new(Shape::new(size_k, size_n)).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    assert!(
        16_384 * MAX_K as u64 <= i32::MAX as u64 && 16_384 * (MAX_K as u64 + 1) > i32::MAX as u64
    );
}

/// Rows with NaN and infinities, and rows whose factor overflows: codes saturate, −128 included.
#[test]
fn extreme_activations() {
    let rng = &mut Rng::new(6);
    let given = Given::new(68, 20, rng);
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1e-40, 1e-40, 1e30, f32::MAX] {
        let mut x = activations(3, 68, rng);
        x[68..136].fill(0.0);
        x[100] = special;
        x[101] = -special;
        for kernel in kernels() {
            let name = kernel.name();
            let linear = Linear::new(given.packed()).with_kernel(kernel);
            let y = run(&linear, &Values::F32(x.clone()), ScalarType::FLOAT32).to_f32();
            if special.is_finite() {
                assert_eq!(bits(&y), bits(&given.expected(&x, HalfEven)), "{name}, {special}");
            } else {
                assert!(y[20..40].iter().all(|y| y.is_nan()), "{name}, {special}");
                assert!(y[..20].iter().chain(&y[40..]).all(|y| y.is_finite()), "{name}");
            }
        }
    }
    let tiny = quantize_tokens(&Values::F32(vec![-1e-40, 1e-40, 0.0]), 3, HalfEven).unwrap();
    assert_eq!(tiny.codes, [-128, 127, 0]);
}

#[test]
fn threads_and_cuts_change_no_bit() {
    let rng = &mut Rng::new(7);
    let (size_k, size_n, rows) = (292, 700, 37);
    let given = Given::new(size_k, size_n, rng);
    let x = activations(rows, size_k, rng);
    let narrow = Values::Bf16(x.iter().map(|&x| f32_to_bf16_rne(x)).collect());
    for (ty, input) in
        [(ScalarType::FLOAT32, Values::F32(x.clone())), (ScalarType::BFLOAT16, narrow)]
    {
        let expected = Values::from_f32(given.expected(&x, HalfEven), ty).unwrap();
        for threads in [1, 2, 3, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let y = pool.install(|| run(&Linear::new(given.packed()), &input, ty));
            assert_eq!(y.bits(), expected.bits(), "{ty}, {threads} threads");
        }
        let linear = Linear::new(given.packed());
        for m in 0..rows {
            let one = Values::from_f32(x[m * size_k..][..size_k].to_vec(), ty).unwrap();
            assert_eq!(run(&linear, &one, ty).bits(), expected.bits()[m * size_n..][..size_n]);
        }
    }
}

/// Upstream's operators, as cases judge them: the quantizers' codes and scales, and the bits of CUTLASS's
/// epilogue.
#[test]
fn results_are_those_of_upstreams_operators() {
    let rng = &mut Rng::new(8);
    let (size_k, size_n, rows) = (100, 24, 19);
    let given = Given::new(size_k, size_n, rng);
    let x = activations(rows, size_k, rng);
    for (rounding, quantizer) in
        [(HalfEven, Int8Quantizer::Token), (HalfAway, Int8Quantizer::Expert)]
    {
        let mine = quantize_tokens(&Values::F32(x.clone()), size_k, rounding).unwrap();
        let theirs = quantizer.quantize(rows_of("x", &x, size_k).unwrap()).unwrap();
        assert_eq!(mine.codes, theirs.codes.into_raw_vec_and_offset().0, "{quantizer:?}");
        assert_eq!(bits(&mine.scales), bits(&theirs.scales), "{quantizer:?}");
    }
    let rows = quantize_tokens(&Values::F32(x.clone()), size_k, HalfEven).unwrap();
    let weight = given.weight();
    let part = Int8Product {
        a: &rows.codes,
        a_scales: &rows.scales,
        weight: &weight,
        router_weights: None,
        dtype: ScalarType::BFLOAT16,
    };
    let expected = part.outputs(&part.sums().unwrap(), Int8Epilogue::Cutlass);
    let narrow = Values::Bf16(x.iter().map(|&x| f32_to_bf16_rne(x)).collect());
    let y = run(&Linear::new(given.packed()), &narrow, ScalarType::BFLOAT16);
    assert_eq!(y.bits(), expected);
    let other = part.outputs(&part.sums().unwrap(), Int8Epilogue::Triton);
    assert_ne!(y.bits(), other, "the order of the multiplications shows");
}

#[test]
fn positions_agree_with_packed_bytes() {
    let rng = &mut Rng::new(9);
    let given = Given::new(100, 37, rng);
    let (packed, layout) = (given.packed(), Int8Layout::new(given.shape).unwrap());
    assert_eq!(packed.codes(0), given.codes);
    assert_eq!(packed.floats(0, Int8Tail::Scale), given.scales);
    assert_eq!(packed.floats(0, Int8Tail::Bias), given.bias);
    for byte in 0..layout.packed_len() {
        match layout.locate(byte) {
            Int8Place::Code { k, n } if k < 100 && n < 37 => {
                assert_eq!(layout.code_offset(k, n), byte);
                assert_eq!(packed.bytes()[byte] as i8, given.codes[n * 100 + k]);
            }
            Int8Place::Tail { what, n, byte: at } if n < 37 => {
                assert_eq!(layout.tail_offset(what, n) + at, byte);
                if what == Int8Tail::Correction {
                    let sum: i32 =
                        given.codes[n * 100..][..100].iter().map(|&w| i32::from(w)).sum();
                    assert_eq!(packed.bytes()[byte], (-128 * sum).to_le_bytes()[at]);
                }
            }
            _ => assert_eq!(packed.bytes()[byte], 0, "padding at {byte}"),
        }
    }
}

#[test]
fn wrong_weights_are_named() {
    let rng = &mut Rng::new(10);
    let given = Given::new(64, 5, rng);
    let (weight, layout) = (given.weight(), Int8Layout::new(given.shape).unwrap());
    let refused = |weight: &Weight<'_>| layout.pack_weight(weight).unwrap_err().to_string();
    assert!(refused(&Weight { ty: ScalarType::UINT8B128, ..weight.clone() }).contains("uint8b128"));
    let global = Weight { global_scale: Some(2.0), ..weight.clone() };
    assert!(refused(&global).contains("global scale"));
    let zeros = Weight { zeros: Some(weight.scales.clone()), ..weight.clone() };
    assert!(refused(&zeros).contains("zero points"));
    let infinite = given.scales.iter().map(|_| f32::INFINITY).collect();
    let error = refused(&Given { scales: infinite, ..given.clone() }.weight());
    assert!(error.contains("scales [n]") && error.contains("inf"), "{error}");
    let narrow = Int8Layout::new(Shape::new(64, 4)).unwrap();
    assert!(narrow.pack_weight(&weight).unwrap_err().to_string().contains("[64, 5]"));
    for bytes in [0, layout.packed_len() - 1] {
        let error = PackedInt8::new("w13", layout, vec![0; bytes]).unwrap_err().to_string();
        assert!(error.contains("w13"), "{error}");
    }
    for (group, nr, word) in [(GroupSize::Of(64), 16, "group_size"), (GroupSize::Channel, 8, "nr")]
    {
        let sizes = (CPU_INT8.sizes)(given.shape, group, nr, CpuTables::NONE);
        let error = sizes.unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    let tables = CpuTables { zero_points: true, act_order: false };
    assert!((CPU_INT8.sizes)(given.shape, GroupSize::Channel, 16, tables).is_err());
    assert_eq!((CPU_INT8.pack)(&weight, 16).unwrap(), given.packed().bytes());
}

fn stack(all: &[Given]) -> PackedInt8<'static> {
    let bytes: Vec<u8> = all.iter().flat_map(|g| g.packed().into_bytes()).collect();
    PackedInt8::new("w", Int8Layout::new(all[0].shape).unwrap(), bytes).unwrap()
}

/// The layer against products, activation and sum row by row; the last expert has no tokens.
#[test]
fn the_layer_is_its_products() {
    let rng = &mut Rng::new(11);
    let (experts, h, i, tokens, top_k) = (6, 68, 100, 43, 2);
    let w13: Vec<Given> = (0..experts).map(|_| Given::new(h, 2 * i, rng)).collect();
    let w2: Vec<Given> = (0..experts).map(|_| Given::new(i, h, rng)).collect();
    let config = MoeConfig {
        num_experts: experts,
        expert_map: None,
        router: Router::new(ScoringFunc::Softmax, top_k, true).into(),
        activation: Activation::Silu,
        rounding: HalfEven,
        router_weight_on_input: false,
        mode: Mode::Upstream,
    };
    let x = activations(tokens, h, rng);
    let ids: Vec<i32> = (0..tokens).flat_map(|_| [0, 1 + rng.below(experts - 2) as i32]).collect();
    let weights: Vec<f32> = ids.iter().map(|_| rng.below(977) as f32 / 977.0).collect();
    for ty in [ScalarType::FLOAT32, ScalarType::BFLOAT16] {
        let mut y = vec![0f32; tokens * h];
        for expert in 0..experts {
            for slot in (0..tokens * top_k).filter(|&s| ids[s] as usize == expert) {
                let row = &x[slot / top_k * h..][..h];
                let gate_up = w13[expert].expected(row, HalfAway);
                let gate_up = Values::from_f32(gate_up, ty).unwrap();
                let activated = GatedActivation::Silu.apply(&gate_up, i).unwrap().to_f32();
                let down = w2[expert].expected(&activated, HalfAway);
                let down = Values::from_f32(down, ty).unwrap().to_f32();
                for (y, down) in y[slot / top_k * h..][..h].iter_mut().zip(down) {
                    *y += down * weights[slot];
                }
            }
        }
        let expected = Values::from_f32(y, ty).unwrap();
        let input = Values::from_f32(x.clone(), ty).unwrap();
        for name in kernels().iter().map(|k| k.name()) {
            for threads in [1, 3] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let kernel = kernels().into_iter().find(|k| k.name() == name).unwrap();
                let layer = Int8Layer::new(stack(&w13), stack(&w2), config.clone()).unwrap();
                let layer = layer.with_kernel(kernel);
                let forward = |x: &[f32], slots: std::ops::Range<usize>| {
                    let x = Values::from_f32(x.to_vec(), ty).unwrap();
                    let routed =
                        Routed::from_rows(top_k, &ids[slots.clone()], &weights[slots]).unwrap();
                    let mut out = Values::from_f32(vec![0.0; x.len()], ty).unwrap();
                    let (x, y) = (x.view(h).unwrap(), out.view_mut(h).unwrap());
                    layer.forward_routed(x, routed, &mut Workspace::default(), y).unwrap();
                    out.bits()
                };
                let all = pool.install(|| forward(&x, 0..tokens * top_k));
                assert_eq!(all, expected.bits(), "{name}, {ty}, {threads} threads");
                for t in 0..tokens {
                    let one = forward(&x[t * h..][..h], t * top_k..(t + 1) * top_k);
                    assert_eq!(one, expected.bits()[t * h..][..h], "{name}, {ty}, token {t}");
                }
                let none = forward(&[], 0..0);
                assert!(none.is_empty());
            }
        }
        let _ = &input;
    }
    let wrong = Int8Layer::new(stack(&w13), stack(&w13), config.clone()).unwrap_err().to_string();
    assert!(wrong.contains("w13"), "{wrong}");
    let on_input = MoeConfig { router_weight_on_input: true, ..config };
    let wrong = Int8Layer::new(stack(&w13), stack(&w2), on_input).unwrap_err().to_string();
    assert!(wrong.contains("W8A8-int8") && wrong.contains("on the input"), "{wrong}");
}

/// A packed file with a linear layer and with experts: both load by their descriptions, by every kernel.
#[test]
fn stored_layers_are_their_definitions() {
    let rng = &mut Rng::new(12);
    let (h, i) = (64, 36);
    let dense = Given::new(h, 20, rng);
    let w13: Vec<Given> = (0..3).map(|_| Given::new(h, 2 * i, rng)).collect();
    let w2: Vec<Given> = (0..3).map(|_| Given::new(i, h, rng)).collect();
    let linear = LinearDescription {
        format: &CPU_INT8,
        shape: dense.shape,
        group_size: GroupSize::Channel,
        nr: 16,
        tables: CpuTables::NONE,
    };
    let moe = MoeDescription {
        format: &CPU_INT8,
        hidden_size: h,
        intermediate_size: i,
        num_experts: 4,
        expert_map: Some(vec![0, -1, 1, 2]),
        group_size: GroupSize::Channel,
        nr: 16,
        tables: CpuTables::NONE,
        routing: StoredRouting::Operator(OperatorRouting {
            top_k: 2,
            scoring_func: ScoringFunc::Softmax,
            renormalize: true,
            activation: Activation::Silu,
            router_weight_on_input: false,
        }),
    };
    let tensor = |name: &str, shape: Vec<usize>, bytes: Vec<u8>| {
        Tensor::new(name, DType::U8, shape, bytes).unwrap()
    };
    let of = |name: &str, packed: PackedInt8<'static>| {
        tensor(name, vec![3, packed.layout().packed_len()], packed.into_bytes())
    };
    let rhs = dense.packed().into_bytes();
    let tensors = [
        of("m.experts.w13_packed", stack(&w13)),
        of("m.experts.w2_packed", stack(&w2)),
        tensor("m.o.rhs_packed", vec![rhs.len()], rhs),
    ];
    let metadata = [
        ("marlinspike.w4a8.m.experts".to_owned(), moe.to_json().to_string()),
        ("marlinspike.w4a8.m.o".to_owned(), linear.to_json().to_string()),
    ];
    let bytes = write_container(&tensors, &metadata.into(), Vec::new()).unwrap();
    let file = Container::parse(&bytes).unwrap();
    assert_eq!(LinearDescription::read(&file, "m.o").unwrap(), linear);
    let x = Values::F32(activations(9, h, rng));
    for kernel in linears::kernel_names(&CPU_INT8) {
        let options = LinearOptions { rounding: HalfAway, kernel: Some(kernel) };
        let layer = linears::load(&file, "m.o", options).unwrap();
        assert_eq!((layer.kernel_name(), layer.shape()), (kernel, dense.shape));
        let mut y = Values::F32(vec![0.0; 9 * 20]);
        let out = y.view_mut(20).unwrap();
        layer.forward(x.view(h).unwrap(), &mut LinearWorkspace::default(), out).unwrap();
        assert_eq!(y.bits(), bits(&dense.expected(&x.to_f32(), HalfEven)), "{kernel}");
        assert_eq!(y.bits(), layer.definition(&x).unwrap().bits());
        let value = |i: usize| f32::from(dense.codes[i]) * dense.scales[i / h];
        assert_eq!(layer.dequantized(), (0..20 * h).map(value).collect::<Vec<_>>());
    }
    let (ids, weights) = (vec![1, 3, 0, 3, 2, 0], vec![0.5, 0.25, 1.0, 0.75, 0.5, 0.125]);
    let routed = Routed::from_rows(2, &ids, &weights).unwrap();
    let x = Values::F32(activations(3, h, rng));
    for kernel in experts::kernel_names(&CPU_INT8) {
        let options =
            ExpertOptions { rounding: HalfEven, mode: Mode::Extended, kernel: Some(kernel) };
        let layer = experts::load(&file, "m.experts", options).unwrap();
        let mut y = Values::F32(vec![0.0; 3 * h]);
        let (out, workspace) = (y.view_mut(h).unwrap(), &mut Workspace::default());
        layer.forward_routed(x.view(h).unwrap(), routed, workspace, out).unwrap();
        assert_eq!(y.bits(), layer.definition(&x, routed).unwrap().bits(), "{kernel}");
        assert!(y.to_f32().iter().any(|y| *y != 0.0));
    }
    // The int4 layer does not take these bytes, and e2m1 has no linear layers.
    let error = marlinspike::w4a8::Linear::load(&file, "m.o", HalfAway).unwrap_err().to_string();
    assert!(error.contains("int8") && error.contains("int4"), "{error}");
    for (key, value, word) in [
        ("version", 2, "weights"),
        ("version", 4, "1 to 3"),
        ("nr", 8, "nr"),
        ("group_size", 32, "group_size"),
        ("size_k", MAX_K + 1, "size_k"),
        ("size_n", 40, "rhs_packed"),
    ] {
        let mut wrong = linear.to_json();
        wrong[key] = value.into();
        let metadata = [("marlinspike.w4a8.m.o".to_owned(), wrong.to_string())];
        let bytes = write_container(&tensors[2..], &metadata.into(), Vec::new()).unwrap();
        let options = LinearOptions { rounding: HalfAway, kernel: None };
        let error = linears::load(&Container::parse(&bytes).unwrap(), "m.o", options);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(word), "{key} {value}: {error}");
    }
}
