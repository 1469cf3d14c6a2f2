//! Judges quantized activations that a `linear` case holds next to their source. They are inputs of
//! the product but outputs of a quantizer, so they are compared with `in.x`.

use super::LinearConfig;
use crate::Result;
use crate::judge::compare::Mismatch;
use crate::judge::picture::Picture;
use crate::judge::{Diagnosis, OutputReport, Verdict};
use crate::moe::layer::input_global_scale;
use crate::moe::widen;
use crate::num::dims::Shape;
use crate::num::scalar::ScalarType;
use crate::ops::case::Case;
use crate::ops::quant::source::Source;
use crate::quantize::{RuleFit, StatedActivations};

/// Reports on `a_q` and `a_scales`; empty if the case lacks them or their source.
pub(crate) fn linear(case: &Case<'_>, c: &LinearConfig) -> Result<Vec<OutputReport>> {
    let stated = |name: &str| case.inputs.get(name);
    let (Some(ty), Some(x), Some(codes), Some(scales)) =
        (c.quant.input_dtype, stated("x"), stated("a_q"), stated("a_scales"))
    else {
        return Ok(Vec::new());
    };
    let dtype = c.quant.dtype;
    let x: Vec<f32> = x.elements::<u16>().iter().map(|&bits| widen(dtype, bits)).collect();
    let factor = match ty {
        ScalarType::INT8 => {
            let source = Source::new(case, &c.quant, "", Shape::new(c.size_k, c.size_n));
            input_global_scale(&source.weights()?)
        }
        _ => 1.0,
    };
    let scales = scales.elements::<f32>();
    let (codes, scales) = (codes.bytes(), &scales[..]);
    let found = StatedActivations { x: &x, cols: c.size_k, dtype, ty, factor, codes, scales };
    let fit = found.explain(c.quantizer)?;
    Ok(vec![codes_report(c, &found, &fit), scales_report(c, &found, &fit)])
}

/// The note on the rule in both reports.
fn note(c: &LinearConfig, fit: &RuleFit) -> String {
    let name = fit.rule.name();
    let how = match (fit.is_exact(), c.quantizer) {
        (true, None) => format!("quantized from in.x by `{name}`"),
        (true, Some(_)) => format!("quantized from in.x by the declared quantizer `{name}`"),
        (false, Some(_)) => format!("not the result of the declared quantizer `{name}` for in.x"),
        (false, None) => format!(
            "not the result of any known quantizer for in.x; nearest: \
            `{name}`"
        ),
    };
    format!("an input of the product, {how}")
}

fn report(name: &str, elements: usize, wrong: &[usize], note: String) -> OutputReport {
    let verdict = if wrong.is_empty() { Verdict::Pass } else { Verdict::Fail };
    OutputReport {
        verdict,
        equal_bits: Some(1.0 - wrong.len() as f64 / elements.max(1) as f64),
        mismatches: wrong.len(),
        ..OutputReport::unchecked(name, elements, &note)
    }
}

fn picture(shape: [usize; 2], wrong: &[usize]) -> Picture {
    let mut picture = Picture::new("row", 1, shape);
    for &i in wrong {
        picture.add(0, shape, i / shape[1], i % shape[1], i);
    }
    picture
}

fn codes_report(c: &LinearConfig, found: &StatedActivations<'_>, fit: &RuleFit) -> OutputReport {
    let wrong = &fit.wrong_codes;
    let mut report = report("a_q", found.codes.len(), wrong, note(c, fit));
    let Some(&first) = wrong.first() else { return report };
    let (row, k) = (first / c.size_k, first % c.size_k);
    let (right, bits) = (fit.codes[first], found.codes[first]);
    let mismatch = Mismatch::element(vec![row, k], 8, None, None, right.into(), bits.into());
    report.first_mismatch = Some(Mismatch { k: Some(k), ..mismatch });
    let text = format!(
        "{} of {} codes are not those of in.x; the first, at [{row}, {k}], is {} where {} belongs",
        wrong.len(),
        found.codes.len(),
        found.value(bits),
        found.value(right),
    );
    report.diagnosis = Some(Diagnosis::place("activation-codes", text, wrong.len()));
    report.picture = Some(picture([c.size_m, c.size_k], wrong));
    report
}

fn scales_report(c: &LinearConfig, found: &StatedActivations<'_>, fit: &RuleFit) -> OutputReport {
    let wrong = &fit.wrong_scales;
    let mut report = report("a_scales", found.scales.len(), wrong, note(c, fit));
    let Some(&row) = wrong.first() else { return report };
    let (right, bits) = (fit.scales[row].to_bits(), found.scales[row].to_bits());
    report.first_mismatch = Some(Mismatch::element(vec![row, 0], 32, None, None, right, bits));
    report.diagnosis = Some(diagnose(found, fit));
    report.picture = Some(picture([c.size_m, 1], wrong));
    report
}

/// The mistake that gives every wrong scale, otherwise the first wrong scale.
fn diagnose(found: &StatedActivations<'_>, fit: &RuleFit) -> Diagnosis {
    let wrong = &fit.wrong_scales;
    let all = |made: &dyn Fn(f32) -> f32| {
        let near = |&row: &usize| {
            let (expected, scale) = (made(fit.scales[row]), found.scales[row]);
            (scale - expected).abs() <= expected.abs() * 4.0 * f32::EPSILON
        };
        wrong.iter().all(near)
    };
    let (id, text) = if found.factor != 1.0 && all(&|s| s / found.factor) {
        (
            "input-global-scale-missing",
            format!(
                "the scales lack the factor input_global_scale, {}, which a_scales include where \
                 there is more than one group",
                found.factor
            ),
        )
    } else if all(&|s| 1.0 / s) {
        ("activation-scale-inverted", "the scales are the reciprocals of the right ones".to_owned())
    } else {
        let row = wrong[0];
        let text = format!(
            "{} of {} scales are not those of in.x; the first, of row {row}, is {} where {} belongs",
            wrong.len(),
            found.scales.len(),
            found.scales[row],
            fit.scales[row],
        );
        return Diagnosis::place("activation-scales", text, wrong.len());
    };
    Diagnosis::explains(id, text)
}
