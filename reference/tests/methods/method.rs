//! Products and layers of methods: both paths give the same bits, which equal results computed by
//! hand.
use marlinspike::Error;
use marlinspike::case::Activation;
use marlinspike::formats::mxfp8;
use marlinspike::formats::nvfp4;
use marlinspike::method::{
    Activations, Arithmetic, MethodLayer, Product, Promotion, Quantizer, Scales,
};
use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::{Layer, Routed};
use marlinspike::num::array::{FloatView2, HalfArray2};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::{ScalarType, f32_to_bf16_rne, f32_to_f16_rne};
use marlinspike::products::schedule::Schedule;
use marlinspike::quantize::{Int8Quantizer, per_group_fp8};
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

const BF16: ScalarType = ScalarType::BFLOAT16;
const F16: ScalarType = ScalarType::FLOAT16;
const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;

/// Codes without NaN, and scales near 2^-6, of any floating-point type of a `Weight`.
fn weight(
    seed: u64,
    ty: ScalarType,
    shape: Shape,
    scale: ScalarType,
    group: GroupSize,
) -> Weight<'static> {
    let mut rng = Rng::new(seed);
    let bits = ty.storage_bits().max(4);
    let codes = Codes::from_fn(bits, shape, |_, _| {
        let code = (rng.next_u32() >> 9) as u8 & (0xff >> (8 - bits));
        if ty == E4M3 && code & 0x7f == 0x7f { 0x31 } else { code }
    });
    let groups = group.groups(shape.k()).unwrap();
    let len = groups * shape.size_n;
    let data = match scale {
        ScalarType::FLOAT32 => {
            TableData::B32((0..len).map(|_| 0x3c80_0000 + (rng.next_u32() >> 10)).collect())
        }
        ScalarType::BFLOAT16 => {
            TableData::B16((0..len).map(|_| 0x3c80 + (rng.next_u32() >> 26) as u16).collect())
        }
        ScalarType::FLOAT8_E8M0FNU => {
            TableData::B8((0..len).map(|_| 118 + (rng.next_u32() >> 29) as u8).collect())
        }
        _ => TableData::B8((0..len).map(|_| 0x20 + (rng.next_u32() >> 27) as u8).collect()),
    };
    Weight {
        name: format!("w{seed}"),
        ty,
        codes: codes.unwrap(),
        scales: Table::new(scale, groups, shape.size_n, data).unwrap(),
        zeros: None,
        groups: Groups::Uniform(group),
        global_scale: (scale == E4M3).then_some(0.0078),
        bias: None,
    }
}

fn bias(seed: u64, size_n: usize) -> Table {
    let mut rng = Rng::new(seed);
    let data = (0..size_n).map(|_| 0x3f00 + (rng.next_u32() >> 25) as u16).collect();
    Table::new(BF16, 1, size_n, TableData::B16(data)).unwrap()
}

fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| (rng.next_u32() >> 8) as f32 / (1 << 22) as f32 - 2.0).collect()
}

fn bits(dtype: ScalarType, values: &[f32]) -> Vec<u16> {
    let round = if dtype == F16 { f32_to_f16_rne } else { f32_to_bf16_rne };
    values.iter().map(|v| round(*v)).collect()
}

