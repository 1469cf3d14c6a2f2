//! Tensors that the layers do not take: the errors name layer and tensor.

use candle_core::{DType, Device, Module as _, Result, Tensor};
use marlinspike::w4a8::moe::GatedActivation;
use marlinspike_candle::{
    DenseLinear, Error, Int4Experts, MoeBlock, Projection, Router, SharedExpert,
};

use crate::common::*;

fn zeros(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
}

#[track_caller]
fn refused(found: Result<Tensor>, expected: &str) {
    let error = found.unwrap_err().to_string();
    assert!(error.starts_with(expected), "found {error:?}, expected {expected:?}");
}

#[test]
fn products_refuse_other_tensors() {
    let linear = product();
    for dtype in [DType::U8, DType::U32, DType::I64, DType::F64] {
        let expected = format!("q_proj: x: found {dtype:?}, expected F32, BF16 or F16");
        refused(linear.forward(&zeros(&[2, K], dtype)), &expected);
    }
    let x = zeros(&[5, 2, 32], DType::F32);
    refused(linear.forward(&x), "q_proj: x: found shape [5, 2, 32], expected [.., 64]");
    refused(
        linear.forward(&zeros(&[], DType::F32)),
        "q_proj: x: found shape [], expected [.., 64]",
    );
    refused(linear.forward(&zeros(&[0], DType::F32)), "q_proj: x: found shape [0]");
}

#[test]
fn experts_refuse_other_tensors() {
    let experts = experts();
    let x = zeros(&[5, 2, K], DType::BF16);
    let logits = |shape: &[usize]| zeros(shape, DType::F32);
    let run = |logits: &Tensor| experts.forward(&x, logits);
    let name = "mlp.experts: router_logits: found";
    refused(run(&zeros(&[5, 2, EXPERTS], DType::U32)), &format!("{name} U32"));
    refused(run(&logits(&[5, 2, 5])), &format!("{name} shape [5, 2, 5], expected [.., 6]"));
    refused(run(&logits(&[4, 2, 6])), &format!("{name} shape [4, 2, 6], expected [5, 2, 6]"));
    refused(run(&logits(&[10, 6])), &format!("{name} shape [10, 6], expected [5, 2, 6]"));
    refused(run(&logits(&[])), &format!("{name} shape []"));
    let x = zeros(&[5, 2, K + 1], DType::F32);
    refused(experts.forward(&x, &logits(&[5, 2, 6])), "mlp.experts: x: found shape [5, 2, 65]");
}

/// The place of the logit is part of the error.
#[test]
fn logits_that_are_not_numbers_are_refused() {
    let x = zeros(&[3, K], DType::F32);
    let mut logits = vec![0.0f32; 3 * EXPERTS];
    logits[EXPERTS + 2] = f32::NAN;
    let logits = Tensor::from_vec(logits, (3, EXPERTS), &Device::Cpu).unwrap();
    let error = experts().forward(&x, &logits).unwrap_err().to_string();
    assert!(error.starts_with("mlp.experts: "), "{error}");
    assert!(error.contains("router_logits") && error.contains("[1, 2]"), "{error}");
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let dense = |n, k| DenseLinear::new("mlp.gate", &zeros(&[n, k], DType::BF16), None).unwrap();
    let error = |e: Error| e.to_string();
    let block = |router| MoeBlock::new(Router::new(router), experts());
    assert_eq!(
        error(block(dense(5, K)).unwrap_err()),
        "mlp.gate: weight: found shape [5, 64], expected [6, 64], [experts, hidden size] of mlp.experts"
    );
    let shared = |up, down| {
        let gate = Projection::Dense(dense(16, K));
        SharedExpert::new(
            gate,
            Projection::Dense(up),
            Projection::Dense(down),
            GatedActivation::Silu,
        )
    };
    assert!(error(shared(dense(8, K), dense(K, 16)).unwrap_err()).contains("found shape [64, 8]"));
    assert!(error(shared(dense(16, K), dense(K, 8)).unwrap_err()).contains("found shape [64, 16]"));
    let other = shared(dense(16, K), dense(K, 16)).unwrap();
    assert!(error(other.with_gate(dense(2, K)).unwrap_err()).contains("found shape [64, 2]"));
    let narrow = Projection::Dense(dense(16, 32));
    let down = Projection::Dense(dense(32, 16));
    let narrow = SharedExpert::new(narrow.clone(), narrow, down, GatedActivation::Silu).unwrap();
    let whole = block(dense(EXPERTS, K)).unwrap();
    let found = error(whole.with_shared_expert(narrow).unwrap_err());
    assert_eq!(found, "mlp.experts: shared expert: found shape [32], expected hidden size 64");

    let map = Some((0..EXPERTS as i32).collect());
    let found = error(Int4Experts::new("mlp.experts", layer(map)).unwrap_err());
    assert_eq!(
        found,
        "mlp.experts: found one rank's part, expected a model converted without ranks"
    );
}

#[test]
fn unquantized_weights_are_checked() {
    let made = |weight: &Tensor, bias: Option<&Tensor>| {
        DenseLinear::new("gate", weight, bias).unwrap_err().to_string()
    };
    assert!(made(&zeros(&[3], DType::F32), None).starts_with("gate: weight: found shape [3]"));
    assert!(
        made(&zeros(&[3, 0], DType::F32), None).starts_with("gate: weight: found shape [3, 0]")
    );
    assert!(made(&zeros(&[3, 4], DType::U8), None).starts_with("gate: weight: found U8"));
    let weight = zeros(&[3, 4], DType::F32);
    let bias = |shape: &[usize], dtype| made(&weight, Some(&zeros(shape, dtype)));
    assert!(bias(&[4], DType::F32).starts_with("gate: bias: found shape [4], expected [3]"));
    assert!(bias(&[3], DType::I64).starts_with("gate: bias: found I64"));
}
