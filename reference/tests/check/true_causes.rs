//! Causes that would be false, each with its near miss: the mistake of that name is still named.

use crate::product_model::*;
use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{
    Diagnosis, OutputReport, Strength, Verdict, add_outputs, check_case, mistaken,
};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::vectors::{self, Rng};
use serde_json::{Value, json};

const GROUPED: &str = "linear-f16_awq_u4_g64";
const BIASED: &str = "linear-f16_u4b8_g128_act0";
const SCALED: &str = "moe-nvfp4_f16";

/// The id of a cause; `None` for a place.
fn cause(report: &OutputReport) -> Option<String> {
    assert_eq!(report.verdict, Verdict::Fail, "{report:?}");
    let diagnosis = report.diagnosis.as_ref().expect("a diagnosis");
    (diagnosis.strength != Strength::Place).then(|| diagnosis.id.clone())
}

/// The sum of each element in steps of the 16-bit type, a rounding after each run of k.
fn narrow_sums(m: &mut Model, run: usize) -> Vec<f64> {
    let w = &m.matrices[0];
    let weight = |k: usize, n: usize| {
        let at = w.group[k] * m.n + n;
        m.round((w.q[k * m.n + n] - w.z[at]) * w.s[at])
    };
    let element = |i: usize| {
        let (row, n) = (i / m.n, i % m.n);
        (0..m.k).step_by(run).fold(0.0, |sum, from| {
            let ks = from..(from + run).min(m.k);
            let part: f64 = ks.map(|k| m.x[row * m.k + k] * weight(k, n)).sum();
            m.round(sum + part)
        })
    };
    (0..m.rows() * m.n).map(element).collect()
}

#[test]
fn rounded_sums_are_no_factor() {
    for run in [1, 4, 16] {
        let report = planted(GROUPED, "y", |m| narrow_sums(m, run));
        if report.verdict == Verdict::Fail {
            assert_eq!(cause(&report), None, "{run}: {report:?}");
        }
    }
    let factor = |f: f64| move |m: &mut Model| m.compute().iter().map(|y| y * f).collect();
    for f in [0.5, -1.0, 1.5] {
        expect(GROUPED, "y", "constant-factor", factor(f));
    }
}

/// Signs lost at random fill no rows and columns; those of two rows do.
#[test]
fn scattered_signs_are_no_factor() {
    let mut state = 7u64;
    let mut one_in_five = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33).is_multiple_of(5)
    };
    let report = planted(BIASED, "y", |m| {
        m.compute().iter().map(|&y| if one_in_five() { -y } else { y }).collect()
    });
    assert_eq!(cause(&report), None, "{report:?}");
    let rows = planted(BIASED, "y", |m| {
        let mut y = m.compute();
        y[..2 * m.n].iter_mut().for_each(|y| *y = -*y);
        y
    });
    assert_eq!(cause(&rows).as_deref(), Some("constant-factor"), "{rows:?}");
}

/// A code of twice the value, or of zero, is one weight of one column, not a k of the sum.
#[test]
fn one_wrong_code_is_no_k_of_the_sum() {
    for (k, n, value) in [(5, 7, 2.0), (70, 100, 0.0), (200, 3, 2.0), (131, 64, 0.0)] {
        let report = planted(GROUPED, "y", |m| {
            let (w, at) = (&mut m.matrices[0], k * m.n + n);
            let zero = w.z[w.group[k] * m.n + n];
            w.q[at] = zero + (w.q[at] - zero) * value;
            m.compute()
        });
        if report.verdict == Verdict::Fail {
            let cause = cause(&report);
            assert!(cause.is_none() || cause.as_deref() == Some("wrong-code"), "{report:?}");
        }
    }
    let all_columns = |factor: f64| {
        move |m: &mut Model| {
            m.x.iter_mut().skip(5).step_by(m.k).for_each(|x| *x *= factor);
            m.compute()
        }
    };
    expect(GROUPED, "y", "k-dropped", all_columns(0.0));
    expect(GROUPED, "y", "k-twice", all_columns(2.0));
}

/// Two lost values are no zeros that were not written; a block of them is.
#[test]
fn few_zeros_have_no_cause() {
    let zeroed = |at: &'static [usize]| {
        move |m: &mut Model| {
            let mut y = m.compute();
            at.iter().for_each(|&i| y[i] = 0.0);
            y
        }
    };
    let report = planted(GROUPED, "y", zeroed(&[3, 140]));
    assert_eq!(cause(&report), None, "{report:?}");
    let report = planted(GROUPED, "y", zeroed(&[0, 1, 2, 3, 4, 5, 6, 7]));
    assert_eq!(cause(&report).as_deref(), Some("zeros"), "{report:?}");
}

/// Which experts have right rows is part of the place.
#[test]
fn experts_with_right_rows_are_told() {
    let report = planted(SCALED, "down", |m| {
        let mut y = m.compute();
        for (i, y) in y.iter_mut().enumerate() {
            let noise = 1.0 + 0.2 * ((i * 7 % 11) as f64 / 11.0 - 0.3);
            if m.expert[i / m.n] != Some(0) {
                *y = m.round(*y * noise);
            }
        }
        y
    });
    assert_eq!(cause(&report), None, "{report:?}");
    assert!(text(&report).contains("expert 0 are right"), "{}", text(&report));
}

