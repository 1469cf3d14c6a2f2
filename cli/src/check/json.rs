//! The output of `--json`: one object per line for each case, then one with the summary and, with
//! `--backend`, the comparisons made for each operation.
//!
//! `docs/src/check.schema.json` publishes the keys, so none may be removed or renamed.

use marlinspike::check::{Mismatch, OutputReport, Power, Strength, Verdict};
use serde::Serialize;

use super::{Checked, Run};

#[derive(Serialize)]
struct CaseLine<'r> {
    path: String,
    op: Option<&'r str>,
    name: Option<&'r str>,
    verdict: &'static str,
    outputs: Vec<Output<'r>>,
    /// The fault that the golden manifest records for this case, if it explains every failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    known_fault: Option<&'r str>,
    error: Option<String>,
}

#[derive(Serialize)]
struct Output<'r> {
    name: &'r str,
    verdict: Verdict,
    elements: usize,
    mismatches: usize,
    equal_bits: Option<f64>,
    max_ulp: Option<f64>,
    max_error_over_bound: Option<f64>,
    first_mismatch: Option<&'r Mismatch>,
    diagnosis: Option<&'r str>,
    diagnosis_id: Option<&'r str>,
    /// Number of mismatches that the diagnosis does not explain.
    diagnosis_unexplained: Option<usize>,
    /// `explains`, `consistent` or `place`.
    diagnosis_strength: Option<Strength>,
    /// The readings that explain a product, most specific first; null if none was tried.
    conventions: Option<&'r [String]>,
    /// The mistakes that the verdict excludes.
    power: Option<&'r Power>,
    note: Option<&'r str>,
}

impl<'r> From<&'r OutputReport> for Output<'r> {
    fn from(o: &'r OutputReport) -> Self {
        let diagnosis = o.diagnosis.as_ref();
        Self {
            name: &o.name,
            verdict: o.verdict,
            elements: o.elements,
            mismatches: o.mismatches,
            equal_bits: o.equal_bits,
            max_ulp: o.max_ulp,
            max_error_over_bound: o.max_error_over_bound,
            first_mismatch: o.first_mismatch.as_ref(),
            diagnosis: diagnosis.map(|d| d.text.as_str()),
            diagnosis_id: diagnosis.map(|d| d.id.as_str()),
            diagnosis_unexplained: diagnosis.map(|d| d.unexplained),
            diagnosis_strength: diagnosis.map(|d| d.strength),
            conventions: Some(&o.conventions[..]).filter(|c| !c.is_empty()),
            power: o.power.as_ref(),
            note: o.note.as_deref(),
        }
    }
}

fn case_line(checked: &Checked) -> CaseLine<'_> {
    let path = checked.path.display().to_string();
    match &checked.result {
        Ok(report) => CaseLine {
            path,
            op: Some(&report.op),
            name: Some(&report.name),
            verdict: match report.verdict {
                Verdict::Pass => "pass",
                Verdict::Fail => "fail",
                Verdict::Unchecked => "unchecked",
            },
            outputs: report.outputs.iter().map(Output::from).collect(),
            known_fault: checked.fails_as_recorded(),
            error: None,
        },
        Err(error) => CaseLine {
            path,
            op: None,
            name: None,
            verdict: "error",
            outputs: Vec::new(),
            known_fault: None,
            error: Some(crate::style::shortened(&error.to_string()).into_owned()),
        },
    }
}

/// All lines. Skipped cases have no line, but the summary counts them.
pub(super) fn render(run: &Run) -> String {
    let shown = run.checked.iter().filter(|c| !c.skipped());
    let mut text = String::new();
    for checked in shown {
        push_line(&mut text, &case_line(checked));
    }
    let mut last = serde_json::json!({ "summary": run.summary });
    if let Some(device) = &run.device {
        last["device"] = device.json();
    }
    push_line(&mut text, &last);
    text
}

fn push_line(text: &mut String, value: &impl Serialize) {
    // Serialization cannot fail: there are only strings, numbers, lists and objects with string
    // keys.
    if let Ok(line) = serde_json::to_string(value) {
        text.push_str(&line);
        text.push('\n');
    }
}
