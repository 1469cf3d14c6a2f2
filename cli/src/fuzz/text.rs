//! What people read of a campaign.

use std::path::Path;

use marlinspike::case::Op;
use marlinspike_proptests::campaign::{
    Campaign, Coverage, Failure, Finding, Judgement, KeptResult, Run,
};

use crate::style::{Paint, printable};

pub(super) fn head(campaign: &Campaign, seed: u64) -> String {
    let configurations = campaign.lattice().len();
    format!("{}: {configurations} configurations, seed {seed:#018x}\n", campaign.op())
}

/// The command that runs one case again.
pub(super) fn replay(op: Op, kernel: &[String], seed: u64, filter: &str, index: u64) -> String {
    let mut words =
        vec!["marlinspike".to_owned(), "fuzz".to_owned(), "--op".to_owned(), op.to_string()];
    words.extend_from_slice(kernel);
    words.extend(["--seed".to_owned(), format!("{seed:#x}")]);
    if !filter.is_empty() {
        words.extend(["--where".to_owned(), filter.to_owned()]);
    }
    words.extend(["--case".to_owned(), index.to_string()]);
    let quoted = words.iter().map(|word| shlex::try_quote(word).unwrap_or(word.into()));
    quoted.collect::<Vec<_>>().join(" ")
}

pub(super) fn kept(path: &Path, judgement: &Judgement, paint: Paint) -> String {
    let path = path.display().to_string();
    let path = printable(&path);
    match judgement {
        Judgement::Pass => format!("{} {path}\n", paint.good("passes now:")),
        Judgement::Unchecked(reason) => format!("{} {path}: {reason}\n", paint.odd("unchecked:")),
        Judgement::Skipped(reason) => format!("{} {path}: {reason}\n", paint.odd("skipped:")),
        Judgement::Wrong(failure) => {
            format!("{} {path}\n{}", paint.bad("still fails:"), failing(failure))
        }
    }
}

pub(super) fn single(index: u64, judgement: &Judgement, paint: Paint) -> String {
    match judgement {
        Judgement::Pass => format!("case {index}: {}\n", paint.good("pass")),
        Judgement::Unchecked(reason) => {
            format!("case {index}: {}: {reason}\n", paint.odd("unchecked"))
        }
        Judgement::Skipped(reason) => format!("case {index}: {}: {reason}\n", paint.odd("skipped")),
        Judgement::Wrong(failure) => {
            let name = printable(&failure.case.name).into_owned();
            format!("case {index}: {}: {name}\n{}", paint.bad("FAIL"), failing(failure))
        }
    }
}

/// One line when a finding is made; its details follow at the end of the run.
pub(super) fn found(finding: &Finding) -> String {
    let signature = printable(&finding.signature);
    format!("found in case {}: {signature}; details follow at the end of the run", finding.index)
}

pub(super) fn finding(finding: &Finding, path: &str, again: &str, paint: Paint) -> String {
    let title = printable(&finding.signature).into_owned();
    let mut text = format!("\n{} {title}\n", paint.bad("finding:"));
    if let Some(cause) = &finding.cause {
        text += &format!("  cause        {}\n", cause.text);
    }
    text += &failing(&finding.failure);
    text += &format!("  minimal      {}\n", finding.minimal.join(" "));
    text += &format!("  kept in      {}\n", printable(path));
    text += &format!(
        "  first seen   {} ({} runs to shrink)\n",
        printable(&finding.first),
        finding.runs
    );
    text += &format!("  again        {again}\n");
    text
}

/// The failing outputs, or the fault.
fn failing(failure: &Failure) -> String {
    let mut text = String::new();
    if let Some(fault) = &failure.fault {
        // A process's last words have lines of their own.
        let fault = fault.to_string();
        let lines: Vec<_> = fault.lines().map(printable).collect();
        text += &format!("  fault        {}\n", lines.join("\n               "));
    }
    for output in failure.failed() {
        text += &format!(
            "  {:<12} {} of {} values are wrong",
            output.name, output.mismatches, output.elements
        );
        if let Some(first) = &output.first_mismatch {
            let at: Vec<String> = first.index.iter().map(ToString::to_string).collect();
            text += &format!(
                ", the first at [{}]: expected {}, found {}",
                at.join(", "),
                first.expected,
                first.found
            );
        }
        text.push('\n');
    }
    text
}

/// Numbers of cases by result.
pub(super) struct Counts<'r> {
    pub(super) passed: u64,
    pub(super) failed: u64,
    pub(super) findings: usize,
    pub(super) skipped: u64,
    pub(super) skipped_reason: Option<&'r str>,
    pub(super) unchecked: u64,
    pub(super) unchecked_reason: Option<&'r str>,
    pub(super) kept_that_fail: usize,
    pub(super) seconds: f64,
}

impl Counts<'_> {
    /// `N cases in S s: N pass, ...`.
    pub(super) fn line(&self, paint: Paint) -> String {
        let Self { passed, failed, skipped, unchecked, seconds, .. } = self;
        let cases = passed + failed + skipped + unchecked;
        let verdict = match (failed, passed) {
            (0, 0) => paint.odd("nothing was judged"),
            (0, _) => paint.good("no failure"),
            _ => paint.bad(&format!("{failed} fail ({} distinct)", self.findings)),
        };
        let mut text = format!("{cases} cases in {seconds:.1} s: {passed} pass, {verdict}");
        if *skipped > 0 {
            text += &format!(", {skipped} not supported by the kernel");
            if let Some(reason) = self.skipped_reason.filter(|reason| !reason.is_empty()) {
                text += &format!(" (first reason: {})", printable(reason));
            }
        }
        if *unchecked > 0 {
            let reason = printable(self.unchecked_reason.unwrap_or_default()).into_owned();
            text += &format!(", {unchecked} unchecked ({reason})");
        }
        if self.kept_that_fail > 0 {
            text += &format!(", {} kept cases still fail", self.kept_that_fail);
        }
        text
    }
}

pub(super) fn coverage(coverage: &Coverage) -> String {
    let line = |line: &String| format!("  {}\n", printable(line));
    let lines: String = coverage.lines().iter().map(line).collect();
    format!("coverage\n{lines}")
}

pub(super) fn summary(run: &Run, paint: Paint) -> String {
    let summary = &run.summary;
    let counts = Counts {
        passed: summary.passed,
        failed: summary.failed,
        findings: summary.findings.len(),
        skipped: summary.skipped,
        skipped_reason: summary.skipped_reason.as_deref(),
        unchecked: summary.unchecked,
        unchecked_reason: summary.unchecked_reason.as_deref(),
        kept_that_fail: run.kept.iter().filter(|case| case.result == KeptResult::Fail).count(),
        seconds: summary.seconds,
    };
    format!("\n{}\n{}", counts.line(paint), coverage(&summary.coverage))
}
