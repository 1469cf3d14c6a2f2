//! Counts of cases and outputs, and the resulting exit code.

use marlinspike::check::Verdict;
use serde::Serialize;

use super::Checked;
use crate::Outcome;

/// Counts of a run; `--json` prints them on its last line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(super) struct Summary {
    pub(super) cases: usize,
    pub(super) pass: usize,
    pub(super) fail: usize,
    pub(super) error: usize,
    pub(super) unchecked: usize,
    /// Golden cases that fail with the fault in the manifest; not counted in `fail`.
    pub(super) fail_as_recorded: usize,
    /// Cases without an output that `--only` selects; not counted in `cases`.
    pub(super) skipped: usize,
    pub(super) outputs_pass: usize,
    pub(super) outputs_fail: usize,
    pub(super) outputs_fail_as_recorded: usize,
    pub(super) outputs_unchecked: usize,
}

impl Summary {
    pub(super) fn of(checked: &[Checked]) -> Self {
        let mut s = Self::default();
        for c in checked {
            if c.skipped() {
                s.skipped += 1;
                continue;
            }
            s.cases += 1;
            let report = match &c.result {
                Ok(report) => report,
                Err(_) => {
                    s.error += 1;
                    continue;
                }
            };
            let recorded = c.fails_as_recorded().is_some();
            match report.verdict {
                Verdict::Pass => s.pass += 1,
                Verdict::Fail if recorded => s.fail_as_recorded += 1,
                Verdict::Fail => s.fail += 1,
                Verdict::Unchecked => s.unchecked += 1,
            }
            for output in &report.outputs {
                match output.verdict {
                    Verdict::Pass => s.outputs_pass += 1,
                    Verdict::Fail if recorded => s.outputs_fail_as_recorded += 1,
                    Verdict::Fail => s.outputs_fail += 1,
                    Verdict::Unchecked => s.outputs_unchecked += 1,
                }
            }
        }
        s
    }

    /// An error takes precedence over a failure, since an unread file was not judged at all.
    pub(super) fn outcome(&self) -> Outcome {
        match self {
            Self { error: 1.., .. } => Outcome::BadInput,
            Self { fail: 1.., .. } | Self { unchecked: 1.., .. } => Outcome::Mismatch,
            _ => Outcome::Pass,
        }
    }

    /// Number of outputs.
    pub(super) fn outputs(&self) -> usize {
        self.outputs_pass
            + self.outputs_fail
            + self.outputs_fail_as_recorded
            + self.outputs_unchecked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_decides() {
        let mut s = Summary { cases: 1, pass: 1, ..Summary::default() };
        assert_eq!(s.outcome(), Outcome::Pass);
        s.unchecked = 1;
        assert_eq!(s.outcome(), Outcome::Mismatch);
        s = Summary { fail: 1, ..s };
        assert_eq!(s.outcome(), Outcome::Mismatch);
        s.error = 1;
        assert_eq!(s.outcome(), Outcome::BadInput);
    }
}
