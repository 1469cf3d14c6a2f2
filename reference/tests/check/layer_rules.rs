//! What a case of a layer may state or leave open. The cases are numpy's (`scripts/gen/moe_layers.py`), whose
//! products are fractions.

use marlinspike::case::Case;
use marlinspike::check::{CaseReport, Verdict, check_case};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use serde_json::{Value, json};

fn golden(name: &str) -> Vec<u8> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../golden/data/cases/");
    std::fs::read(format!("{root}{name}.safetensors")).expect("a recorded case")
}

fn verdict(report: &CaseReport, name: &str) -> Verdict {
    report.outputs.iter().find(|o| o.name == name).expect("the output").verdict
}

/// The case with another config.
fn with_keys<'c>(case: &Case<'c>, keys: &[(&str, Value)]) -> marlinspike::Result<Case<'c>> {
    let mut map = case.config.to_json();
    for (key, value) in keys {
        map.insert((*key).to_owned(), value.clone());
    }
    let config = marlinspike::case::CaseConfig::from_json(case.op, &map)?;
    Ok(Case { config, ..case.clone() })
}

/// Multiplies every value of a 16-bit output.
fn scaled<'c>(case: &Case<'c>, name: &str, factor: f64) -> Case<'c> {
    let mut case = case.clone();
    let tensor = case.output(name).expect("the output");
    let ty = match tensor.dtype() {
        DType::F16 => ScalarType::FLOAT16,
        _ => ScalarType::BFLOAT16,
    };
    let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
    let one = |&bits: &u16| ty.encode_rne(ty.to_f64(bits.into()) * factor) as u16;
    let values = tensor.elements::<u16>().iter().map(one).collect();
    case.add_output(name, Tensor::from_vec("", dtype, shape, values).expect("whole rows"));
    case
}

const MOE: [&str; 10] = [
    "int8_channel_f16",
    "int8_groups_bf16",
    "int8_product_f16",
    "int8_only_y_f16",
    "int8_down_bf16",
    "e4m3_groups_bf16",
    "swigluoai_halves_bf16",
    "swigluoai_interleaved_f16",
    "clamp_bf16",
    "router_weight_on_x_bf16",
];

#[test]
fn every_stage_passes_and_fails_if_it_is_scaled() {
    for name in MOE {
        let bytes = golden(&format!("moe-np_{name}"));
        let case = Case::parse(&bytes).expect("a case");
        let report = check_case(&case).expect("a report");
        assert_eq!(report.verdict, Verdict::Pass, "{name}: {report:#?}");
        for output in ["gate_up", "activated", "down", "y"] {
            if case.output(output).is_none() {
                continue;
            }
            let wrong = check_case(&scaled(&case, output, 1.25)).expect("a report");
            assert_eq!(verdict(&wrong, output), Verdict::Fail, "{name} {output}");
        }
    }
}

#[test]
fn a_stated_layout_is_the_only_one() {
    for (name, other) in [
        ("moe-np_swigluoai_halves_bf16", "interleaved"),
        ("moe-np_swigluoai_interleaved_f16", "halves"),
    ] {
        let bytes = golden(name);
        let case = Case::parse(&bytes).expect("a case");
        let wrong = with_keys(&case, &[("gate_up_layout", json!(other))]).expect("a config");
        let report = check_case(&wrong).expect("a report");
        assert_eq!(verdict(&report, "activated"), Verdict::Fail, "{name}");
        let open = with_keys(&case, &[("gate_up_layout", Value::Null)]).expect("a config");
        let report = check_case(&open).expect("a report");
        assert_eq!(report.verdict, Verdict::Pass, "{name}: {report:#?}");
        let notes: Vec<_> = report.outputs.iter().filter_map(|o| o.note.as_deref()).collect();
        assert!(notes.iter().any(|n| n.contains("does not state `gate_up_layout`")), "{notes:?}");
    }
}

#[test]
fn parameters_and_places_that_are_not_the_kernels_fail() {
    let bytes = golden("moe-np_clamp_bf16");
    let case = Case::parse(&bytes).expect("a case");
    for key in ["swiglu_limit", "swiglu_alpha", "swiglu_beta"] {
        let wrong = with_keys(&case, &[(key, Value::Null)]).expect("a config");
        assert_eq!(verdict(&check_case(&wrong).unwrap(), "activated"), Verdict::Fail, "{key}");
    }
    let bytes = golden("moe-np_router_weight_on_x_bf16");
    let case = Case::parse(&bytes).expect("a case");
    for (target, on_input) in [("down", false), ("gate_up", true)] {
        let keys = [
            ("router_weight_on", json!(target)),
            ("apply_router_weight_on_input", json!(on_input)),
        ];
        let wrong = with_keys(&case, &keys).expect("a config");
        assert_eq!(verdict(&check_case(&wrong).unwrap(), "gate_up"), Verdict::Fail, "{target}");
    }
    let keys = [("router_weight_on", json!("down")), ("apply_router_weight_on_input", json!(true))];
    let text = with_keys(&case, &keys).expect_err("a contradiction").to_string();
    assert!(text.contains("router_weight_on") && text.contains("gate_up or x"), "{text}");
    let keys = [("activation", json!("gelu")), ("swiglu_limit", json!(1.0))];
    let text = with_keys(&case, &keys).expect_err("no such parameter").to_string();
    assert!(text.contains("swiglu_limit") && text.contains("gelu"), "{text}");
}

#[test]
fn rows_that_are_not_finite_are_quantized_as_upstream_does() {
    for name in ["infinite_f16", "infinite_bf16"] {
        let bytes = golden(&format!("fused_experts_fp8_w8a8-np_layer_{name}"));
        let case = Case::parse(&bytes).expect("a case");
        let report = check_case(&case).expect("a report");
        assert_eq!(report.verdict, Verdict::Pass, "{name}: {report:#?}");
        let mut wrong = case.clone();
        let mut scales = case.output("a1q_scale").unwrap().elements::<f32>().into_owned();
        scales[0] = f32::NAN;
        let shape = vec![scales.len(), 1];
        let scales = Tensor::from_vec("", DType::F32, shape, scales).unwrap();
        wrong.add_output("a1q_scale", scales);
        assert_eq!(verdict(&check_case(&wrong).unwrap(), "a1q_scale"), Verdict::Fail, "{name}");
    }
}

#[test]
fn fp8_layers_are_judged_without_activated() {
    for name in ["fused_f16", "on_x_bf16"] {
        let bytes = golden(&format!("fused_experts_fp8_w8a8-np_layer_{name}"));
        let case = Case::parse(&bytes).expect("a case");
        let report = check_case(&case).expect("a report");
        assert_eq!(report.verdict, Verdict::Pass, "{name}: {report:#?}");
        for output in ["gate_up", "down", "y"] {
            let wrong = check_case(&scaled(&case, output, 1.25)).expect("a report");
            assert_eq!(verdict(&wrong, output), Verdict::Fail, "{name} {output}");
        }
        let mut only_y = case.clone();
        only_y.outputs.retain(|name, _| name == "y");
        assert_ne!(check_case(&only_y).unwrap().verdict, Verdict::Fail, "{name}");
        let wrong = check_case(&scaled(&only_y, "y", 2.0)).expect("a report");
        assert_eq!(verdict(&wrong, "y"), Verdict::Fail, "{name}");
    }
}
