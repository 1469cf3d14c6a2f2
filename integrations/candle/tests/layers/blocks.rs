//! Blocks of router, experts and shared expert, computed part by part from their definitions.

use candle_core::{DType, Device, Module as _, Tensor, Var};
use half::bf16;
use marlinspike::moe::math;
use marlinspike::w4a8::moe::GatedActivation;
use marlinspike::w4a8::scalar::Scalar;
use marlinspike::w4a8::{self, Linear, Values};
use marlinspike_bench::tile::activations;
use marlinspike_candle::{DenseLinear, Int4Linear, MoeBlock, Projection, Router, SharedExpert};

use crate::common::*;

/// Features between the shared expert's products.
const SHARED: usize = 32;

/// What a block may have.
#[derive(Debug, Clone, Copy)]
struct Parts {
    f32_logits: bool,
    softcap: Option<f32>,
    shared: bool,
    gate: bool,
    mean: bool,
}

const PLAIN: Parts =
    Parts { f32_logits: false, softcap: None, shared: false, gate: false, mean: false };

fn weight(rows: usize, columns: usize, seed: u64) -> Vec<f32> {
    activations(rows * columns, seed).iter().map(|v| v / 8.0).collect()
}

fn dense(module: &str, rows: usize, seed: u64) -> DenseLinear {
    let values = Tensor::from_vec(weight(rows, K, seed), (rows, K), &Device::Cpu).unwrap();
    DenseLinear::new(module, &values, None).unwrap()
}

fn block(parts: Parts) -> MoeBlock {
    let router = Router::new(dense("mlp.gate", EXPERTS, 20));
    let router = router.with_f32_logits(parts.f32_logits).with_softcap(parts.softcap);
    let block = MoeBlock::new(router, experts()).unwrap().with_mean(parts.mean);
    if !parts.shared {
        return block;
    }
    let int4 = |module: &str, k, n, seed| {
        let packed = tile(k, n, seed).matrix(0).unwrap();
        Projection::Int4(Int4Linear::new(module, Linear::new(packed, ROUNDING)))
    };
    let (gate, up) = (int4("gate_proj", K, SHARED, 21), int4("up_proj", K, SHARED, 22));
    let down = int4("down_proj", SHARED, K, 23);
    let mut shared = SharedExpert::new(gate, up, down, GatedActivation::Silu).unwrap();
    if parts.gate {
        shared = shared.with_gate(dense("shared_expert_gate", 1, 24)).unwrap();
    }
    block.with_shared_expert(shared).unwrap()
}

/// `value` in the activations' type.
fn round(dtype: DType, value: f32) -> f32 {
    if dtype == DType::BF16 { bf16::from_f32(value).to_f32() } else { value }
}

fn typed(dtype: DType, values: Vec<f32>) -> Values {
    match dtype {
        DType::BF16 => Values::Bf16(values.iter().map(|&v| bf16::from_f32(v).to_bits()).collect()),
        _ => Values::F32(values),
    }
}

/// One row of the block in f32 or bf16.
fn defined(parts: Parts, dtype: DType, x: &[f32]) -> Vec<f32> {
    let ty = if parts.f32_logits { DType::F32 } else { dtype };
    let mut logits = lanes(x, &weight(EXPERTS, K, 20));
    for logit in &mut logits {
        *logit = round(ty, *logit);
        if let Some(cap) = parts.softcap {
            *logit = round(ty, cap * math::tanh(*logit / cap));
        }
    }
    let row = typed(dtype, x.to_vec());
    let mut y = defined_experts(&row, &logits).to_f32();
    if !parts.shared {
        return y;
    }
    let product = |x: &Values, k, n, seed| {
        let packed = tile(k, n, seed).matrix(0).unwrap();
        w4a8::linear(&Scalar, x, &packed, ROUNDING).unwrap().to_f32()
    };
    let (gate, up) = (product(&row, K, SHARED, 21), product(&row, K, SHARED, 22));
    let inner = gate.iter().zip(&up).map(|(&g, &u)| round(dtype, g / (1.0 + math::exp(-g)) * u));
    let mut shared = product(&typed(dtype, inner.collect()), SHARED, K, 23);
    if parts.gate {
        let logit = round(dtype, lanes(x, &weight(1, K, 24))[0]);
        let factor = round(dtype, math::sigmoid(logit));
        shared.iter_mut().for_each(|s| *s = round(dtype, *s * factor));
    }
    for (y, s) in y.iter_mut().zip(&shared) {
        *y = round(dtype, *y + s);
        if parts.mean {
            *y = round(dtype, *y * 0.5);
        }
    }
    y
}

