//! `activated` of a layer of MXFP4 experts: no format states the exponential, so that one in f64, rounded
//! once, is as right as the layer's own.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{CaseReport, OutputReport, Verdict, check_case};
use marlinspike::num::scalar::{bf16_to_f32, f64_to_bf16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::{self, Rng};
use serde_json::{Value, json};

fn cases() -> Vec<(&'static str, Case<'static>)> {
    let mut all = Vec::new();
    for dtype in ["float32", "bfloat16"] {
        for activation in ["swigluoai", "silu"] {
            let Value::Object(config) = json!({
                "dtype": dtype, "size_m": 1, "num_experts": 8, "top_k": 4, "hidden_size": 96,
                "intermediate_size": 64, "has_bias": true, "activation": activation,
            }) else {
                panic!("keys")
            };
            for seed in 0..6 {
                let config = CaseConfig::from_json(Op::E2m1Int8Moe, &config).expect("a config");
                let mut case = vectors::case_of(config, &mut Rng::new(seed)).expect("a case");
                // It follows from the recorded `activated`.
                case.outputs.remove("y");
                all.push((activation, case));
            }
        }
    }
    all
}

/// The values of an output.
fn values(case: &Case<'_>, name: &str) -> Vec<f64> {
    let tensor = case.output(name).expect("an output");
    match tensor.dtype() {
        DType::F32 => tensor.elements::<f32>().iter().map(|&x| x.into()).collect(),
        _ => tensor.elements::<u16>().iter().map(|&b| bf16_to_f32(b).into()).collect(),
    }
}

/// The case with these numbers, rounded once.
fn with(case: &Case<'static>, values: &[f64]) -> Case<'static> {
    let mut case = case.clone();
    let (dtype, shape) = {
        let tensor = case.output("activated").expect("an output");
        (tensor.dtype(), tensor.shape().to_vec())
    };
    let tensor = match dtype {
        DType::F32 => {
            let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
            Tensor::from_vec("", dtype, shape, values)
        }
        _ => {
            let bits: Vec<u16> = values.iter().map(|&x| f64_to_bf16_rne(x)).collect();
            Tensor::from_vec("", dtype, shape, bits)
        }
    };
    case.add_output("activated", tensor.expect("a tensor"));
    case
}

/// `activated` of the recorded `gate_up` in f64; of a slot without an expert, zeros.
fn activated(activation: &str, case: &Case<'_>, alpha: f64) -> Vec<f64> {
    let gate_up = values(case, "gate_up");
    let ids = case.input("topk_ids").expect("ids").elements::<i32>().into_owned();
    let size_i = gate_up.len() / ids.len() / 2;
    let of = |i: usize| {
        let row = &gate_up[i / size_i * 2 * size_i..][..2 * size_i];
        let (gate, up) = (row[i % size_i], row[size_i + i % size_i]);
        if ids[i / size_i] < 0 {
            return 0.0;
        }
        match activation {
            "silu" => gate / (1.0 + (-alpha * gate).exp()) * up,
            _ => {
                let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
                (up + 1.0) * (gate / (1.0 + (-alpha * gate).exp()))
            }
        }
    };
    (0..ids.len() * size_i).map(of).collect()
}

fn report(report: &CaseReport) -> &OutputReport {
    report.outputs.iter().find(|o| o.name == "activated").expect("a report")
}

#[test]
fn an_exponential_in_f64_passes_and_a_wrong_activation_fails() {
    let mut by_bound = 0;
    for (activation, case) in cases() {
        let own = check_case(&case).expect("a report");
        assert_eq!(own.verdict, Verdict::Pass, "{}: {own:?}", case.name);
        assert_eq!(report(&own).equal_bits, Some(1.0), "{}", case.name);
        let alpha = if activation == "silu" { 1.0 } else { 1.702 };
        let right = activated(activation, &case, alpha);
        let judged = check_case(&with(&case, &right)).expect("a report");
        assert_eq!(judged.verdict, Verdict::Pass, "{}: {judged:?}", case.name);
        by_bound += usize::from(report(&judged).max_error_over_bound.is_some());
        let Some(at) = (0..right.len()).find(|&i| right[i].abs() > 0.01) else { continue };
        for (what, wrong) in [
            ("alpha", activated(activation, &case, alpha * 1.05)),
            ("one value", {
                let mut wrong = right.clone();
                wrong[at] *= 1.0 + 1.0 / 64.0;
                wrong
            }),
            ("zeros", vec![0.0; right.len()]),
            ("halved", right.iter().map(|x| 0.5 * x).collect()),
        ] {
            let judged = check_case(&with(&case, &wrong)).expect("a report");
            assert_eq!(report(&judged).verdict, Verdict::Fail, "{}: {what}", case.name);
            assert!(what != "one value" || report(&judged).mismatches == 1, "{judged:?}");
        }
    }
    assert!(by_bound > 8, "{by_bound}: the layer's own bits need no bound");
}

/// A slot without an expert has zeros, whatever its `gate_up`.
#[test]
fn a_slot_without_an_expert_stays_zero() {
    let mut tried = 0;
    for (_, case) in cases() {
        let ids = case.input("topk_ids").expect("ids").elements::<i32>().into_owned();
        let Some(slot) = ids.iter().position(|&id| id < 0) else { continue };
        let mut values = values(&case, "activated");
        let size_i = values.len() / ids.len();
        values[slot * size_i + 3] = 1e-3;
        let judged = check_case(&with(&case, &values)).expect("a report");
        assert_eq!((report(&judged).verdict, report(&judged).mismatches), (Verdict::Fail, 1));
        tried += 1;
    }
    assert!(tried > 2, "{tried}");
}
