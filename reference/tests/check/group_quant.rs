//! The two ways in which releases of vLLM's `per_token_group_fp8_quant` make codes: x / scale (0.21.0) and
//! x · fl(1 / scale) (0.33.0). Loops in this file compute both.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::num::scalar::{bf16_to_f32, f32_to_bf16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::{self, Rng};
use serde_json::{Value, json};

const GROUP: usize = 32;

/// The code of e4m3fn that is nearest to x, ties to the even code, by trying all.
fn nearest(x: f32) -> u8 {
    let value = |code: u8| {
        let (exponent, fraction) = (i32::from(code >> 3), f64::from(code & 7));
        match exponent {
            0 => fraction / 512.0,
            _ => (1.0 + fraction / 8.0) * f64::from(exponent - 7).exp2(),
        }
    };
    let of = f64::from(x.abs()).min(448.0);
    let distance = |code: &u8| ((value(*code) - of).abs(), code & 1);
    let by = |a: &u8, b: &u8| distance(a).partial_cmp(&distance(b)).expect("numbers");
    let code = (0..=0x7e).min_by(by).expect("codes");
    if x.is_sign_negative() { code | 0x80 } else { code }
}

/// A case with rows `x` under a rule, and codes by a reciprocal or by a quotient.
fn judged(rule: &str, x: &[f32], reciprocal: bool) -> OutputReport {
    let config = json!({
        "dtype": "bfloat16", "size_m": 1, "size_k": x.len(), "group_size": GROUP, "quantizer": rule,
    });
    let Value::Object(config) = config else { panic!("keys") };
    let config = CaseConfig::from_json(Op::PerTokenGroupQuant, &config).expect("a config");
    let mut case = vectors::case_of(config, &mut Rng::new(1)).expect("a case");
    put(&mut case, x, reciprocal);
    let report = check_case(&case).expect("a report");
    let [codes, scales] = ["x_q", "x_s"]
        .map(|name| report.outputs.iter().find(|o| o.name == name).expect(name).clone());
    assert_eq!(scales.verdict, Verdict::Pass);
    codes
}

fn put(case: &mut Case<'static>, x: &[f32], reciprocal: bool) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for group in x.chunks_exact(GROUP) {
        let scale = group.iter().fold(1e-10f32, |m, v| m.max(v.abs())) / 448.0;
        let quotient = |v: &f32| if reciprocal { v * (1.0 / scale) } else { v / scale };
        codes.extend(group.iter().map(quotient).map(nearest));
        scales.push(scale);
    }
    let bits = x.iter().map(|&v| f32_to_bf16_rne(v)).collect();
    let input = Tensor::from_vec("x", DType::BF16, vec![1, x.len()], bits);
    case.add_input("x", input.expect("x"));
    let (k, groups) = (codes.len(), scales.len());
    let codes = Tensor::new("x_q", DType::F8E4M3, vec![1, k], codes);
    case.add_output("x_q", codes.expect("codes"));
    let scales = Tensor::from_vec("x_s", DType::F32, vec![1, groups], scales);
    case.add_output("x_s", scales.expect("scales"));
}

/// Rows on which the two differ in some codes.
fn rows() -> Vec<f32> {
    let mut state = 9u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 2f32.powi(23) - 1.0
    };
    (0..GROUP * 2000).map(|_| bf16_to_f32(f32_to_bf16_rne(next()))).collect()
}

#[test]
fn each_rule_accepts_its_own_codes() {
    let x = rows();
    for (rule, reciprocal) in [("quotient", false), ("scale_inverse", true)] {
        assert_eq!(judged(rule, &x, reciprocal).verdict, Verdict::Pass, "{rule}");
        let other = judged(rule, &x, !reciprocal);
        assert_eq!(other.verdict, Verdict::Fail, "{rule}");
        let cause = other.diagnosis.expect("a cause");
        let expected = if reciprocal { "codes-by-quotient" } else { "codes-by-reciprocal" };
        assert_eq!((cause.id.as_str(), cause.unexplained), (expected, 0), "{cause:?}");
    }
}

/// What vLLM 0.33.0's operator returned on an H200 for this value in a group with the largest magnitude 1.625.
#[test]
fn a_recorded_code() {
    let mut x = vec![0.0; GROUP];
    (x[0], x[14]) = (1.625, -0.304_687_5);
    let scale = 1.625f32 / 448.0;
    assert_eq!((nearest(x[14] * (1.0 / scale)), nearest(x[14] / scale)), (0xeb, 0xea));
    assert_eq!(judged("scale_inverse", &x, true).verdict, Verdict::Pass);
    assert_eq!(judged("quotient", &x, true).mismatches, 1);
}

/// Codes without a Marlin layout have no tiles, so the place of four wrong codes in two rows is not one.
#[test]
fn plain_codes_have_no_tiles() {
    let x: Vec<f32> =
        (0..GROUP * 4).map(|i| bf16_to_f32(f32_to_bf16_rne(i as f32 - 60.5))).collect();
    let config = json!({
        "dtype": "bfloat16", "size_m": 2, "size_k": x.len() / 2, "group_size": GROUP,
    });
    let Value::Object(config) = config else { panic!("keys") };
    let config = CaseConfig::from_json(Op::PerTokenGroupQuant, &config).expect("a config");
    let mut case = vectors::case_of(config, &mut Rng::new(1)).expect("a case");
    put(&mut case, &x, false);
    for (name, dtype) in [("x", DType::BF16), ("x_q", DType::F8E4M3), ("x_s", DType::F32)] {
        let tensor = if name == "x" {
            case.input(name).expect(name)
        } else {
            case.output(name).expect(name)
        };
        let bytes = tensor.bytes().to_vec();
        let cols = tensor.shape().iter().product::<usize>() / 2;
        let tensor = Tensor::new(name, dtype, vec![2, cols], bytes).expect(name);
        if name == "x" {
            case.add_input(name, tensor)
        } else {
            case.add_output(name, tensor)
        };
    }
    let codes = |case: &Case<'_>| {
        let report = check_case(case).expect("a report");
        report.outputs.iter().find(|o| o.name == "x_q").expect("x_q").clone()
    };
    assert_eq!(codes(&case).verdict, Verdict::Pass);
    let mut bytes = case.output("x_q").expect("x_q").bytes().to_vec();
    // Neighbouring codes at k 1, 34 and 63 of row 0 and at k 5 of row 1.
    for at in [1, 34, 63, 69] {
        bytes[at] ^= 1;
    }
    let damaged = Tensor::new("x_q", DType::F8E4M3, vec![2, x.len() / 2], bytes).expect("codes");
    case.add_output("x_q", damaged);
    let report = codes(&case);
    assert_eq!((report.verdict, report.mismatches), (Verdict::Fail, 4), "{report:?}");
    assert!(!format!("{:?}", report.diagnosis).contains("tile"), "{report:?}");
}
