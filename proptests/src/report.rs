//! What a run found.

use std::fmt;

/// The first value that differs, in storage order.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mismatch {
    /// Values that differ.
    pub count: usize,
    /// Values compared.
    pub total: usize,
    /// Element of the output.
    pub element: usize,
    /// Lowest bit of the value in it.
    pub bit: u32,
    /// (k, n), tile, lane, register; or (group, n); or whatever the output's values are.
    pub place: String,
    /// Expected bits.
    pub expected: u32,
    /// Found bits.
    pub found: u32,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, total, element, bit, place, expected, found } = self;
        write!(
            f,
            "{count} of {total} values differ; first at element {element} bit {bit}, {place}: \
             expected {expected:#x}, found {found:#x}"
        )
    }
}

/// Why a law was broken, on the smallest input that shows it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Failure {
    /// The arguments without their data.
    pub input: String,
    /// The arguments.
    pub minimal: String,
    /// What went wrong.
    pub what: String,
    /// The first wrong value, where outputs were compared.
    pub mismatch: Option<Box<Mismatch>>,
}

/// One law's outcome.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LawReport {
    /// The law.
    pub law: &'static str,
    /// Inputs that obeyed.
    pub passed: u32,
    /// Inputs that the subject does not take: [`Subject::takes`](crate::Subject::takes).
    pub left_out: u32,
    /// Elements that the subject was asked for in all its calls.
    pub outputs: usize,
    /// The seed of this law's inputs.
    pub seed: u64,
    /// The failure, if any.
    pub failure: Option<Failure>,
}

/// A run's outcome: one line per law when displayed.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// The operation.
    pub operation: &'static str,
    /// The seed of the run.
    pub seed: u64,
    /// Laws in the order they were tried.
    pub laws: Vec<LawReport>,
}

impl Report {
    /// Whether every law held.
    pub fn passed(&self) -> bool {
        !self.laws.is_empty() && self.laws.iter().all(|l| l.failure.is_none())
    }

    /// The first failure.
    pub fn failure(&self) -> Option<&Failure> {
        self.laws.iter().find_map(|l| l.failure.as_ref())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for law in &self.laws {
            let verdict = if law.failure.is_none() { "ok    " } else { "FAILED" };
            let left_out = match law.left_out {
                0 => String::new(),
                n => format!(", {n} left out"),
            };
            let (operation, name, passed) = (self.operation, law.law, law.passed);
            writeln!(f, "{verdict} {operation}: {name} ({passed} cases{left_out})")?;
            if let Some(failure) = &law.failure {
                writeln!(f, "       {}", failure.what)?;
                if let Some(mismatch) = &failure.mismatch {
                    writeln!(f, "       {mismatch}")?;
                }
                writeln!(f, "       smallest input: {}", failure.input)?;
                writeln!(f, "       again: seed {:#018x}", self.seed)?;
            }
        }
        Ok(())
    }
}
