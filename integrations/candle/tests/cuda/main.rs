//! Layers on CUDA tensors against the reference. Without a GPU each test prints that it is skipped; the driver's library has to be
//! there, because candle links it.

use candle_core::{DType, Device, Module, Tensor};
use half::{bf16, f16};
use marlinspike::case::Activation;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::{Layer, Routed};
use marlinspike::num::array::{FloatView2, rows_of};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Schedule};
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};
use marlinspike_candle::cuda::{
    MarlinExperts, MarlinLinear, MarlinTensors, PackedScales, PackedTensors, ScaleBound,
};

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    /// Between -1 and 1.
    fn number(&mut self) -> f64 {
        f64::from(self.next()) / f64::from(1u32 << 31) - 1.0
    }

    fn halves(&mut self, ty: ScalarType, len: usize, scale: f64, least: f64) -> Vec<u16> {
        let number = |r: &mut Self| r.number() * scale;
        (0..len)
            .map(|_| {
                let value = number(self);
                ty.encode_rne(if least > 0.0 { value.abs() + least } else { value }) as u16
            })
            .collect()
    }
}

fn device(test: &str) -> Option<Device> {
    match Device::new_cuda(0) {
        Ok(device) => Some(device),
        Err(error) => {
            let required = std::env::var("MARLINSPIKE_REQUIRE_GPU").is_ok_and(|value| value == "1");
            assert!(!required, "{test}: {error}");
            println!("SKIPPED (no CUDA device): {test}");
            None
        }
    }
}

fn weight(
    r: &mut Random,
    ty: ScalarType,
    dtype: ScalarType,
    shape: Shape,
    group: usize,
) -> Weight<'static> {
    let Shape { size_k, size_n } = shape;
    let bits = if ty == ScalarType::UINT8B128 { 8 } else { 4 };
    let groups = size_k / group;
    let codes: Vec<u8> = (0..size_k * size_n).map(|_| (r.next() >> (32 - bits)) as u8).collect();
    let table = |r: &mut Random, rows, least| {
        let halves = r.halves(dtype, rows * size_n, 1.0 / 32.0, least);
        Table::new(dtype, rows, size_n, TableData::B16(halves)).unwrap()
    };
    Weight {
        name: "w".into(),
        ty,
        codes: Codes::from_fn(bits, shape, |k, n| codes[k * size_n + n]).unwrap(),
        scales: table(r, groups, 0.01),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Of(group)),
        global_scale: None,
        bias: Some(table(r, 1, 0.0)),
    }
}

fn tensor(bits: &[u16], dims: &[usize], ty: ScalarType, device: &Device) -> Tensor {
    match ty {
        ScalarType::FLOAT16 => {
            let values: Vec<f16> = bits.iter().map(|&b| f16::from_bits(b)).collect();
            Tensor::from_vec(values, dims, device).unwrap()
        }
        _ => {
            let values: Vec<bf16> = bits.iter().map(|&b| bf16::from_bits(b)).collect();
            Tensor::from_vec(values, dims, device).unwrap()
        }
    }
}

fn bits(y: &Tensor) -> Vec<u16> {
    let y = y.to_device(&Device::Cpu).unwrap().flatten_all().unwrap();
    match y.dtype() {
        DType::F16 => y.to_vec1::<f16>().unwrap().iter().map(|v| v.to_bits()).collect(),
        _ => y.to_vec1::<bf16>().unwrap().iter().map(|v| v.to_bits()).collect(),
    }
}

const TYPES: [(ScalarType, DType); 2] =
    [(ScalarType::FLOAT16, DType::F16), (ScalarType::BFLOAT16, DType::BF16)];

fn product(x: &[u16], weight: &Weight<'_>, dtype: ScalarType) -> Vec<u16> {
    let schedule = Schedule::canonical(weight, dtype, dtype).unwrap();
    let codes: Vec<u32> = x.iter().map(|&bits| bits.into()).collect();
    let rows = rows_of("x", &codes, weight.shape().size_k).unwrap();
    let y = schedule.execute(rows, weight, Extras::default()).unwrap();
    y.into_iter().map(|bits| bits as u16).collect()
}

#[test]
fn linear_layers_have_the_references_bits() {
    let Some(device) = device("linear_layers_have_the_references_bits") else { return };
    let mut r = Random(0x1234_5678_9abc_def1);
    let (mut calls, mut outputs) = (0, 0);
    for (ty, dtype) in TYPES {
        for codes in [ScalarType::UINT4B8, ScalarType::UINT8B128] {
            let shape = Shape::new(256, 192);
            let weight = weight(&mut r, codes, ty, shape, 64);
            let packed =
                MarlinTensors::pack("proj", std::slice::from_ref(&weight), dtype, &device).unwrap();
            let layer = MarlinLinear::new(packed).unwrap();
            for size_m in [0, 1, 7, 40, 1200] {
                let x = r.halves(ty, size_m * 256, 1.0, 0.0);
                let y = layer.forward(&tensor(&x, &[1, size_m, 256], ty, &device)).unwrap();
                assert_eq!(y.dims(), [1, size_m, 192]);
                // The reference of the first rows: a row does not depend on the others.
                let rows = size_m.min(20);
                let wanted = product(&x[..rows * 256], &weight, ty);
                assert_eq!(bits(&y)[..rows * 192], wanted, "{ty} {codes} {size_m}");
                calls += 1;
                outputs += wanted.len();
            }
            // Strides and offsets.
            let x = r.halves(ty, 5 * 256, 1.0, 0.0);
            let wide = tensor(&x, &[5, 256], ty, &device);
            let y = layer.forward(&wide.narrow(0, 1, 3).unwrap()).unwrap();
            assert_eq!(bits(&y), product(&x[256..4 * 256], &weight, ty));
        }
    }
    println!("LAW candle linear: every bit equal in {calls} cases, {outputs} outputs");
}

