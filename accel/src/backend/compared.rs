//! Runs each operation twice, on a device and by the reference, and compares every bit.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::operations::{Operations, Reference};
use crate::{
    call::{Call, Outputs},
    error::AccelError,
};

/// Comparisons of an operation with the reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Count {
    /// Calls.
    pub calls: usize,
    /// Elements of their outputs.
    pub outputs: usize,
    /// Elements whose bits are not the reference's.
    pub differing: usize,
}

/// Counts by the operations' registry names.
pub type Counts = BTreeMap<&'static str, Count>;

/// Runs operations, returns their results, and counts elements that differ from the reference's.
#[derive(Debug)]
pub(super) struct Compared<'o, O> {
    operations: &'o O,
    counts: Mutex<Counts>,
}

impl<'o, O: Operations> Compared<'o, O> {
    pub(super) fn new(operations: &'o O) -> Self {
        Self { operations, counts: Mutex::default() }
    }

    pub(super) fn into_counts(self) -> Counts {
        self.counts.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Elements that differed so far.
    pub(super) fn differing(&self) -> usize {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.values().map(|count| count.differing).sum()
    }
}

impl<O: Operations> Operations for Compared<'_, O> {
    fn run<C: Call>(&self, call: &C) -> Result<C::Output, AccelError> {
        let name = call.row().name;
        let made = self.operations.run(call)?;
        // The reference must take every argument that a device takes, so this is not a refusal.
        let wanted = Reference.run(call).map_err(|error| AccelError::Driver {
            call: name,
            reason: format!("computed what the reference refuses: {error}"),
        })?;
        let (found, wanted) = (Outputs::bits(&made), Outputs::bits(&wanted));
        let differing = found.iter().zip(&wanted).filter(|(f, w)| f != w).count();
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(name).or_default();
        count.calls += 1;
        count.outputs += wanted.len();
        count.differing += differing + found.len().abs_diff(wanted.len());
        Ok(made)
    }
}
