//! Layers with drawn weights, and their results by the scalar definition.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use marlinspike::case::{Activation, ActivationRounding, ScoringFunc};
use marlinspike::moe::router::{Router, Routing};
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::w4a8::moe::{Layer, Mode, MoeConfig, MoeLayer};
use marlinspike::w4a8::packed::PackedRhs;
use marlinspike::w4a8::scalar::Scalar;
use marlinspike::w4a8::{Linear, Values, linear};
use marlinspike_bench::tile::{Tile, activations};
use marlinspike_candle::{Int4Experts, Int4Linear};

pub(crate) const K: usize = 64;
pub(crate) const N: usize = 48;
pub(crate) const EXPERTS: usize = 6;
pub(crate) const INNER: usize = 96;
pub(crate) const ROUNDING: ActivationRounding = ActivationRounding::HalfAway;

/// Every type that the layers take.
pub(crate) const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

pub(crate) fn tile(size_k: usize, size_n: usize, seed: u64) -> Tile {
    Tile::new(Shape::new(size_k, size_n), GroupSize::Of(32), seed).unwrap()
}

/// A product of a drawn weight.
pub(crate) fn product() -> Int4Linear {
    Int4Linear::new("q_proj", Linear::new(tile(K, N, 1).matrix(0).unwrap(), ROUNDING))
}

/// What [`product`] is defined to give.
pub(crate) fn defined_product(x: &Values) -> Values {
    linear(&Scalar, x, &tile(K, N, 1).matrix(0).unwrap(), ROUNDING).unwrap()
}

pub(crate) fn rule() -> Router<'static> {
    Router::new(ScoringFunc::Softmax, 2, true)
}

fn config(expert_map: Option<Vec<i32>>) -> MoeConfig<'static> {
    MoeConfig {
        num_experts: EXPERTS,
        expert_map,
        router: rule().into(),
        activation: Activation::Silu,
        rounding: ROUNDING,
        router_weight_on_input: false,
        mode: Mode::Extended,
    }
}

/// A layer of drawn experts; with `expert_map`, all of them are local, too.
pub(crate) fn layer(expert_map: Option<Vec<i32>>) -> MoeLayer<'static> {
    let w13 = tile(K, 2 * INNER, 2).stack(EXPERTS).unwrap();
    let w2 = tile(INNER, K, 3).stack(EXPERTS).unwrap();
    MoeLayer::new(w13, w2, config(expert_map)).unwrap()
}

pub(crate) fn experts() -> Int4Experts {
    Int4Experts::new("mlp.experts", layer(None)).unwrap()
}

/// What [`experts`] are defined to give.
pub(crate) fn defined_experts(x: &Values, logits: &[f32]) -> Values {
    let (w13, w2) = (tile(K, 2 * INNER, 2), tile(INNER, K, 3));
    let stack = |tile: &Tile| -> Vec<PackedRhs<'static>> {
        (0..EXPERTS).map(|e| tile.matrix(e).unwrap()).collect()
    };
    let routing = rule().route(rows_of("logits", logits, EXPERTS).unwrap()).unwrap();
    defined_layer(&stack(&w13), &stack(&w2), x, &routing)
}

/// SiLU experts by the scalar kernel.
fn defined_layer(
    w13: &[PackedRhs<'_>],
    w2: &[PackedRhs<'_>],
    x: &Values,
    routing: &Routing,
) -> Values {
    let layer = Layer {
        w13,
        w2,
        num_experts: w13.len(),
        expert_map: None,
        activation: Activation::Silu,
        rounding: ROUNDING,
        router_weight_on_input: false,
        mode: Mode::Extended,
    };
    layer.forward(&Scalar, x, routing.routed().unwrap()).unwrap()
}

/// A row of a product with an unquantized weight `[N, K]`, in the documented order: element k goes to
/// lane k mod 16 by a fused multiply-add, and halves of the lanes are added.
pub(crate) fn lanes(x: &[f32], weight: &[f32]) -> Vec<f32> {
    let sum = |row: &[f32]| {
        let mut lanes = [0.0f32; 16];
        for (k, (x, w)) in x.iter().zip(row).enumerate() {
            lanes[k % 16] = x.mul_add(*w, lanes[k % 16]);
        }
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    };
    weight.chunks_exact(x.len()).map(sum).collect()
}

/// Values of a tensor in row-major order; f16 as f32.
pub(crate) fn values(tensor: &Tensor) -> Values {
    let flat = tensor.flatten_all().unwrap();
    match tensor.dtype() {
        DType::BF16 => {
            let values: Vec<bf16> = flat.to_vec1().unwrap();
            Values::Bf16(values.into_iter().map(bf16::to_bits).collect())
        }
        DType::F16 => {
            let values: Vec<f16> = flat.to_vec1().unwrap();
            Values::F32(values.into_iter().map(f16::to_f32).collect())
        }
        _ => Values::F32(flat.to_vec1().unwrap()),
    }
}

/// `defined` in the type of outputs, as f32: f16 outputs are rounded once.
pub(crate) fn rounded(defined: &Values, dtype: DType) -> Vec<u32> {
    let round = |v: f32| if dtype == DType::F16 { f16::from_f32(v).to_f32() } else { v };
    defined.to_f32().into_iter().map(|v| round(v).to_bits()).collect()
}

/// The values' bits, as f32.
pub(crate) fn bits(tensor: &Tensor) -> Vec<u32> {
    values(tensor).to_f32().into_iter().map(f32::to_bits).collect()
}

/// Drawn rows `[5, 2, width]` by their strides: contiguous; beginning within the storage; transposed;
/// every other row; a row repeated with stride 0.
pub(crate) fn strided(width: usize, seed: u64, dtype: DType) -> Vec<(&'static str, Tensor)> {
    let drawn = |shape: &[usize]| {
        let count = shape.iter().product();
        let all = Tensor::from_vec(activations(count, seed), shape, &Device::Cpu).unwrap();
        all.to_dtype(dtype).unwrap()
    };
    let within = drawn(&[3, 5, 2, width]).narrow(0, 1, 1).unwrap().squeeze(0).unwrap();
    let columns = drawn(&[width, 2, 5]).transpose(0, 2).unwrap();
    let every_other = drawn(&[5, 4, width]).reshape((5, 2, 2, width)).unwrap();
    let every_other = every_other.narrow(2, 1, 1).unwrap().squeeze(2).unwrap();
    let repeated = drawn(&[1, 2, width]).broadcast_as((5, 2, width)).unwrap();
    let all = vec![
        ("contiguous", drawn(&[5, 2, width])),
        ("within", within),
        ("transposed", columns),
        ("every other row", every_other),
        ("repeated", repeated),
    ];
    for (name, x) in &all {
        assert_eq!(x.dims(), [5, 2, width], "{name}");
    }
    all
}

/// A pool of this many threads.
pub(crate) fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}
