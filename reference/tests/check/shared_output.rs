//! A shared expert's output as a part of `y`. The right cases are numpy's (`scripts/gen/moe_layers.py`,
//! `scripts/gen/int8_experts.py`); the wrong ones follow from them by sums in f64, which are exact.

use marlinspike::case::Case;
use marlinspike::check::{CaseReport, OutputReport, Verdict, check_case};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};

const WITH_DOWN: [&str; 5] = [
    "moe-np_shared_apart_bf16",
    "moe-np_shared_fused_f16",
    "fused_experts_fp8_w8a8-np_layer_shared_apart_bf16",
    "fused_experts_fp8_w8a8-np_layer_shared_fused_f16",
    "fused_experts_int8_w8a8-np_f16_shared",
];

/// A case with only `y`.
const ONLY_Y: &str = "moe-np_shared_only_y_bf16";

fn golden(name: &str) -> Vec<u8> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../golden/data/cases/");
    std::fs::read(format!("{root}{name}.safetensors")).expect("a recorded case")
}

fn y(report: &CaseReport) -> &OutputReport {
    report.outputs.iter().find(|o| o.name == "y").expect("y")
}

fn cause(report: &CaseReport) -> Option<&str> {
    y(report).diagnosis.as_ref().map(|d| d.id.as_str())
}

/// The type and values of a 16-bit tensor.
fn values(tensor: &Tensor<'_>) -> (ScalarType, Vec<f64>) {
    let ty = match tensor.dtype() {
        DType::F16 => ScalarType::FLOAT16,
        _ => ScalarType::BFLOAT16,
    };
    (ty, tensor.elements::<u16>().iter().map(|&bits| ty.to_f64(bits.into())).collect())
}

/// The case with another `y`: of the sum over the slots and the shared expert's value, by index.
fn with_y<'c>(case: &Case<'c>, of: impl Fn(f64, f64, usize) -> f64) -> Case<'c> {
    let shared = case.input("shared_output").expect("the input");
    let (ty, extra) = values(shared);
    let (_, down) = values(case.output("down").expect("down"));
    let (dtype, shape) = (shared.dtype(), shared.shape().to_vec());
    let top_k = down.len() / extra.len();
    let one = |i: usize| {
        let (m, n) = (i / shape[1], i % shape[1]);
        let sum: f64 = (0..top_k).map(|j| down[(m * top_k + j) * shape[1] + n]).sum();
        ty.encode_rne(of(ty.to_f64(ty.encode_rne(sum)), extra[i], i)) as u16
    };
    let y = (0..extra.len()).map(one).collect();
    let mut case = case.clone();
    case.add_output("y", Tensor::from_vec("", dtype, shape.clone(), y).expect("whole rows"));
    case
}

#[test]
fn either_rounding_passes() {
    for name in WITH_DOWN.into_iter().chain([ONLY_Y]) {
        let bytes = golden(name);
        let case = Case::parse(&bytes).expect("a case");
        let report = check_case(&case).expect("a report");
        assert_eq!(report.verdict, Verdict::Pass, "{name}: {report:#?}");
        if name != ONLY_Y {
            let apart = with_y(&case, |sum, shared, _| sum + shared);
            assert_eq!(check_case(&apart).unwrap().verdict, Verdict::Pass, "{name}");
        }
    }
}

#[test]
fn a_missing_and_a_doubled_output_are_named_and_near_ones_are_not() {
    for name in WITH_DOWN {
        let bytes = golden(name);
        let case = Case::parse(&bytes).expect("a case");
        let missing = check_case(&with_y(&case, |sum, _, _| sum)).unwrap();
        assert_eq!(cause(&missing), Some("shared-output-missing"), "{name}");
        let twice = check_case(&with_y(&case, |sum, shared, _| sum + 2.0 * shared)).unwrap();
        assert_eq!(cause(&twice), Some("shared-output-twice"), "{name}");
        // Half of it is added, and it is missing in a third of the values, which are all over the output.
        let half = with_y(&case, |sum, shared, _| sum + 0.5 * shared);
        let some = with_y(&case, |sum, shared, i| if i * 7 % 3 == 0 { sum - shared } else { sum });
        for wrong in [half, some] {
            let report = check_case(&wrong).unwrap();
            assert_eq!(y(&report).verdict, Verdict::Fail, "{name}");
            let id = cause(&report);
            assert!(!id.is_some_and(|id| id.starts_with("shared-output")), "{name}: {id:?}");
        }
    }
}

#[test]
fn a_layer_with_only_y_names_the_missing_output() {
    for name in WITH_DOWN.into_iter().filter(|name| !name.contains("fp8")) {
        let bytes = golden(name);
        let case = Case::parse(&bytes).expect("a case");
        let mut missing = with_y(&case, |sum, _, _| sum);
        missing.outputs.retain(|name, _| name == "y" || name.starts_with("topk"));
        assert_eq!(cause(&check_case(&missing).unwrap()), Some("shared-output-missing"), "{name}");
        let mut right = case.clone();
        right.outputs.retain(|name, _| name == "y" || name.starts_with("topk"));
        assert_ne!(y(&check_case(&right).unwrap()).verdict, Verdict::Fail, "{name}");
    }
}

#[test]
fn without_the_input_the_output_is_wrong_and_its_shape_is_checked() {
    for name in WITH_DOWN {
        let bytes = golden(name);
        let mut case = Case::parse(&bytes).expect("a case");
        let shared = case.inputs.remove("shared_output").expect("the input");
        assert_eq!(y(&check_case(&case).unwrap()).verdict, Verdict::Fail, "{name}");
        let (dtype, shape) = (shared.dtype(), shared.shape());
        let longer = vec![0u16; (shape[0] + 1) * shape[1]];
        let longer = Tensor::from_vec("", dtype, vec![shape[0] + 1, shape[1]], longer).unwrap();
        case.add_input("shared_output", longer);
        let text = check_case(&case).expect_err("another shape").to_string();
        assert!(text.contains("shared_output"), "{name}: {text}");
    }
}
