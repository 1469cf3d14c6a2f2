//! Products of a layer with known mistakes: the check fails and names the cause.

use crate::product_model::*;
use marlinspike::case::{Case, CaseConfig};
use marlinspike::check::Verdict;
use marlinspike::num::scalar::f64_to_f16_rne;
use marlinspike::num::tensor::{DType, Tensor};

/// 12 tokens, two slots each, four experts; H = I = 256.
const SCALED: &str = "moe-nvfp4_f16";
/// The same sizes with bias and act-order.
const BIASED: &str = "moe-bf16_u8b128_g32_act1";
/// Half of eight experts.
const PARALLEL: &str = "moe-ep0_bf16_u4";

#[test]
fn the_model_is_right() {
    for name in [SCALED, BIASED, PARALLEL] {
        for output in ["gate_up", "down"] {
            let report = planted(name, output, |m| m.compute());
            assert_eq!(report.verdict, Verdict::Pass, "{name} {output}: {report:?}");
        }
    }
}

#[test]
fn router_weights() {
    let times = |times| {
        move |m: &mut Model| {
            m.routers = times;
            m.compute()
        }
    };
    for name in [SCALED, BIASED] {
        expect(name, "down", "router-weight-missing", times(0));
        expect(name, "down", "router-weight-twice", times(2));
    }
    let slot = expect(BIASED, "down", "router-weight-of-another-slot", |m| {
        m.router.as_mut().expect("weights").swap(6, 7);
        m.compute()
    });
    assert!(text(&slot).contains("row 6 (token 3, slot 0, expert"), "{}", text(&slot));
    assert!(text(&slot).contains("has that of token 3, slot 1"), "{}", text(&slot));
    assert!(text(&slot).contains("are in token 3"), "{}", text(&slot));
}

#[test]
fn rows_and_experts() {
    let swapped = expect(SCALED, "gate_up", "rows-moved", |m| {
        let mut y = m.compute();
        // Two rows of one expert.
        let first = m.expert[0];
        let other = (1..m.rows()).rfind(|&row| m.expert[row] == first).expect("another row");
        for n in 0..m.n {
            y.swap(n, other * m.n + n);
        }
        y
    });
    assert!(text(&swapped).contains("are swapped"), "{}", text(&swapped));
    let wrong = expect(PARALLEL, "gate_up", "wrong-expert", |m| {
        let row = (0..m.rows()).find(|&row| m.expert[row] == Some(1)).expect("a row");
        m.expert[row] = Some(3);
        m.compute()
    });
    assert!(text(&wrong).contains("with that of expert 3"), "{}", text(&wrong));
    expect(PARALLEL, "gate_up", "wrong-token", |m| {
        let row = (0..m.rows()).find(|&row| m.expert[row].is_some()).expect("a row");
        let other = (row + 2) / 2 * 2;
        m.x.copy_within(other * m.k..(other + 1) * m.k, row * m.k);
        m.compute()
    });
    let absent = expect(PARALLEL, "down", "absent-expert-not-zero", |m| {
        let mut y = m.compute();
        let row = (0..m.rows()).find(|&row| m.expert[row].is_none()).expect("a row");
        y[row * m.n + 5] = 1.0;
        y
    });
    assert!(text(&absent).contains("expert of another rank"), "{}", text(&absent));
}

#[test]
fn gate_and_up() {
    let halves = |map: fn(usize, usize) -> usize| {
        move |m: &mut Model| {
            let y = m.compute();
            (0..y.len()).map(|i| y[i / m.n * m.n + map(i % m.n, m.n / 2)]).collect()
        }
    };
    expect(SCALED, "gate_up", "gate-up-swapped", halves(|n, half| (n + half) % (2 * half)));
    expect(SCALED, "gate_up", "gate-up-interleaved", halves(|n, half| n % 2 * half + n / 2));
    let scale = expect(SCALED, "gate_up", "gate-scale-on-up", |m| {
        let half = m.n / 2;
        let y = m.compute();
        (0..y.len()).map(|i| if i % m.n < half { y[i] } else { m.round(y[i] * 0.75) }).collect()
    });
    assert!(text(&scale).contains("up (columns from 256)"), "{}", text(&scale));
}

#[test]
fn global_scales() {
    let set = |change: fn(usize, &[f64]) -> f64| {
        move |m: &mut Model| {
            let old: Vec<f64> = m.matrices.iter().map(|m| m.global.expect("a scale")).collect();
            for (e, matrix) in m.matrices.iter_mut().enumerate() {
                matrix.global = Some(change(e, &old));
            }
            m.compute().iter().map(|y| y.clamp(-65504.0, 65504.0)).collect()
        }
    };
    expect(SCALED, "gate_up", "global-scale-twice", set(|e, old| old[e] * old[e]));
    let other = planted(SCALED, "gate_up", set(|_, old| old[2]));
    assert_eq!(other.verdict, Verdict::Fail);
    let diagnosis = other.diagnosis.expect("a diagnosis");
    assert_eq!(diagnosis.id, "global-scale-of-another-expert");
    assert!(diagnosis.text.contains("that of expert 2"), "{}", diagnosis.text);
}