/// Every pair of quantizer and weights of a method, with the arithmetics that support it.
fn methods(shape: Shape) -> Vec<(Quantizer, Vec<Weight<'static>>, Vec<Arithmetic>)> {
    use Arithmetic as A;
    let pair = |ty, scale, group| -> Vec<Weight<'static>> {
        [7, 8].map(|seed| weight(seed, ty, shape, scale, group)).into()
    };
    let (fp8, fp4) = (E4M3, ScalarType::FLOAT4_E2M1F);
    let (f32, e8m0) = (ScalarType::FLOAT32, ScalarType::FLOAT8_E8M0FNU);
    let of = GroupSize::Of;
    let channel = pair(fp8, f32, GroupSize::Channel);
    let int8 = pair(ScalarType::INT8, f32, GroupSize::Channel);
    let rows =
        vec![A::Exact, A::Canonical, A::Wgmma(Promotion::Never), A::Wgmma(Promotion::Every128)];
    let wide = vec![A::Exact, A::Canonical];
    vec![
        (Quantizer::Fp8Token, channel.clone(), rows.clone()),
        (Quantizer::Fp8Tensor(None), channel.clone(), rows.clone()),
        (Quantizer::Fp8Tensor(Some(0.0123)), channel.clone(), rows),
        (
            Quantizer::Fp8Group(128),
            pair(fp8, f32, of(128)),
            vec![A::Exact, A::Wgmma(Promotion::Every128)],
        ),
        (
            Quantizer::Block { format: &mxfp8::FORMAT, multipliers: Vec::new() },
            pair(fp8, e8m0, of(32)),
            vec![A::Exact, A::Tcgen05],
        ),
        (Quantizer::Int8(Int8Quantizer::Token), int8.clone(), vec![A::Exact, A::Cutlass]),
        (Quantizer::Int8Factor(0.37), int8.clone(), vec![A::Exact, A::Cutlass]),
        (Quantizer::Int8(Int8Quantizer::TokenAzp), int8.clone(), vec![A::Exact, A::Cutlass]),
        (Quantizer::Int8(Int8Quantizer::Tensor(0.012)), int8.clone(), vec![A::Exact, A::Cutlass]),
        (Quantizer::Int8(Int8Quantizer::TensorAzp(0.012, -9)), int8, vec![A::Exact, A::Cutlass]),
        (
            Quantizer::Block { format: &nvfp4::FORMAT, multipliers: vec![0.004, 0.005] },
            pair(fp4, E4M3, of(16)),
            vec![A::Exact],
        ),
        (Quantizer::None, channel, wide.clone()),
        (Quantizer::None, pair(fp8, e8m0, of(32)), wide.clone()),
        (Quantizer::None, pair(fp4, e8m0, of(32)), wide.clone()),
        (Quantizer::None, pair(fp4, E4M3, of(16)), wide.clone()),
        (Quantizer::None, pair(ScalarType::UINT4B8, BF16, of(32)), wide),
    ]
}

#[test]
fn both_ways_give_the_same_bits() {
    let shape = Shape::new(256, 40);
    let experts = [Some(1), None, Some(0), Some(1), Some(0)];
    let x = numbers(3, experts.len() * shape.size_k);
    let router = [0.3, 9.0, 0.71, 1.0, 0.03];
    for dtype in [BF16, F16] {
        for (quantizer, weights, arithmetics) in methods(shape) {
            let rows =
                quantize(&quantizer, &bits(dtype, &x), dtype, shape.size_k, &experts).unwrap();
            let mut with_bias = weights.clone();
            with_bias.iter_mut().for_each(|w| w.bias = Some(bias(5, shape.size_n)));
            for (weights, router_weights) in [(&weights, Some(&router[..])), (&with_bias, None)] {
                let product = Product {
                    rows: &rows,
                    expert_of: &experts,
                    weights,
                    halves: None,
                    router_weights,
                    dtype,
                };
                let mut seen = Vec::new();
                for &arithmetic in &arithmetics {
                    let found = product.compute(arithmetic).unwrap().into_bits();
                    let defined = product.define(arithmetic).unwrap();
                    assert_eq!(defined.scalar_type(), dtype);
                    assert_eq!(defined.shape(), [experts.len(), shape.size_n]);
                    let context = format!("{quantizer} {} {}", weights[0].ty, arithmetic.name());
                    assert!(found == defined.bits(), "{context}");
                    assert!(found[40..80].iter().all(|&b| b == 0), "{context}: no expert");
                    assert!(found[..40].iter().any(|&b| b != 0), "{context}");
                    seen.push(found);
                }
                // The truncation to 14 bits changes the result.
                if let [exact, _, wgmma, ..] = seen.as_slice() {
                    assert!(exact != wgmma);
                }
            }
        }
    }
}

#[test]
fn scheduled_products_are_within_their_bounds() {
    let shape = Shape::new(256, 40);
    let experts = [Some(1), None, Some(0), Some(1)];
    let x = bits(BF16, &numbers(9, experts.len() * shape.size_k));
    let router = [0.3, 9.0, 0.71, 1.0];
    for (quantizer, weights, arithmetics) in methods(shape) {
        let rows = quantize(&quantizer, &x, BF16, shape.size_k, &experts).unwrap();
        let product = Product {
            rows: &rows,
            expert_of: &experts,
            weights: &weights,
            halves: None,
            router_weights: Some(&router),
            dtype: BF16,
        };
        assert!(matches!(product.bounds(Arithmetic::Exact), Err(Error::Unsupported { .. })));
        let exact = product.compute(Arithmetic::Exact).unwrap().into_bits();
        for arithmetic in arithmetics.into_iter().filter(|a| *a != Arithmetic::Exact) {
            let found = product.compute(arithmetic).unwrap().into_bits();
            let context = format!("{quantizer} {} {}", weights[0].ty, arithmetic.name());
            let mut widest = 0f64;
            for (i, b) in product.bounds(arithmetic).unwrap().iter().enumerate() {
                let value = BF16.to_f64(found[i].into());
                assert!(b.ratio(value) <= 1.0, "{context} at {i}: {value} outside {b:?}");
                widest = widest.max(b.ratio(value));
                // Quantized operands are used unchanged, so the exact results agree, too.
                if quantizer != Quantizer::None {
                    assert_eq!(b.rounded, u32::from(exact[i]), "{context} at {i}");
                }
            }
            assert!(widest > 0.01, "{context}: {widest} says nothing");
        }
    }
}

