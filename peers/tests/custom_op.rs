//! The operators give the definition's bits on candle's tensors, and refuse what they do not take.
#![allow(missing_docs)]

use candle_core::{D, DType, Device, Error, Tensor};
use half::bf16;
use marlinspike::case::{Activation, ActivationRounding, ScoringFunc};
use marlinspike::moe::router::Router;
use marlinspike::num::array::rows_of;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::w4a8::moe::{Layer, Mode, MoeConfig, MoeLayer};
use marlinspike::w4a8::scalar::Scalar;
use marlinspike::w4a8::{Linear, Values, linear};
use marlinspike_bench::tile::{Tile, activations};
use marlinspike_peers::op::{Int4Linear, Int4Moe};

const K: usize = 64;
const N: usize = 48;
const EXPERTS: usize = 6;
const INNER: usize = 96;
const ROUNDING: ActivationRounding = ActivationRounding::HalfAway;

fn tile(size_k: usize, size_n: usize, seed: u64) -> Tile {
    Tile::new(Shape::new(size_k, size_n), GroupSize::Of(32), seed).unwrap()
}

fn product() -> Int4Linear {
    Int4Linear::new(Linear::new(tile(K, N, 1).matrix(0).unwrap(), ROUNDING))
}

fn router() -> Router<'static> {
    Router::new(ScoringFunc::Softmax, 2, true)
}

fn layer() -> Int4Moe {
    let config = MoeConfig {
        num_experts: EXPERTS,
        expert_map: None,
        router: router().into(),
        activation: Activation::Silu,
        rounding: ROUNDING,
        router_weight_on_input: false,
        mode: Mode::Extended,
    };
    let w13 = tile(K, 2 * INNER, 2).stack(EXPERTS).unwrap();
    let w2 = tile(INNER, K, 3).stack(EXPERTS).unwrap();
    Int4Moe::new(MoeLayer::new(w13, w2, config).unwrap())
}

/// What the layer is defined to give, by the scalar kernel.
fn defined(x: &Values, logits: &[f32]) -> Values {
    let (w13, w2) = (tile(K, 2 * INNER, 2), tile(INNER, K, 3));
    let stack = |tile: &Tile| (0..EXPERTS).map(|e| tile.matrix(e).unwrap()).collect::<Vec<_>>();
    let (w13, w2) = (stack(&w13), stack(&w2));
    let routing = router().route(rows_of("logits", logits, EXPERTS).unwrap()).unwrap();
    let layer = Layer {
        w13: &w13,
        w2: &w2,
        num_experts: EXPERTS,
        expert_map: None,
        activation: Activation::Silu,
        rounding: ROUNDING,
        router_weight_on_input: false,
        mode: Mode::Extended,
    };
    layer.forward(&Scalar, x, routing.routed().unwrap()).unwrap()
}

fn values(tensor: &Tensor) -> Values {
    let flat = tensor.flatten_all().unwrap();
    match tensor.dtype() {
        DType::BF16 => {
            let values: Vec<bf16> = flat.to_vec1().unwrap();
            Values::Bf16(values.into_iter().map(bf16::to_bits).collect())
        }
        _ => Values::F32(flat.to_vec1().unwrap()),
    }
}

/// Three times as many rows as are used, so that the tensors begin within their storage.
fn rows(width: usize, seed: u64, dtype: DType) -> Tensor {
    let all = activations(3 * 10 * width, seed);
    let all = Tensor::from_vec(all, (3, 5, 2, width), &Device::Cpu).unwrap();
    all.to_dtype(dtype).unwrap().narrow(0, 1, 1).unwrap().squeeze(0).unwrap()
}

#[test]
fn products_have_the_definitions_bits() {
    let op = product();
    let packed = tile(K, N, 1).matrix(0).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let x = rows(K, 4, dtype);
        let y = x.apply_op1_no_bwd(&op).unwrap();
        assert_eq!((y.dims(), y.dtype()), ([5, 2, N].as_slice(), dtype));
        let expected = linear(&Scalar, &values(&x), &packed, ROUNDING).unwrap();
        assert_eq!(values(&y).bits(), expected.bits(), "{dtype:?}");
        assert!(expected.to_f32().iter().any(|&y| y != 0.0));
    }
}

#[test]
fn layers_have_the_definitions_bits() {
    let op = layer();
    let logits = rows(EXPERTS, 5, DType::F32);
    let Values::F32(flat) = values(&logits) else { panic!("f32") };
    for dtype in [DType::F32, DType::BF16] {
        let x = rows(K, 6, dtype);
        let y = x.apply_op2_no_bwd(&logits, &op).unwrap();
        assert_eq!((y.dims(), y.dtype()), (x.dims(), dtype));
        assert_eq!(values(&y).bits(), defined(&values(&x), &flat).bits(), "{dtype:?}");
    }
}

/// The error below candle's backtrace, if any.
fn root(error: Error) -> Error {
    match error {
        Error::WithBacktrace { inner, .. } => root(*inner),
        other => other,
    }
}

#[test]
fn other_tensors_are_refused() {
    let op = product();
    let refused = |x: &Tensor| root(x.apply_op1_no_bwd(&op).unwrap_err());
    let x = rows(K, 4, DType::F32);
    let halves = x.to_dtype(DType::F16).unwrap();
    assert!(matches!(refused(&halves), Error::UnsupportedDTypeForOp(DType::F16, "int4-linear")));
    let columns = x.transpose(0, 1).unwrap();
    assert!(matches!(refused(&columns), Error::RequiresContiguous { op: "int4-linear" }));
    let narrow = x.narrow(D::Minus1, 0, 32).unwrap().contiguous().unwrap();
    match refused(&narrow) {
        Error::UnexpectedShape { expected, got, .. } => {
            assert_eq!(
                (expected.dims(), got.dims()),
                ([5, 2, K].as_slice(), [5, 2, 32].as_slice())
            );
        }
        other => panic!("{other}"),
    }
    let number = Tensor::new(1f32, &Device::Cpu).unwrap();
    assert!(matches!(refused(&number), Error::UnexpectedShape { .. }));

    let op = layer();
    let refused = |x: &Tensor, l: &Tensor| root(x.apply_op2_no_bwd(l, &op).unwrap_err());
    let logits = rows(EXPERTS, 5, DType::F32);
    let coarse = logits.to_dtype(DType::BF16).unwrap();
    assert!(matches!(refused(&x, &coarse), Error::UnsupportedDTypeForOp(DType::BF16, _)));
    let fewer = logits.narrow(0, 0, 4).unwrap();
    assert!(matches!(refused(&x, &fewer), Error::ShapeMismatchBinaryOp { op: "int4-moe", .. }));
    let columns = logits.transpose(0, 1).unwrap();
    assert!(matches!(refused(&x, &columns), Error::RequiresContiguous { op: "int4-moe" }));
    let nan = (logits * f64::NAN).unwrap();
    let error = refused(&x, &nan);
    assert!(
        matches!(error, Error::Wrapped(_)) && error.to_string().contains("router_logits"),
        "{error}"
    );
}