/// Every part, every type, every kind of strides, one to three threads.
#[test]
fn blocks_have_the_bits_of_their_parts() {
    let all = [
        PLAIN,
        Parts { f32_logits: true, ..PLAIN },
        Parts { softcap: Some(0.5), ..PLAIN },
        Parts { shared: true, ..PLAIN },
        Parts { shared: true, gate: true, ..PLAIN },
        Parts { shared: true, gate: true, mean: true, f32_logits: true, softcap: Some(2.0) },
    ];
    let mut seen = Vec::new();
    for parts in all {
        let block = block(parts);
        for dtype in TYPES {
            for (strides, x) in strided(K, 6, dtype) {
                // F16 is widened for the whole block.
                let inner = if dtype == DType::F16 { DType::F32 } else { dtype };
                let rows = values(&x).to_f32();
                let rows = rows.chunks_exact(K).flat_map(|x| defined(parts, inner, x));
                let expected = rounded(&Values::F32(rows.collect()), dtype);
                for threads in 1..=3 {
                    let y = pool(threads).install(|| block.forward(&x)).unwrap();
                    assert_eq!((y.dims(), y.dtype()), (x.dims(), dtype));
                    assert!(
                        bits(&y) == expected,
                        "{parts:?} {dtype:?} {strides} {threads} threads"
                    );
                }
                if strides == "contiguous" && dtype == DType::BF16 {
                    seen.push(expected);
                }
            }
        }
    }
    // Each part changes the output, so that leaving one out would be seen.
    for (i, one) in seen.iter().enumerate() {
        assert!(seen[..i].iter().all(|other| other != one), "{:?}", all[i]);
    }
}

/// A shared expert with gate and up in one matrix is the one with two.
#[test]
fn fused_shared_experts_are_the_separate_ones() {
    let matrix = |seed, rows, columns| {
        Tensor::from_vec(weight(rows, columns, seed), (rows, columns), &Device::Cpu).unwrap()
    };
    let (gate, up, down) = (matrix(1, SHARED, K), matrix(2, SHARED, K), matrix(3, K, SHARED));
    let layer = |t: &Tensor| Projection::Dense(DenseLinear::new("shared", t, None).unwrap());
    let separate =
        SharedExpert::new(layer(&gate), layer(&up), layer(&down), GatedActivation::Silu).unwrap();
    let gate_up = layer(&Tensor::cat(&[gate, up], 0).unwrap());
    let fused = SharedExpert::fused(gate_up, layer(&down), GatedActivation::Silu).unwrap();
    for dtype in TYPES {
        for (strides, x) in strided(K, 8, dtype) {
            let (one, other) = (separate.forward(&x).unwrap(), fused.forward(&x).unwrap());
            assert_eq!(one.dims(), x.dims());
            assert!(bits(&one) == bits(&other), "{dtype:?} {strides}");
        }
    }
}

#[test]
fn gradients_through_a_block_are_refused() {
    let parts = Parts { shared: true, gate: true, ..PLAIN };
    for (parts, module) in [(PLAIN, "mlp.experts"), (parts, "shared_expert_gate")] {
        let x = Var::from_tensor(&strided(K, 4, DType::F32).remove(0).1).unwrap();
        let y = block(parts).forward(&x).unwrap();
        let error = y.sum_all().unwrap().backward().unwrap_err().to_string();
        assert!(error.contains("backward pass"), "{module}: {error}");
    }
}