/// One column, its weights of scale 1/64 but as given.
fn column(size_k: usize, code: impl Fn(usize) -> u8) -> Weight<'static> {
    Weight {
        codes: Codes::from_fn(8, Shape::new(size_k, 1), |k, _| code(k)).unwrap(),
        ..weight(1, E4M3, Shape::new(size_k, 1), ScalarType::FLOAT32, GroupSize::Channel)
    }
}

#[test]
fn promotion_keeps_what_fourteen_bits_lose() {
    // 448 · 448 = 200704 lies in [2^17, 2^18), so that a sum that holds it is a multiple of 2^4:
    // products of 1 · 1 vanish next to it, 16 of an instruction's 32 together with it and all
    // later.
    let one = 0x38;
    let mut w = column(256, |k| if k == 0 { 0x7e } else { one });
    w.scales = Table::new(ScalarType::FLOAT32, 1, 1, TableData::B32(vec![(1f32 / 64.0).to_bits()]))
        .unwrap();
    let mut x = vec![1.0; 256];
    x[0] = 448.0;
    let quantizer = Quantizer::Fp8Tensor(Some(1.0));
    let rows = quantize(&quantizer, &bits(F16, &x), F16, 256, &[Some(0)]).unwrap();
    let product = Product {
        rows: &rows,
        expert_of: &[Some(0)],
        weights: std::slice::from_ref(&w),
        halves: None,
        router_weights: None,
        dtype: F16,
    };
    // f16 has a step of 2 at 3136.
    for (arithmetic, expected) in [
        (Arithmetic::Exact, (200_704.0 + 255.0) / 64.0),
        (Arithmetic::Wgmma(Promotion::Never), 200_704.0 / 64.0),
        (Arithmetic::Wgmma(Promotion::Every128), (200_704.0 + 128.0) / 64.0),
    ] {
        let found = product.compute(arithmetic).unwrap().into_bits();
        assert_eq!(found, bits(F16, &[expected]), "{}", arithmetic.name());
        assert_eq!(found, product.define(arithmetic).unwrap().bits());
    }
}

#[test]
fn group_scales_are_applied_at_each_promotion() {
    // Two groups of ones: 128 · 1 · (0.5 · 2) + 128 · 2 · (0.25 · 4).
    let mut w = weight(1, E4M3, Shape::new(256, 1), ScalarType::FLOAT32, GroupSize::Of(128));
    w.codes =
        Codes::from_fn(8, Shape::new(256, 1), |k, _| if k < 128 { 0x38 } else { 0x40 }).unwrap();
    let scales = [2f32, 4.0].map(f32::to_bits).to_vec();
    w.scales = Table::new(ScalarType::FLOAT32, 2, 1, TableData::B32(scales)).unwrap();
    let x: Vec<f32> = (0..256).map(|k| if k < 128 { 0.5 } else { 0.25 }).collect();
    let quantizer = Quantizer::Fp8Group(128);
    let rows = quantize(&quantizer, &bits(BF16, &x), BF16, 256, &[Some(0)]).unwrap();
    // A group's largest number becomes 448 under the scale max · fl(1/448).
    assert!(rows.codes.iter().all(|&code| code == 0x7e));
    let Scales::Group { size: 128, values } = &rows.scales else { panic!("{:?}", rows.scales) };
    assert_eq!(*values, [0.5 * (1.0f32 / 448.0), 0.25 * (1.0f32 / 448.0)]);
    let product = Product {
        rows: &rows,
        expert_of: &[Some(0)],
        weights: std::slice::from_ref(&w),
        halves: None,
        router_weights: None,
        dtype: BF16,
    };
    for arithmetic in [Arithmetic::Exact, Arithmetic::Wgmma(Promotion::Every128)] {
        assert_eq!(product.compute(arithmetic).unwrap().bits(), bits(BF16, &[128.0 + 256.0]));
    }
}