#[test]
fn experts_have_the_references_bits() {
    let Some(device) = device("experts_have_the_references_bits") else { return };
    let mut r = Random(0x0fed_cba9_8765_4321);
    let (experts, hidden, inner, top_k) = (6, 256, 128, 2);
    let mut outputs = 0;
    for (ty, dtype) in TYPES {
        let activation = Definition::new(Activation::Silu);
        let codes = ScalarType::UINT4B8;
        let mut stack = |shape| -> Vec<_> {
            (0..experts).map(|_| weight(&mut r, codes, ty, shape, 64)).collect()
        };
        let w13 = stack(Shape::new(hidden, 2 * inner));
        let w2 = stack(Shape::new(inner, hidden));
        let pack = |weights: &[Weight<'_>]| MarlinTensors::pack("experts", weights, dtype, &device);
        let layer =
            MarlinExperts::new(pack(&w13).unwrap(), pack(&w2).unwrap(), activation).unwrap();
        for size_m in [1, 9, 600] {
            let x = r.halves(ty, size_m * hidden, 1.0, 0.0);
            // Of different experts; the last slot of token 3 has none.
            let mut ids: Vec<i32> = Vec::new();
            for m in 0..size_m {
                let first = r.next() as usize % experts;
                let second = (first + 1 + r.next() as usize % (experts - 1)) % experts;
                ids.extend([first as i32, if m == 3 { -1 } else { second as i32 }]);
            }
            let weights: Vec<f32> = (0..size_m * top_k).map(|_| r.number() as f32).collect();
            let there = |values: Vec<u32>| Tensor::from_vec(values, (size_m, top_k), &device);
            let topk_ids = there(ids.iter().map(|&id| id as u32).collect()).unwrap();
            let topk_weights = Tensor::from_vec(weights.clone(), (size_m, top_k), &device).unwrap();
            let x_there = tensor(&x, &[size_m, hidden], ty, &device);
            let y = layer.forward(&x_there, &topk_ids, &topk_weights).unwrap();
            let rows = size_m.min(10);
            let reference = Layer {
                w13: &w13,
                w2: &w2,
                orders: [None, None],
                num_experts: experts,
                expert_map: None,
                activation,
                dtype: ty,
                input_dtype: None,
                router_weight_on_input: false,
            };
            let (ids, weights) = (&ids[..rows * top_k], &weights[..rows * top_k]);
            let routed = Routed::from_rows(top_k, ids, weights).unwrap();
            let view = FloatView2::from_bits("x", ty, [rows, hidden], &x[..rows * hidden]).unwrap();
            let stages = reference.forward(view, routed, &reference.canonical().unwrap()).unwrap();
            let wanted = stages.y.into_bits();
            assert_eq!(bits(&y)[..rows * hidden], wanted, "{ty} {size_m}");
            outputs += wanted.len();
        }
    }
    println!("LAW candle experts: every bit equal, {outputs} outputs");
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let Some(device) = device("tensors_that_do_not_fit_are_named") else { return };
    let mut r = Random(0x5555_1234_5678_9abc);
    let weight = weight(&mut r, ScalarType::UINT4B8, ScalarType::BFLOAT16, Shape::new(128, 64), 64);
    let packed = MarlinTensors::pack("proj", std::slice::from_ref(&weight), DType::BF16, &device);
    let layer = MarlinLinear::new(packed.unwrap()).unwrap();
    let x = |dims: &[usize], dtype, device: &Device| Tensor::zeros(dims, dtype, device).unwrap();
    for (wrong, found) in [
        (x(&[3, 64], DType::BF16, &device), "proj: x: found (BF16, [3, 64]"),
        (x(&[3, 128], DType::F16, &device), "proj: x: found (F16, [3, 128]"),
        (x(&[3, 128], DType::BF16, &Device::Cpu), "expected BF16 [.., 128] on Cuda"),
    ] {
        let error = layer.forward(&wrong).unwrap_err().to_string();
        assert!(error.contains(found), "{error}");
    }
    let parts = |columns: usize| PackedTensors {
        qweight: x(&[8, 128], DType::U32, &device),
        scales: x(&[2, columns], DType::BF16, &device),
        zeros: None,
        bias: None,
    };
    let scales = PackedScales::Bits16 { below: ScaleBound::None };
    let new =
        |columns| MarlinTensors::new("q", ScalarType::UINT4B8, scales, DType::BF16, parts(columns));
    assert!(new(64).is_ok());
    let error = new(32).unwrap_err().to_string();
    assert!(error.contains("q: scales: found BF16 [2, 32]"), "{error}");
}
