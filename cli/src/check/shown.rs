//! Selects the cases and outputs to print and their details; `table` lays them out.

use std::borrow::Cow;

use marlinspike::check::{CaseReport, OutputReport, Verdict};
use marlinspike_report::{Severity, flow, passes_with_remark, text};

use super::paragraph::Detail;
use super::{Checked, Run};

/// A case with its outputs, or a file that is not a case.
pub(super) enum Block<'r> {
    Error {
        text: String,
        help: Cow<'static, str>,
    },
    Case(CaseBlock<'r>),
    /// Golden cases that fail with the same recorded fault.
    Recorded(Recorded<'r>),
}

pub(super) struct CaseBlock<'r> {
    pub(super) label: &'r str,
    pub(super) op: &'r str,
    pub(super) rows: Vec<Row<'r>>,
    /// Outputs that were not checked, by reason.
    pub(super) unchecked: Vec<Unchecked<'r>>,
    /// Names of outputs that pass and have no row.
    pub(super) passing: Vec<&'r str>,
}

pub(super) struct Row<'r> {
    pub(super) output: &'r OutputReport,
    pub(super) details: Vec<Detail>,
}

pub(super) struct Unchecked<'r> {
    pub(super) names: Vec<&'r str>,
    pub(super) reason: Option<Detail>,
}

pub(super) struct Recorded<'r> {
    pub(super) fault: &'r str,
    pub(super) labels: Vec<&'r str>,
    pub(super) cause: String,
}

/// The blocks to print: every case in order if `verbose`, else those that do not pass, worst last.
pub(super) fn blocks(run: &Run, verbose: bool) -> Vec<Block<'_>> {
    let selected = run.checked.iter().filter(|c| !c.skipped());
    if verbose {
        return selected.map(|c| block(c, true)).collect();
    }
    let mut blocks: Vec<_> = recorded(run).into_iter().map(Block::Recorded).collect();
    let own =
        selected.filter(|c| !matches!(c.entry().severity(), Severity::Pass | Severity::Recorded));
    let mut own: Vec<_> = own.collect();
    own.sort_by_key(|c| c.entry().severity());
    blocks.extend(own.into_iter().map(|c| block(c, false)));
    blocks
}

fn recorded(run: &Run) -> Vec<Recorded<'_>> {
    let mut all: Vec<Recorded<'_>> = Vec::new();
    for checked in run.checked.iter().filter(|c| !c.skipped()) {
        let Some(fault) = checked.fails_as_recorded() else { continue };
        if let Some(same) = all.iter_mut().find(|r| r.fault == fault) {
            same.labels.push(&checked.label);
            continue;
        }
        let outputs = checked.result.iter().flat_map(|r| &r.outputs);
        let cause = outputs.filter_map(|o| o.diagnosis.as_ref()).find(|d| d.id == fault);
        let cause = cause.map(|d| d.text.clone()).unwrap_or_default();
        all.push(Recorded { fault, labels: vec![&checked.label], cause });
    }
    all
}

fn block(checked: &Checked, verbose: bool) -> Block<'_> {
    let report = match &checked.result {
        Ok(report) => report,
        Err(error) => return Block::Error { text: error.to_string(), help: error.help() },
    };
    let outputs = flow::ordered(report);
    let has_row = |o: &&OutputReport| match o.verdict {
        Verdict::Pass => verbose || passes_with_remark(o),
        Verdict::Fail => true,
        Verdict::Unchecked => o.is_compared(),
    };
    let rows = outputs
        .iter()
        .copied()
        .filter(has_row)
        .map(|o| Row { output: o, details: details(checked, report, o, verbose) });
    let passing = outputs.iter().copied().filter(|o| o.verdict == Verdict::Pass && !has_row(o));
    let mut unchecked: Vec<Unchecked<'_>> = Vec::new();
    for o in outputs.iter().filter(|o| o.verdict == Verdict::Unchecked && !o.is_compared()) {
        let reason = o.note.as_deref().map(|note| Detail::shared("reason", note));
        match unchecked.iter_mut().find(|u| u.reason == reason) {
            Some(same) => same.names.push(&o.name),
            None => unchecked.push(Unchecked { names: vec![&o.name], reason }),
        }
    }
    if outputs.is_empty() {
        let reason = Some(Detail::own("reason", text::NO_OUTPUT));
        unchecked.push(Unchecked { names: vec!["no output"], reason });
    }
    let passing = passing.map(|o| o.name.as_str()).collect();
    Block::Case(CaseBlock {
        label: &checked.label,
        op: &report.op,
        rows: rows.collect(),
        unchecked,
        passing,
    })
}

/// The details below an output's row.
fn details(checked: &Checked, report: &CaseReport, o: &OutputReport, verbose: bool) -> Vec<Detail> {
    let failed = o.verdict == Verdict::Fail;
    let mut details = Vec::new();
    if let Some(m) = &o.first_mismatch {
        for (i, line) in text::first_wrong(&o.name, m).into_iter().enumerate() {
            details.push(Detail::own(if i == 0 { "first wrong" } else { "" }, line));
        }
    }
    match &o.diagnosis {
        Some(d) => details.push(Detail::own("diagnosis", text::diagnosis(d, o.mismatches))),
        None if failed => details.push(Detail::own("diagnosis", text::NO_CAUSE)),
        None => {}
    }
    let causes = flow::causes(report, o);
    if !causes.is_empty() {
        details.push(Detail::own("see also", text::follows(&causes)));
    }
    if let Some(ulp) = o.max_ulp.filter(|&ulp| failed || verbose && ulp > 0.0) {
        details.push(Detail::own("max ulp", text::error(Some(ulp))));
    }
    if let Some(note) = &o.note {
        details.push(Detail::shared("note", note.as_str()));
    }
    // The power is omitted for outputs compared bit for bit and, unless verbose, for failed ones.
    let power = o.power.filter(|power| !power.every_bit && (verbose || !failed));
    if let Some(power) = power {
        details.push(Detail::shared("power", power.text()));
    }
    if let Some(fault) = checked.fails_as_recorded().filter(|_| failed) {
        details.push(Detail::own("expected", format!("a known fault of upstream: {fault}")));
    }
    details
}
