//! Causes that would be false, each with its near miss: the mistake of that name is still named.

use crate::product_model::*;
use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{OutputReport, Strength, Verdict, add_outputs, check_case, mistaken};
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

/// Negative values of a single row with their signs lost are a choice of columns; one run of columns is
/// not, and a factor of every column is none either.
#[test]
fn chosen_columns_are_no_factor() {
    let one_row = |change: &dyn Fn(usize, f64) -> f64| {
        planted(BIASED, "y", |m| {
            let mut y = m.compute();
            y[..m.n].iter_mut().enumerate().for_each(|(n, y)| *y = change(n, *y));
            y
        })
    };
    let lost = one_row(&|_, y| y.abs());
    assert_eq!(cause(&lost), None, "{lost:?}");
    let scattered = one_row(&|n, y| if n * n % 23 < 7 { -y } else { y });
    assert_eq!(cause(&scattered), None, "{scattered:?}");
    let run = one_row(&|n, y| if (32..64).contains(&n) { -y } else { y });
    assert_eq!(cause(&run).as_deref(), Some("constant-factor"), "{run:?}");
}

/// One wrong sign is no order of nibbles; all of the matrix's nibbles are.
#[test]
fn one_sign_is_no_mistake_of_the_matrix() {
    for (row, n) in [(0, 7), (1, 3)] {
        let report = planted(GROUPED, "y", |m| {
            let mut y = m.compute();
            y[row * m.n + n] *= -1.0;
            y
        });
        let cause = cause(&report);
        assert!(cause.as_deref() != Some("nibbles-swapped"), "{report:?}");
    }
    expect(GROUPED, "y", "nibbles-swapped", |m| {
        let (q, n) = (m.matrices[0].q.clone(), m.n);
        m.matrices[0].q = (0..q.len()).map(|i| q[((i / n) ^ 1) * n + i % n]).collect();
        m.compute()
    });
}

/// The last half of k is no padding; the last two groups of eight or more may be.
#[test]
fn half_of_k_is_no_padding() {
    let without = |groups: &dyn Fn(usize) -> usize| {
        planted("linear-bf16_mxfp8", "y", |m| {
            let (n, count) = (m.n, m.k / 32);
            m.matrices[0].s[(count - groups(count)) * n..].fill(0.0);
            m.compute()
        })
    };
    let half = without(&|count| count / 2);
    assert_ne!(cause(&half).as_deref(), Some("padded-scale-bytes"), "{half:?}");
    let two = without(&|_| 2);
    assert_eq!(cause(&two).as_deref(), Some("padded-scale-bytes"), "{two:?}");
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
fn experts_with_right_rows_are_named() {
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

/// A schedule without promotion cannot miss one: its sums were promoted.
#[test]
fn promotion_has_a_direction() {
    let Value::Object(config) = json!({
        "dtype": "bfloat16", "size_m": 17, "size_n": 40, "size_k": 384, "group_size": 128,
        "schedule": {
            "unit": {
                "architecture": "hopper", "instruction": "wgmma", "a": "float8_e4m3fn",
                "b": "float8_e4m3fn", "accumulator": "float32", "size_k": 32,
            },
            "weights": {"form": "unscaled"}, "rows": "stored", "chunks": "whole",
            "chunk_sum": {"order": "ascending", "type": "float32"},
            "epilogue": [
                {"op": "activation_scale", "type": "float32"},
                {"op": "channel_scale", "type": "float32"},
                {"op": "bias", "type": "float32"},
                {"op": "router_weight", "type": "float32"},
                {"op": "round", "type": "bfloat16"},
            ],
        },
    }) else {
        panic!("keys")
    };
    let config = CaseConfig::from_json(Op::W4a8Mm, &config).expect("a config");
    let mut case = vectors::case_of(config, &mut Rng::new(4)).expect("a case");
    add_outputs(&mut case).expect("outputs");
    assert!(mistaken(&case, "promotion-missing").expect("inputs").is_none());
    let wrong = mistaken(&case, "promotion-added").expect("inputs").expect("a difference");
    let report = check_case(&wrong).expect("a report");
    let y = report.outputs.into_iter().find(|o| o.name == "y").expect("y");
    assert_eq!(cause(&y).as_deref(), Some("promotion-added"), "{:?}", y.diagnosis);
}

/// Only `y` of a layer: mistakes are carried through the stages that the case lacks.
#[test]
fn stages_that_a_case_lacks() {
    let bytes = golden(SCALED);
    let case = Case::parse(&bytes).expect("a case");
    let CaseConfig::Moe(c) = &case.config else { panic!("a layer") };
    let (top_k, h, ty) = (c.top_k, c.hidden_size, c.quant.dtype);
    let down = case.output("down").expect("down").elements::<u16>().into_owned();
    let term = |i: usize, j: usize| ty.to_f64(down[(i / h * top_k + j) * h + i % h].into());
    let only_y = |of: &dyn Fn(usize) -> f64| {
        let mut wrong = case.clone();
        put(&mut wrong, "y", &(0..c.size_m * h).map(of).collect::<Vec<f64>>());
        wrong.outputs.retain(|name, _| ["y", "topk_ids", "topk_weights"].contains(&&**name));
        let report = check_case(&wrong).expect("a report");
        report.outputs.into_iter().find(|o| o.name == "y").expect("y")
    };
    let dropped = only_y(&|i| (0..top_k - 1).map(|j| term(i, j)).sum());
    assert_eq!(cause(&dropped).as_deref(), Some("slot-dropped"), "{:?}", dropped.diagnosis);
    // An unknown distortion has a place, and the outputs that would tell the stage.
    let noise = |i: usize| 1.0 + 0.6 * ((i * 13 % 17) as f64 / 17.0 - 0.5);
    let noisy = only_y(&|i| (0..top_k).map(|j| term(i, j)).sum::<f64>() * noise(i));
    assert_eq!(cause(&noisy), None, "{:?}", noisy.diagnosis);
    let text = noisy.diagnosis.expect("a place").text;
    assert!(text.contains("add out.gate_up"), "{text}");
}
