//! Rows with infinities that a case states as the input of a layer's quantizer, and cases without rows.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{Verdict, check_case};
use marlinspike::num::tensor::{DType, Tensor};
use serde_json::{Value, json};

const ROWS: usize = 3;
const SIZE: usize = 32;
const ONE: u16 = 0x3c00;
const MINUS_ONE: u16 = 0xbc00;
const INFINITY: u16 = 0x7c00;

fn tensor(dtype: DType, shape: &[usize], bytes: Vec<u8>) -> Tensor<'static> {
    Tensor::new("", dtype, shape.to_vec(), bytes).expect("a tensor")
}

fn halves(values: &[u16], shape: &[usize]) -> Tensor<'static> {
    tensor(DType::F16, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
}

fn floats(values: &[f32], shape: &[usize]) -> Tensor<'static> {
    Tensor::from_vec("", DType::F32, shape.to_vec(), values.to_vec()).expect("a tensor")
}

fn case_of(op: Op, config: Value) -> Case<'static> {
    let map = config.as_object().expect("an object").clone();
    let config = CaseConfig::from_json(op, &map).expect("a config");
    Case::new("x", config, "this test")
}

/// Zero weights, so that x gives zeros: `row` states `activated` in row 1 instead.
fn fused(row: &[u16; SIZE]) -> Case<'static> {
    let mut case = case_of(
        Op::from_name("fused_experts_fp8_w8a8").expect("an operation"),
        json!({"num_experts": 1, "num_local_experts": 1, "dtype": "float16", "size_m": ROWS, "top_k": 1,
               "hidden_size": SIZE, "intermediate_size": SIZE, "activation": "silu",
               "apply_router_weight_on_input": false, "per_act_token_quant": true, "per_out_ch_quant": true}),
    );
    let e4m3 = |rows: usize| tensor(DType::F8E4M3, &[1, rows, SIZE], vec![0; rows * SIZE]);
    case.add_input("x", halves(&[ONE; ROWS * SIZE], &[ROWS, SIZE]));
    case.add_input("topk_ids", tensor(DType::I32, &[ROWS, 1], vec![0; 4 * ROWS]));
    case.add_input("topk_weights", floats(&[1.0; ROWS], &[ROWS, 1]));
    case.add_input("w13_weight", e4m3(2 * SIZE));
    case.add_input("w2_weight", e4m3(SIZE));
    case.add_input("w13_weight_scale", floats(&[1.0; 2 * SIZE], &[1, 2 * SIZE, 1]));
    case.add_input("w2_weight_scale", floats(&[1.0; SIZE], &[1, SIZE, 1]));
    let mut activated = [0u16; ROWS * SIZE];
    activated[SIZE..2 * SIZE].copy_from_slice(row);
    case.add_output("activated", halves(&activated, &[ROWS, SIZE]));
    // Infinity over infinity is limited to 448, -1 over infinity is -0.
    let code = |&bits: &u16| match bits {
        INFINITY => 0x7e,
        bits => (bits >> 15 << 7) as u8,
    };
    let least = 1.0 / (448.0 * 512.0);
    let scales = [least, f32::INFINITY, least];
    case.add_output(
        "a2q",
        tensor(DType::F8E4M3, &[ROWS, SIZE], activated.iter().map(code).collect()),
    );
    case.add_output("a2q_scale", floats(&scales, &[ROWS, 1]));
    case
}

fn verdicts(case: &Case<'_>, name: &str) -> [Verdict; 2] {
    let report = check_case(case).expect("a report");
    let one = report.outputs.iter().find(|o| o.name == name).expect("the output");
    [one.verdict, report.verdict]
}

#[test]
fn a_row_with_an_infinity_is_the_input_of_the_quantizer() {
    use Verdict::{Fail, Pass, Unchecked};
    let mut row = [0u16; SIZE];
    [row[3], row[4]] = [INFINITY, MINUS_ONE];
    let right = fused(&row);
    let report = check_case(&right).expect("a report");
    assert_eq!(report.verdict, Pass, "{report:?}");
    let id = report.outputs.iter().find_map(|o| o.diagnosis.as_ref()).map(|d| d.id.clone());
    assert_eq!(id.as_deref(), Some("quantizer-input"));
    // With what precedes or follows, `activated` is an output of the layer.
    let mut known = right.clone();
    known.add_output("gate_up", halves(&[0; 2 * ROWS * SIZE], &[ROWS, 2 * SIZE]));
    assert_eq!(verdicts(&known, "activated"), [Fail, Fail]);
    let mut longer = right.clone();
    longer.add_output("y", halves(&[0; ROWS * SIZE], &[ROWS, SIZE]));
    assert_eq!(verdicts(&longer, "activated")[0], Unchecked);
    // A finite value that x does not give, in a row without infinities.
    let mut other = right.clone();
    let mut values = right.output("activated").expect("it").elements::<u16>().into_owned();
    values[2 * SIZE] = ONE;
    other.add_output("activated", halves(&values, &[ROWS, SIZE]));
    assert_ne!(verdicts(&other, "activated")[0], Pass);
    // The quantizer itself.
    let mut wrong = right.clone();
    let mut codes = right.output("a2q").expect("it").bytes().to_vec();
    codes[SIZE + 3] = 0;
    wrong.add_output("a2q", tensor(DType::F8E4M3, &[ROWS, SIZE], codes));
    assert_eq!(verdicts(&wrong, "a2q"), [Fail, Fail]);
}

#[test]
fn rows_with_nan_or_infinity_of_the_mxfp4_product_are_nan() {
    let of = |size_m: usize, special: f32, wrong: bool| {
        let config = json!({"dtype": "float32", "has_bias": false, "size_m": size_m, "size_n": 2, "size_k": 64});
        let mut case = case_of(Op::E2m1Int8Linear, config);
        let mut x = vec![0f32; size_m * 64];
        x[40] = special;
        let mut y = vec![0f32; size_m * 2];
        y[..2].fill(if wrong { 0.0 } else { f32::NAN });
        case.add_input("x", floats(&x, &[size_m, 64]));
        case.add_input("weight", tensor(DType::U8, &[2, 32], vec![0x22; 64]));
        case.add_input("weight_scale", tensor(DType::U8, &[2, 2], vec![127; 4]));
        case.add_output("y", floats(&y, &[size_m, 2]));
        verdicts(&case, "y")[0]
    };
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for size_m in [1, 3] {
            assert_eq!(of(size_m, special, false), Verdict::Pass, "{special} {size_m}");
            assert_eq!(of(size_m, special, true), Verdict::Fail, "{special} {size_m}");
        }
    }
}

#[test]
fn keys_that_exclude_each_other_are_named() {
    let config = json!({"routing": {"scoring_func": "softmax", "top_k": 2, "renormalize": true,
                        "renormalize_epsilon": 1e-6, "renormalize_p": 2.0}});
    let map = config.as_object().expect("an object");
    let error = CaseConfig::from_json(Op::Router, map).expect_err("two divisors").to_string();
    assert!(error.contains("renormalize_epsilon and renormalize_p"), "{error}");
    assert!(!error.contains("Some("), "{error}");
}