fn generated(op: Op, config: Value, seed: u64) -> Case<'static> {
    let Value::Object(config) = config else { panic!("keys") };
    let config = CaseConfig::from_json(op, &config).expect("a config");
    let mut case = vectors::case_of(config, &mut Rng::new(seed)).expect("a case");
    add_outputs(&mut case).expect("outputs");
    case
}

fn of(case: &Case<'_>, output: &str) -> Option<Diagnosis> {
    let report = check_case(case).expect("a report");
    report.outputs.into_iter().find(|o| o.name == output).expect("the output").diagnosis
}

/// A schedule without promotion cannot miss one: its sums were promoted.
#[test]
fn promotion_has_a_direction() {
    let config = |schedule: &str| {
        json!({
            "dtype": "bfloat16", "size_m": 9, "size_n": 32, "size_k": 1024,
            "per_act_token_quant": true, "per_out_ch_quant": true, "schedule": schedule,
        })
    };
    let case = generated(Op::ScaledMm, config("canonical"), 4);
    let wrong = mistaken(&case, "promotion-missing").expect("inputs").expect("a difference");
    let id = of(&wrong, "y").expect("a cause").id;
    assert!(["promotion-missing", "schedule-split"].contains(&&*id), "{id}");
    assert!(mistaken(&case, "promotion-added").expect("inputs").is_none());
}

/// Only `y` of a layer: its mistakes are carried through the stages.
#[test]
fn stages_that_a_case_lacks() {
    let config = json!({
        "checkpoint_format": "gptq", "weight_type": "uint4b8", "dtype": "float16",
        "group_size": 64, "size_m": 6, "num_experts": 8, "top_k": 2, "hidden_size": 128,
        "intermediate_size": 64, "activation": "silu", "scoring_func": "softmax",
        "renormalize": true, "block_size_m": 16,
    });
    let case = generated(Op::Moe, config, 11);
    let only_y = |mut case: Case<'static>| {
        case.outputs.retain(|name, _| name == "y" || name.starts_with("topk"));
        case
    };
    let swapped = |case: &Case<'static>| {
        let mut other = case.clone();
        for name in ["w13_qweight", "w13_scales"] {
            let tensor = case.input(name).expect("a weight");
            let (shape, n) = (tensor.shape().to_vec(), tensor.shape()[2]);
            let width = tensor.dtype().bytes();
            let mut bytes = tensor.bytes().to_vec();
            bytes.chunks_mut(n * width).for_each(|row| row.rotate_left(n / 2 * width));
            let tensor = Tensor::new(name, tensor.dtype(), shape, bytes).expect("a tensor");
            other.add_input(name, tensor);
        }
        add_outputs(&mut other).expect("outputs");
        let mut wrong = case.clone();
        wrong.add_output("y", other.output("y").expect("y").clone());
        wrong
    };
    let found = of(&only_y(swapped(&case)), "y").expect("a cause");
    assert_eq!(found.id, "gate-up-swapped", "{found:?}");

    // One slot of one token by another expert: the logits of both exchanged.
    let ids = case.output("topk_ids").expect("ids").elements::<i32>().into_owned();
    let other = (0..8).find(|e| ![ids[4], ids[5]].contains(e)).expect("another expert");
    let mut logits = case.input("router_logits").expect("logits").elements::<f32>().into_owned();
    logits.swap(2 * 8 + ids[4] as usize, 2 * 8 + other as usize);
    let mut routed = case.clone();
    let tensor = Tensor::from_vec("router_logits", DType::F32, vec![6, 8], logits);
    routed.add_input("router_logits", tensor.expect("logits"));
    add_outputs(&mut routed).expect("outputs");
    let mut wrong = case.clone();
    wrong.add_output("y", routed.output("y").expect("y").clone());
    let found = of(&only_y(wrong), "y").expect("a cause");
    let text = format!("token 2, slot 0 by expert {other} instead of {}", ids[4]);
    assert_eq!(found.id, "wrong-expert", "{found:?}");
    assert!(found.text.contains(&text), "{found:?}");

    // An unknown distortion: a place, and what to add.
    let mut wrong = case.clone();
    let y = case.output("y").expect("y");
    let ty = ScalarType::FLOAT16;
    let values: Vec<u16> = y
        .elements::<u16>()
        .iter()
        .enumerate()
        .map(|(i, &b)| {
            let x = ty.to_f64(b.into());
            ty.encode_rne(x * (1.0 + 0.3 * ((i * 13 % 17) as f64 / 17.0 - 0.5))) as u16
        })
        .collect();
    let tensor = Tensor::from_vec("y", DType::F16, y.shape().to_vec(), values).expect("y");
    wrong.add_output("y", tensor);
    let found = of(&only_y(wrong), "y").expect("a place");
    assert_eq!(found.strength, Strength::Place, "{found:?}");
    assert!(found.text.contains("add out.gate_up"), "{found:?}");
}