/// A layer of NVFP4 with a bias, which no golden case has: of `down`, (a·w · global + bias) ·
/// router weight is right, and upstream's kernel scales the bias too.
#[test]
fn bias_under_a_global_scale() {
    let bytes = golden(SCALED);
    for (fold, producer, verdict, id) in [
        (false, "anyone", Verdict::Pass, None),
        (true, "anyone", Verdict::Fail, Some("upstream-nvfp4-bias-scaled")),
        (true, "vllm 0.21.0 operators", Verdict::Fail, Some("upstream-nvfp4-bias-scaled")),
    ] {
        let mut case = Case::parse(&bytes).expect("a case");
        let CaseConfig::Moe(c) = &mut case.config else { panic!("a layer") };
        c.quant.has_bias = true;
        let (experts, h, i) = (c.num_experts, c.hidden_size, c.intermediate_size);
        let bias: Vec<f64> = (0..experts * h).map(|i| (i % 37) as f64 / 16.0 - 1.0).collect();
        let half: Vec<u16> = bias.iter().map(|&b| f64_to_f16_rne(b)).collect();
        let tensor = Tensor::from_vec("w2_bias", DType::F16, vec![experts, h], half);
        case.add_input("w2_bias", tensor.expect("a tensor"));
        case.outputs.remove("gate_up");
        case.provenance = producer.to_owned();
        let mut model = Model::new(&case, "down");
        model.fold_global = fold;
        put(&mut case, "down", &model.compute());
        let zeros = vec![0u16; experts * 2 * i];
        let wide = Tensor::from_vec("w13_bias", DType::F16, vec![experts, 2 * i], zeros);
        case.add_input("w13_bias", wide.expect("a tensor"));
        let report = judged(&mut case, "down");
        assert_eq!(report.verdict, verdict, "{producer}: {report:?}");
        assert_eq!(report.diagnosis.map(|d| d.id).as_deref(), id, "{producer}");
    }
}

#[test]
fn a_sum_rounded_before_its_global_scale() {
    expect(SCALED, "gate_up", "global-scale-after-rounding", |m| {
        m.early = true;
        m.compute()
    });
    // Large activations: the sum exceeds f16's range before the global scale.
    let bytes = golden(SCALED);
    let mut case = Case::parse(&bytes).expect("a case");
    let x = case.input("x").expect("x");
    let (shape, ty) = (x.shape().to_vec(), marlinspike::num::scalar::ScalarType::FLOAT16);
    let values = x.elements::<u16>();
    let large: Vec<u16> =
        values.iter().map(|&b| f64_to_f16_rne(ty.to_f64(b.into()) * 512.0)).collect();
    case.add_input("x", Tensor::from_vec("x", DType::F16, shape, large).expect("a tensor"));
    let mut model = Model::new(&case, "gate_up");
    model.early = true;
    let y = model.compute();
    assert!(y.iter().any(|y| y.is_infinite()) && y.iter().any(|y| y.is_finite()));
    put(&mut case, "gate_up", &y);
    let report = judged(&mut case, "gate_up");
    assert_eq!(report.verdict, Verdict::Fail);
    let diagnosis = report.diagnosis.expect("a diagnosis");
    assert_eq!(diagnosis.id, "overflow-before-global-scale", "{diagnosis:?}");
}

#[test]
fn parameters_of_another_expert() {
    let scales = planted(BIASED, "gate_up", |m| {
        let other = m.matrices[1].s.clone();
        m.matrices.iter_mut().for_each(|matrix| matrix.s = other.clone());
        m.compute()
    });
    let diagnosis = scales.diagnosis.clone().expect("a diagnosis");
    assert_eq!(diagnosis.id, "scales-of-another-expert", "{diagnosis:?}");
    assert!(diagnosis.text.contains("expert 1"), "{}", diagnosis.text);
    let bias = planted(BIASED, "down", |m| {
        let other = m.matrices[2].bias.clone();
        m.matrices.iter_mut().for_each(|matrix| matrix.bias = other.clone());
        m.compute()
    });
    let diagnosis = bias.diagnosis.clone().expect("a diagnosis");
    assert_eq!(diagnosis.id, "bias-of-another-expert", "{diagnosis:?}");
}

/// A layer that should have gate and up interleaved, and has them in halves.
#[test]
fn gate_and_up_of_the_other_order() {
    let report = planted("moe-top8_f16_u4", "gate_up", |m| {
        let (y, half) = (m.compute(), m.n / 2);
        (0..y.len()).map(|i| y[i / m.n * m.n + i % m.n % half * 2 + i % m.n / half]).collect()
    });
    assert_eq!(report.verdict, Verdict::Fail);
    assert_eq!(report.diagnosis.expect("a diagnosis").id, "gate-up-in-halves");
}
