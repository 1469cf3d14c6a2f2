//! Judges stage by stage, each from the previous stage of the case. A stage that the case lacks is
//! recomputed if its arithmetic is declared.

use super::stage::Stage;
use super::{Int8Moe, activations, narrow_bits, scales, stated};
use crate::Result;
use crate::judge::compare::elements;
use crate::judge::{OutputReport, Verdict};
use crate::method::Activations;
use crate::num::tensor::Tensor;
use crate::ops::bounded::{self, every_bit};
use crate::ops::case::Case;
use crate::ops::computation::bitwise;
use crate::ops::layer::{activated, name_both_sides, summed};
use crate::ops::quantized_moe::{QUANTIZED, report_unjudged};
use crate::ops::stated_rows::StatedRows;
use crate::ops::w8a8_fp8::better_diagnosis;

/// The sizes of int32 sums that are tried where none is declared.
const BLOCKS: [usize; 4] = [32, 64, 128, 256];

/// The stage that each output is judged from.
const BEFORE: [(&str, &str); 8] = [
    ("a1q", "`a1q` and `a1q_scale` together"),
    ("a1q_scale", "`a1q` and `a1q_scale` together"),
    ("gate_up", "`a1q` and `a1q_scale`, or `quantizer`"),
    ("activated", "`gate_up`, or `block_size_k`"),
    ("a2q", "`activated`, and `a2q` and `a2q_scale` together"),
    ("a2q_scale", "`activated`, and `a2q` and `a2q_scale` together"),
    ("down", "`a2q` and `a2q_scale`, or `activated` and `quantizer`"),
    ("y", "`down`"),
];

/// Codes and scales of the case; `None` unless it has both.
fn given<'c>(case: &'c Case<'_>, which: usize) -> Option<[&'c Tensor<'c>; 2]> {
    let [codes, scales] = QUANTIZED[which].map(|name| case.output(name));
    Some([codes?, scales?])
}

/// The rows of the case, or those of `source` under a declared rule; the reports on the case's. Known
/// quantizers differ at halves, so undeclared codes do not follow from `source`.
fn rows(
    case: &Case<'_>,
    layer: &Int8Moe,
    which: usize,
    source: Option<&[u16]>,
) -> Result<(Option<Activations>, Vec<OutputReport>)> {
    let c = &layer.config;
    let cols = [c.hidden_size, c.intermediate_size][which];
    let Some([codes, scales]) = given(case, which) else {
        let source = source.filter(|_| c.rule().is_some());
        return Ok((source.map(|rows| layer.quantize(rows, cols)).transpose()?, Vec::new()));
    };
    let own = scales.elements::<f32>();
    let made = activations(cols, codes.bytes(), own.to_vec());
    let Some(source) = source else { return Ok((Some(made), Vec::new())) };
    let x = layer.widened(source);
    let reports = StatedRows {
        names: QUANTIZED[which],
        source: ["in.x", "out.activated"][which],
        role: "",
        declared: c.quantizer,
        found: stated(c, &x, cols, (codes.bytes(), &own)),
    }
    .judge()?;
    Ok((Some(made), reports))
}

/// The report on one product; empty if the case does not have its output.
fn product(case: &Case<'_>, layer: &Int8Moe, stage: &Stage) -> Result<Vec<OutputReport>> {
    let name = ["gate_up", "down"][stage.which];
    let Some(found) = case.output(name) else { return Ok(Vec::new()) };
    let of_rows = scales(&stage.rows);
    if let Some(i) = of_rows.iter().position(|s| !(s.is_finite() && *s > 0.0)) {
        let from = QUANTIZED[stage.which][1];
        let note = format!("`{name}` is judged with `{from}`: a scale of {} at {i}", of_rows[i]);
        return Ok(vec![OutputReport::unchecked(name, found.len(), &note)]);
    }
    let mut reports = match layer.config.block_size_k {
        Some(size) => {
            let mut reports = bitwise(case, stage)?;
            for report in &mut reports {
                let note = format!("compared for every bit with int32 sums of {size} k");
                report.note = Some(note);
            }
            reports
        }
        None => vec![by_known_blocks(stage, found)?],
    };
    for report in reports.iter_mut().filter(|r| r.verdict == Verdict::Fail) {
        if report.diagnosis.as_ref().is_none_or(|d| d.unexplained > 0) {
            better_diagnosis(report, &elements(found), layer);
        }
    }
    Ok(reports)
}

/// A pass if int32 sums of a known size give every bit, otherwise the verdict of the bound.
fn by_known_blocks(stage: &Stage, found: &Tensor<'_>) -> Result<OutputReport> {
    let bits = elements(found);
    for size in BLOCKS {
        if stage.bits_in_blocks(size)? == bits {
            let how = format!("a known kernel gives it: int32 sums of {size} k, epilogue triton");
            let name = ["gate_up", "down"][stage.which].to_owned();
            return Ok(OutputReport { name, ..every_bit(bits.len(), &how) });
        }
        if stage.rows.size_k <= 1024 {
            // Every size gives these bits.
            break;
        }
    }
    bounded::judge(stage, found)
}

/// Every stage that the case has.
pub(super) fn judge(case: &Case<'_>, layer: &Int8Moe) -> Result<Vec<OutputReport>> {
    let (c, shared) = (&layer.config, layer.config.stages());
    let own = |name: &str| case.output(name).map(|t| t.elements::<u16>().into_owned());
    let (a1q, mut reports) = rows(case, layer, 0, Some(&layer.x))?;
    let mut gate_up = own("gate_up");
    if let Some(a1q) = a1q {
        let stage = layer.stage(0, a1q.to_slots(c.top_k));
        reports.extend(product(case, layer, &stage)?);
        if gate_up.is_none() && c.block_size_k.is_some() {
            gate_up = Some(narrow_bits(&stage.bits()?));
        }
    }
    let own_activated = own("activated");
    if let (Some(gate_up), Some(found)) = (&gate_up, &own_activated) {
        reports.push(activated::judge(case, &shared, gate_up, found)?);
    }
    let (a2q, of_rows) = rows(case, layer, 1, own_activated.as_deref())?;
    reports.extend(of_rows);
    if let Some(a2q) = a2q {
        reports.extend(product(case, layer, &layer.stage(1, a2q))?);
    }
    if let (Some(down), Some(found)) = (own("down"), own("y")) {
        reports.push(summed::judge(case, &shared, &down, &found)?);
    }
    report_unjudged(case, &mut reports, &BEFORE);
    name_both_sides(&mut reports);
    Ok(reports)
}
