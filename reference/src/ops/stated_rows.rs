//! Judges quantized rows that a case holds next to their source: one known quantizer must explain all
//! codes and scales.

use crate::Result;
use crate::judge::compare::Mismatch;
use crate::judge::picture::Picture;
use crate::judge::{Diagnosis, OutputReport, Verdict};
use crate::quantize::{ActivationRule, RuleFit, StatedActivations};

/// Quantized rows of a case.
pub(super) struct StatedRows<'c> {
    /// Names of the codes and of their scales.
    pub(super) names: [&'static str; 2],
    /// The tensor that they are quantized from.
    pub(super) source: &'static str,
    /// The beginning of the note on both.
    pub(super) role: &'static str,
    /// The quantizer that the case declares.
    pub(super) declared: Option<ActivationRule>,
    /// The rows.
    pub(super) found: StatedActivations<'c>,
}

impl StatedRows<'_> {
    /// The reports on codes and scales.
    ///
    /// # Errors
    /// As [`StatedActivations::explain`].
    pub(super) fn judge(&self) -> Result<Vec<OutputReport>> {
        let fit = self.found.explain(self.declared)?;
        Ok(vec![self.codes_report(&fit), self.scales_report(&fit)])
    }

    /// The note on the rule in both reports.
    fn note(&self, fit: &RuleFit) -> String {
        let (name, source) = (fit.rule.name(), self.source);
        let how = match (fit.is_exact(), self.declared) {
            (true, None) => format!("quantized from {source} by `{name}`"),
            (true, Some(_)) => {
                format!("quantized from {source} by the declared quantizer `{name}`")
            }
            (false, Some(_)) => {
                format!("not the result of the declared quantizer `{name}` for {source}")
            }
            (false, None) => format!(
                "not the result of any known quantizer for {source}; nearest: \
                `{name}`"
            ),
        };
        format!("{}{how}", self.role)
    }

    fn codes_report(&self, fit: &RuleFit) -> OutputReport {
        let (found, wrong) = (&self.found, &fit.wrong_codes);
        let mut report = report(self.names[0], found.codes.len(), wrong, self.note(fit));
        let Some(&first) = wrong.first() else { return report };
        let (row, k) = (first / found.cols, first % found.cols);
        let (right, bits) = (fit.codes[first], found.codes[first]);
        let mismatch = Mismatch::element(vec![row, k], 8, None, None, right.into(), bits.into());
        report.first_mismatch = Some(Mismatch { k: Some(k), ..mismatch });
        let text = format!(
            "{} of {} codes are not those of {}; the first, at [{row}, {k}], is {} where {} belongs",
            wrong.len(),
            found.codes.len(),
            self.source,
            found.value(bits),
            found.value(right),
        );
        report.diagnosis = Some(Diagnosis::place("activation-codes", text, wrong.len()));
        report.picture = Some(picture([found.scales.len(), found.cols], wrong));
        report
    }

    fn scales_report(&self, fit: &RuleFit) -> OutputReport {
        let (found, wrong) = (&self.found, &fit.wrong_scales);
        let mut report = report(self.names[1], found.scales.len(), wrong, self.note(fit));
        let Some(&row) = wrong.first() else { return report };
        let (right, bits) = (fit.scales[row].to_bits(), found.scales[row].to_bits());
        report.first_mismatch = Some(Mismatch::element(vec![row, 0], 32, None, None, right, bits));
        report.diagnosis = Some(self.diagnose(fit));
        report.picture = Some(picture([found.scales.len(), 1], wrong));
        report
    }

    /// The mistake that gives every wrong scale, otherwise the first wrong scale.
    fn diagnose(&self, fit: &RuleFit) -> Diagnosis {
        let (found, wrong) = (&self.found, &fit.wrong_scales);
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
            (
                "activation-scale-inverted",
                "the scales are the reciprocals of the right ones".to_owned(),
            )
        } else {
            let row = wrong[0];
            let text = format!(
                "{} of {} scales are not those of {}; the first, of row {row}, is {} where {} belongs",
                wrong.len(),
                found.scales.len(),
                self.source,
                found.scales[row],
                fit.scales[row],
            );
            return Diagnosis::place("activation-scales", text, wrong.len());
        };
        Diagnosis::explains(id, text)
    }
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
