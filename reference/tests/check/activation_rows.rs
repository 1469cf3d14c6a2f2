//! Quantized activations: their rows are rows, not columns n of a weight.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::num::tensor::Tensor;
use marlinspike::vectors::{self, Rng};
use serde_json::{Value, json};

const ROWS: usize = 5;

/// Cases of five rows of 128 k: the output of codes, and the bytes of a row.
fn cases() -> Vec<(&'static str, usize, Case<'static>)> {
    let made = |op: Op, config: Value| {
        let Value::Object(config) = config else { panic!("keys") };
        let config = CaseConfig::from_json(op, &config).expect("a config");
        let case = vectors::case_of(config, &mut Rng::new(5)).expect("a case");
        let rows = case.input("x").expect("x").shape()[0];
        assert_eq!(rows, ROWS, "{op}");
        case
    };
    let fp8 = json!({"dtype": "bfloat16", "size_m": ROWS, "size_k": 128, "group_size": 32});
    let fp4 = json!({"dtype": "bfloat16", "size_m": ROWS, "size_k": 128});
    let int8 = json!({"dtype": "bfloat16", "size_m": ROWS, "size_k": 128});
    vec![
        ("x_q", 128, made(Op::PerTokenGroupQuant, fp8)),
        ("x_fp4", 64, made(Op::ScaledFp4Quant, fp4)),
        ("x_q", 128, made(Op::DynamicInt8Quant, int8)),
    ]
}

/// The verdict on the codes after `change` of their bytes.
fn judged(name: &str, case: &Case<'static>, change: impl FnOnce(&mut Vec<u8>)) -> OutputReport {
    let mut case = case.clone();
    let tensor = case.output(name).expect("codes").clone();
    let mut bytes = tensor.bytes().to_vec();
    change(&mut bytes);
    let changed = Tensor::new("", tensor.dtype(), tensor.shape().to_vec(), bytes);
    case.add_output(name, changed.expect("codes"));
    let report = check_case(&case).expect("a report");
    report.outputs.into_iter().find(|o| o.name == name).expect("codes")
}

fn text(report: OutputReport) -> (String, String) {
    assert_eq!(report.verdict, Verdict::Fail);
    let diagnosis = report.diagnosis.expect("a diagnosis");
    (diagnosis.id, diagnosis.text)
}

#[test]
fn swapped_rows_are_rows() {
    for (name, width, case) in cases() {
        assert_eq!(judged(name, &case, |_| ()).verdict, Verdict::Pass, "{name}");
        let swapped = judged(name, &case, |bytes| {
            let (first, second) = bytes[width..3 * width].split_at_mut(width);
            first.swap_with_slice(second);
        });
        let (id, text) = text(swapped);
        let wanted = "rows of the activations are in another order: 1 and 2 are swapped";
        assert_eq!((&*id, &*text), ("rows-moved", wanted), "{name}");
    }
}

#[test]
fn wrong_codes_are_in_a_row() {
    for (name, width, case) in cases() {
        let one = judged(name, &case, |bytes| bytes[3 * width + 7] ^= 1);
        let place = one.first_mismatch.clone().expect("a place");
        let k = if name == "x_fp4" { 14 } else { 7 };
        assert_eq!((&*place.index, place.k, place.n), (&[3, 7][..], Some(k), None), "{name}");
        let (id, said) = text(one);
        assert_eq!(id, "confined", "{name}: {said}");
        assert!(said.contains(&format!("the value at row 3, k {k}")), "{name}: {said}");
        let several = judged(name, &case, |bytes| {
            for at in [3, 11, 40, 41, 50] {
                bytes[2 * width + at] ^= 1;
            }
        });
        let (_, said) = text(several);
        assert!(said.contains("row 2 of the activations"), "{name}: {said}");
        assert!(!said.contains("column n"), "{name}: {said}");
    }
}