#[test]
fn groups_of_a_row_have_their_own_scale() {
    let x = ndarray::array![[1.0f32, -2.0, 0.0, 0.0, 448.0, -3.0]];
    let q = per_group_fp8(x.view(), 2).unwrap();
    let unit = 1.0f32 / 448.0;
    assert_eq!(q.scales, ndarray::array![[2.0 * unit, 1e-10 * unit, 448.0 * unit]]);
    // 1 / (2/448) = 224 or next to it, which e4m3 rounds to 224.
    let codes = q.codes.mapv(|c| c.to_bits());
    assert_eq!(codes, ndarray::array![[0x76, 0xfe, 0, 0, 0x7e, 0xc4]]);
    assert!(matches!(per_group_fp8(x.view(), 4), Err(Error::Size { .. })));
    assert!(matches!(per_group_fp8(x.view(), 0), Err(Error::Size { .. })));
}

#[test]
fn a_row_that_is_not_finite_gives_nan_and_no_other_does() {
    let shape = Shape::new(256, 40);
    let mut x = numbers(4, 3 * shape.size_k);
    x[shape.size_k + 9] = f32::INFINITY;
    let experts = [Some(0), Some(1), Some(0)];
    for (quantizer, weights, arithmetics) in methods(shape) {
        if quantizer == Quantizer::None {
            continue;
        }
        let rows = quantize(&quantizer, &bits(BF16, &x), BF16, shape.size_k, &experts).unwrap();
        let product = Product {
            rows: &rows,
            expert_of: &experts,
            weights: &weights,
            halves: None,
            router_weights: None,
            dtype: BF16,
        };
        let (all, none) = match quantizer {
            Quantizer::Fp8Tensor(scale) => (scale.is_none(), scale.is_some()),
            // A static scale saturates.
            Quantizer::Int8(Int8Quantizer::Tensor(_) | Int8Quantizer::TensorAzp(..)) => {
                (false, true)
            }
            _ => (false, false),
        };
        for arithmetic in arithmetics {
            let found = product.compute(arithmetic).unwrap().into_bits();
            for (row, found) in found.chunks(shape.size_n).enumerate() {
                let nan = found.iter().filter(|&&b| b == 0x7fff).count();
                let expected = if all || row == 1 && !none { shape.size_n } else { 0 };
                assert_eq!(nan, expected, "{quantizer} {} row {row}", arithmetic.name());
            }
        }
    }
}

#[test]
fn a_static_scale_limits_what_is_not_finite() {
    // Upstream's fmax(-448, fmin(v, 448)): fmin and fmax return the operand that is a number.
    let x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN, 3.0, 0.0];
    let quantizer = Quantizer::Fp8Tensor(Some(0.5));
    for dtype in [BF16, F16] {
        let rows = quantize(&quantizer, &bits(dtype, &x), dtype, 3, &[None; 2]).unwrap();
        assert_eq!(rows.codes, [0x7e, 0x7e, 0xfe, 0x7e, 0x4c, 0]);
        assert_eq!(rows.scales, Scales::Row(vec![0.5; 2]));
    }
}

