//! The report of a run.

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
    /// (k, n), tile, lane and register, or (group, n), or the position in another kind of output.
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

/// A violated property, with the smallest failing input.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Failure {
    /// The arguments without their data.
    pub input: String,
    /// The arguments.
    pub minimal: String,
    /// Description of the violation.
    pub what: String,
    /// The first wrong value, if outputs were compared.
    pub mismatch: Option<Box<Mismatch>>,
}

/// The result of one property.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LawReport {
    /// The property.
    pub law: &'static str,
    /// Inputs that passed.
    pub passed: u32,
    /// Inputs that the subject does not support: [`Subject::takes`](crate::Subject::takes).
    pub left_out: u32,
    /// Number of output elements of all calls.
    pub outputs: usize,
    /// The seed of this property's inputs.
    pub seed: u64,
    /// The failure, if any.
    pub failure: Option<Failure>,
}

/// The result of a run; displays one line per property.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// The operation.
    pub operation: &'static str,
    /// The seed of the run.
    pub seed: u64,
    /// Properties in the order in which they were tested.
    pub laws: Vec<LawReport>,
}

impl Report {
    /// Whether every property passed.
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
