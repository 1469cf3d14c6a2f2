//! Layers as a framework's user computes them: weights that are not rounded, router weights in
//! f32. They pass by default, and fail if upstream's convention is required.

use crate::product_model::*;
use marlinspike::case::Case;
use marlinspike::check::{Declared, OutputReport, Verdict, check_case_as};
use marlinspike::products::Convention;

const LAYERS: [&str; 3] = ["moe-top8_f16_u4", "moe-top1_f16_u4", "moe-ep0_bf16_u4"];

fn judged(case: &Case<'_>, output: &str, declared: &Declared) -> OutputReport {
    let report = check_case_as(case, declared).expect("a report");
    report.outputs.into_iter().find(|o| o.name == output).expect("the output")
}

/// Σ x·w in f32, times the router weight in f32, of weights that `weight` makes of an exact one.
fn float(m: &Model, weight: impl Fn(f64) -> f64) -> Vec<f64> {
    let mut out = vec![0.0; m.rows() * m.n];
    for (row, expert) in m.expert.iter().enumerate() {
        let Some(e) = *expert else { continue };
        let w = &m.matrices[e];
        let router = m.router.as_ref().map_or(1.0, |r| r[row] as f32);
        for n in 0..m.n {
            let term = |k: usize| {
                let at = w.group[k] * m.n + n;
                let weight = weight((w.q[k * m.n + n] - w.z[at]) * w.s[at]);
                m.x[row * m.k + k] as f32 * weight as f32
            };
            let sum = (0..m.k).fold(0f32, |sum, k| sum + term(k));
            out[row * m.n + n] = f64::from(sum * router);
        }
    }
    out
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn products_of_a_layer_pass_under_other_conventions() {
    let marlin = Declared { convention: Some(Convention::Marlin), ..Declared::default() };
    let mut refused = 0;
    for name in LAYERS {
        let bytes = golden(name);
        let case = Case::parse(&bytes).expect("a case");
        for output in ["gate_up", "down"] {
            let model = Model::new(&case, output);
            for (fits, values) in [
                ("unrounded", float(&model, |w| w)),
                ("canonical", float(&model, |w| model.round(w))),
            ] {
                let mut case = case.clone();
                put(&mut case, output, &values);
                let report = judged(&case, output, &Declared::default());
                assert_eq!(report.verdict, Verdict::Pass, "{name} {output}: {report:#?}");
                let named = report.conventions.iter().any(|c| c == fits);
                assert!(named, "{name} {output}: {:?}", report.conventions);
                let strict = judged(&case, output, &marlin).verdict;
                refused += usize::from(strict == Verdict::Fail);
            }
        }
    }
    assert!(refused >= 6, "{refused}");
}

/// Rows of two conventions in one output.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn a_mixture_of_conventions_fails() {
    let bytes = golden("moe-top8_f16_u4");
    let case = Case::parse(&bytes).expect("a case");
    let model = Model::new(&case, "down");
    let (a, b) = (model.compute(), float(&model, |w| w));
    let mixed: Vec<f64> =
        (0..a.len()).map(|i| if (i / model.n).is_multiple_of(2) { a[i] } else { b[i] }).collect();
    for (values, verdict) in [(&a, Verdict::Pass), (&b, Verdict::Pass), (&mixed, Verdict::Fail)] {
        let mut case = case.clone();
        put(&mut case, "down", values);
        let report = judged(&case, "down", &Declared::default());
        assert_eq!(report.verdict, verdict, "{report:#?}");
    }
}

/// Every judged stage states the faults that it excludes, among them zeros.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn every_stage_has_power() {
    for name in LAYERS {
        let bytes = golden(name);
        let case = Case::parse(&bytes).expect("a case");
        for output in ["topk_weights", "gate_up", "activated", "down", "y"] {
            let report = judged(&case, output, &Declared::default());
            let power = report.power.expect("power");
            assert!(power.is_enough(), "{name} {output}: {power:?}");
            assert_eq!(power.rejects.zeros, Some(true), "{name} {output}");
            assert!(power.uniform_error.expect("an error") < 0.02, "{name} {output}: {power:?}");
        }
    }
}