#[test]
fn what_an_arithmetic_cannot_take_is_refused_by_name() {
    let shape = Shape::new(256, 40);
    let experts = [Some(0)];
    let x = bits(BF16, &numbers(4, shape.size_k));
    for (quantizer, weights, arithmetics) in methods(shape) {
        let rows = quantize(&quantizer, &x, BF16, shape.size_k, &experts).unwrap();
        let product = Product {
            rows: &rows,
            expert_of: &experts,
            weights: &weights,
            halves: None,
            router_weights: None,
            dtype: BF16,
        };
        for (name, arithmetic) in Arithmetic::NAMED {
            assert_eq!(arithmetic.name(), name);
            if arithmetics.contains(&arithmetic) {
                continue;
            }
            for found in [product.compute(arithmetic), product.define(arithmetic)] {
                let Err(Error::Unsupported { .. }) = &found else {
                    panic!("{quantizer} {found:?}")
                };
                let text = found.unwrap_err().to_string();
                assert!(text.contains("w7") && text.contains(name), "{text}");
            }
        }
    }
    // Parts that do not fit.
    let w = weight(1, E4M3, shape, ScalarType::FLOAT32, GroupSize::Channel);
    let rows = quantize(&Quantizer::Fp8Token, &x, BF16, shape.size_k, &experts).unwrap();
    let product = Product {
        rows: &rows,
        expert_of: &experts,
        weights: std::slice::from_ref(&w),
        halves: None,
        router_weights: None,
        dtype: BF16,
    };
    let schedule = Schedule::canonical(&w, BF16, E4M3).unwrap();
    assert_eq!(
        product.execute(&schedule).unwrap(),
        product.compute(Arithmetic::Canonical).unwrap()
    );
    let groups = quantize(&Quantizer::Fp8Group(128), &x, BF16, shape.size_k, &experts).unwrap();
    let error = Product { rows: &groups, ..product }.execute(&schedule).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let exact = |p: Product<'_>| p.compute(Arithmetic::Exact).unwrap_err();
    assert!(matches!(exact(Product { weights: &[], ..product }), Error::Size { .. }));
    assert!(matches!(exact(Product { expert_of: &[Some(1)], ..product }), Error::Value { .. }));
    assert!(matches!(exact(Product { expert_of: &[None, None], ..product }), Error::Shape { .. }));
    assert!(matches!(exact(Product { router_weights: Some(&[]), ..product }), Error::Shape { .. }));
    assert!(matches!(exact(Product { halves: Some(&[]), ..product }), Error::Shape { .. }));
    let zero = [[1.0, 0.0]];
    assert!(matches!(exact(Product { halves: Some(&zero), ..product }), Error::Value { .. }));
    let narrow = weight(1, E4M3, Shape::new(128, 40), ScalarType::FLOAT32, GroupSize::Channel);
    let narrow = std::slice::from_ref(&narrow);
    assert!(matches!(exact(Product { weights: narrow, ..product }), Error::Size { .. }));
    assert!(matches!(exact(Product { dtype: E4M3, ..product }), Error::Unsupported { .. }));
    let halves = [[1.0, 2.0]];
    let error = Product { halves: Some(&halves), ..product }.compute(Arithmetic::Canonical);
    assert!(matches!(error, Err(Error::Unsupported { .. })));
    let one = Quantizer::Block { format: &nvfp4::FORMAT, multipliers: vec![1.0] };
    let few = quantize(&one, &x, BF16, shape.size_k, &[Some(1)]);
    assert!(matches!(few, Err(Error::Value { .. })));
    let short = quantize(&Quantizer::None, &x[1..], BF16, shape.size_k, &experts);
    assert!(matches!(short, Err(Error::Shape { .. })));
}

/// The quantizer on bits of `dtype`.
fn quantize(
    quantizer: &Quantizer,
    x: &[u16],
    dtype: ScalarType,
    size_k: usize,
    expert_of: &[Option<usize>],
) -> marlinspike::Result<Activations> {
    quantizer.quantize(FloatView2::from_rows("x", dtype, size_k, x)?, expert_of)
}

