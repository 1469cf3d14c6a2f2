//! The lines below the table: how many cases pass, what passing means, and the comparisons made on
//! a device.

use std::time::Duration;

use marlinspike::check::{OutputReport, Verdict};

use super::paragraph::{View, hanging};
use super::{Run, Summary};
use crate::Outcome;
use crate::style::Paint;

/// The summary, wrapped.
pub(super) fn lines(run: &Run, view: &View) -> Vec<String> {
    let View { paint, width, verbose, .. } = *view;
    let s = &run.summary;
    let mut lines = Vec::new();
    let style: fn(Paint, &str) -> String = match s.outcome() {
        Outcome::Pass => Paint::good,
        Outcome::Mismatch if s.fail == 0 => Paint::odd,
        _ => Paint::bad,
    };
    let cases = hanging("", &cases(s, run.elapsed), 0, width);
    lines.extend(cases.into_iter().map(|line| style(paint, &line)));
    if s.outputs() > 0 {
        lines.extend(hanging("", &outputs(run), 0, width));
    }
    for (label, text) in run.device.iter().flat_map(|device| device.lines()) {
        let first = format!("{} ", paint.strong(&format!("{label:<12}")));
        lines.extend(hanging(&first, &text, 13, width));
    }
    if !verbose && s.outputs() > 0 {
        let draw = s.fail > 0 && !view.has_report;
        let drawn = if draw { "; --report FILE.html draws those that fail" } else { "" };
        let hint = format!("-v prints every output and what its verdict excludes{drawn}");
        lines.extend(hanging("", &hint, 0, width).iter().map(|line| paint.dim(line)));
    }
    lines
}

/// `143 of 147 cases pass in 1.38 s; every output was judged; 4 with the fault that ...`.
pub(super) fn cases(s: &Summary, elapsed: Duration) -> String {
    let verb = if s.cases == 1 { "case passes" } else { "cases pass" };
    let time = elapsed.as_secs_f64();
    let mut parts = vec![format!("{} of {} {verb} in {time:.2} s", s.pass, s.cases)];
    let mut count = |n: usize, what: &str| {
        if n > 0 {
            parts.push(format!("{n} {what}"));
        }
    };
    count(s.fail, "failed");
    count(s.unchecked, "with unchecked outputs");
    count(s.error, "could not be read");
    count(s.fail_as_recorded, "with the fault that golden/manifest.json records");
    count(s.skipped, "skipped (--only selects none of their outputs)");
    if s.error == 0 && s.outputs_unchecked == 0 && s.unchecked == 0 && s.outputs() > 0 {
        parts.push("every output was judged".to_owned());
    }
    parts.join("; ")
}

/// How many outputs pass, and how they were compared.
pub(super) fn outputs(run: &Run) -> String {
    let s = &run.summary;
    let reports = run.checked.iter().filter_map(|c| c.result.as_ref().ok());
    let passed = reports.flat_map(|r| &r.outputs).filter(|o| o.verdict == Verdict::Pass);
    let (exact, others): (Vec<_>, Vec<_>) = passed.partition(|o| is_exact(o));
    let is_open = |o: &&OutputReport| o.max_error_over_bound.is_none();
    let (open, bounded): (Vec<_>, Vec<_>) = others.into_iter().partition(is_open);
    let kinds = [
        (exact.len(), "equal in every bit"),
        (bounded.len(), "within derived error bounds"),
        (open.len(), "right with other bits than the reference's"),
    ];
    let kinds: Vec<_> = kinds.into_iter().filter(|(count, _)| *count > 0).collect();
    let held = match &kinds[..] {
        [] => String::new(),
        [(_, how)] => format!(" ({how})"),
        several => {
            let texts: Vec<_> = several.iter().map(|(n, how)| format!("{n} {how}")).collect();
            format!(" ({})", texts.join(", "))
        }
    };
    let verb = if s.outputs() == 1 { "output passes" } else { "outputs pass" };
    let mut parts = vec![format!("{} of {} {verb}{held}", s.outputs_pass, s.outputs())];
    let counts = [
        (s.outputs_fail, "failed"),
        (s.outputs_unchecked, "not checked, so their cases do not pass"),
        (s.outputs_fail_as_recorded, "with a recorded fault"),
    ];
    parts.extend(counts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")));
    parts.join("; ")
}

/// Whether an output has every bit that it was compared with.
fn is_exact(output: &OutputReport) -> bool {
    let equal = output.equal_bits.is_none_or(|share| share >= 1.0) && output.diagnosis.is_none();
    output.power.is_some_and(|power| power.every_bit)
        || output.max_error_over_bound.is_none() && equal
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentence_says_what_passing_means() {
        let golden = Summary {
            cases: 147,
            pass: 143,
            fail_as_recorded: 4,
            outputs_pass: 521,
            ..Summary::default()
        };
        let time = Duration::from_millis(1380);
        let sentence = "143 of 147 cases pass in 1.38 s; 4 with the fault that \
            golden/manifest.json records; every output was judged";
        assert_eq!(cases(&golden, time), sentence);
        let one = Summary { cases: 1, pass: 1, outputs_pass: 1, ..Summary::default() };
        assert_eq!(cases(&one, time), "1 of 1 case passes in 1.38 s; every output was judged");
        // The sentence claims that every output was judged only if that is true.
        let mixed = Summary { cases: 4, pass: 1, fail: 1, error: 1, unchecked: 1, ..one };
        let sentence =
            "1 of 4 cases pass in 1.38 s; 1 failed; 1 with unchecked outputs; 1 could not be read";
        assert_eq!(cases(&mixed, time), sentence);
        let unread = Summary { cases: 1, error: 1, ..Summary::default() };
        assert!(!cases(&unread, time).contains("judged"));
    }
}