/// A layer of two experts, H 64, I 32, and its routing.
fn layer_parts() -> ([Vec<Weight<'static>>; 2], Vec<u16>, [i32; 6], [f32; 6]) {
    let fp4 = ScalarType::FLOAT4_E2M1F;
    let of = |shape| [11, 12].map(|s| weight(s, fp4, shape, E4M3, GroupSize::Of(16))).to_vec();
    let weights = [of(Shape::new(64, 64)), of(Shape::new(32, 64))];
    let x = bits(BF16, &numbers(6, 3 * 64));
    (weights, x, [0, 1, 1, 0, -1, 1], [0.5, 0.25, 1.0, 0.125, 1.0, 2.0])
}

#[test]
fn up_with_a_global_scale_of_its_own_is_that_much_larger() {
    let ([w13, w2], x, topk_ids, topk_weights) = layer_parts();
    let routed = Routed::from_rows(2, &topk_ids, &topk_weights).unwrap();
    let x = FloatView2::from_rows("x", BF16, 64, &x).unwrap();
    let layer = Layer {
        w13: &w13,
        w2: &w2,
        orders: [None; 2],
        num_experts: 2,
        expert_map: None,
        activation: Definition::new(Activation::Silu),
        dtype: BF16,
        input_dtype: None,
        router_weight_on_input: false,
    };
    let none = [Quantizer::None, Quantizer::None];
    type Multiply = fn(&Product<'_>) -> marlinspike::Result<HalfArray2>;
    let compute: Multiply = |product| product.compute(Arithmetic::Exact);
    let define: Multiply = |product| product.define(Arithmetic::Exact);
    let run = |multipliers: Option<&[[f32; 2]]>, multiply: Multiply| {
        let layer = MethodLayer { layer, quantizers: none.clone(), w13_multipliers: multipliers };
        layer.forward(x, routed, |_, product| multiply(product)).unwrap()
    };
    let first = run(None, compute);
    let scale = w13[0].global_scale.unwrap();
    assert_eq!(run(Some(&[[scale; 2]; 2]), compute), first);
    // A power of two is exact under every rounding.
    let own = [[scale, 4.0 * scale]; 2];
    let found = run(Some(&own), compute);
    assert_eq!(run(Some(&own), define), found);
    let four = |bits: &[u16]| -> Vec<u16> {
        bits.iter().map(|&b| if b & 0x7fff == 0 { b } else { b + (2 << 7) }).collect()
    };
    for (row, (a, b)) in
        found.gate_up.bits().chunks(64).zip(first.gate_up.bits().chunks(64)).enumerate()
    {
        assert_eq!(a[..32], b[..32], "gate of row {row}");
        assert_eq!(a[32..], four(&b[32..]), "up of row {row}");
    }
    assert_eq!(found.activated.bits(), four(first.activated.bits()));
    assert_eq!(found.y.bits(), four(first.y.bits()));
    // A schedule multiplies by the matrix's own.
    let of_up = [[scale, scale]; 2];
    let others = [[4.0 * scale; 2]; 2];
    for (multipliers, taken) in [(&of_up, true), (&own, false), (&others, false)] {
        let multipliers = Some(&multipliers[..]);
        let layer = MethodLayer { layer, quantizers: none.clone(), w13_multipliers: multipliers };
        let canonical: [Multiply; 3] = [
            |product| product.compute(Arithmetic::Canonical),
            |product| product.define(Arithmetic::Canonical),
            |product| {
                product.execute(&Schedule::canonical(&product.weights[0], BF16, product.rows.ty)?)
            },
        ];
        let stages = canonical.map(|way| layer.forward(x, routed, |_, product| way(product)));
        match taken {
            true => assert!(stages.iter().all(|s| s.as_ref().ok() == stages[0].as_ref().ok())),
            false => {
                let refused = |s: &_| matches!(s, Err(Error::Unsupported { .. }));
                assert!(stages.iter().all(refused), "{stages:?}");
            }
        }
        assert_eq!(stages[0].is_ok(), taken);
    }
    // gpt-oss's columns are interleaved, not halves.
    let layer = Layer { activation: Definition::new(Activation::SwigluOai), ..layer };
    let layer = MethodLayer { layer, quantizers: none.clone(), w13_multipliers: Some(&own) };
    let error = layer.forward(x, routed, |_, product| compute(product));
    assert!(matches!(error, Err(Error::Unsupported { .. })));
}

/// A product from outside of another shape or type.
#[test]
fn products_that_do_not_fit_the_layer_are_refused() {
    let ([w13, w2], x, topk_ids, topk_weights) = layer_parts();
    let routed = Routed::from_rows(2, &topk_ids, &topk_weights).unwrap();
    let x = FloatView2::from_rows("x", BF16, 64, &x).unwrap();
    let layer = Layer {
        w13: &w13,
        w2: &w2,
        orders: [None; 2],
        num_experts: 2,
        expert_map: None,
        activation: Definition::new(Activation::Silu),
        dtype: BF16,
        input_dtype: None,
        router_weight_on_input: false,
    };
    let quantizers = [Quantizer::None, Quantizer::None];
    let layer = MethodLayer { layer, quantizers, w13_multipliers: None };
    let rows = topk_ids.len();
    let zeros = |dtype, shape: [usize; 2]| {
        HalfArray2::from_bits("y", dtype, shape, vec![0; shape[0] * shape[1]])
    };
    let run = |dtype, shape| layer.forward(x, routed, |_, _| zeros(dtype, shape));
    assert!(run(BF16, [rows, 64]).is_ok());
    for shape in [[64, rows], [rows, 32], [rows + 1, 64]] {
        let found = run(BF16, shape);
        assert!(matches!(found, Err(Error::Shape { .. })), "{found:?}");
    }
    assert!(matches!(run(F16, [rows, 64]), Err(Error::Dtype { .. })));
}
