//! Limits on the memory and time of a check, decided from the configuration before anything is
//! allocated.
//!
//! Memory proportional to the tensors is bounded by the size of the file. This module estimates the
//! rest: memory that integers of the configuration demand without a tensor of that size (blocks of
//! tokens, padding, stages that a case lacks), and the multiply-adds of products.

use super::{Case, CaseError, Demand};
use crate::Result;

/// Bytes that a check may take per byte of the case's tensors. The largest measured ratio is 69,
/// for a product whose values are nearly all outputs.
const MEMORY_PER_BYTE: u64 = 256;
/// Bytes that the check of any case may take.
const MEMORY_BASE: u64 = 64 << 20;
/// Multiply-adds of a case's products: 10^12, a layer of Mixtral's sizes with 4096 tokens.
const WORK: u64 = 1_000_000_000_000;

/// The limits that [`check_case_within`](crate::check::check_case_within) enforces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Multiply-adds of the products that are recomputed, and comparisons of routing.
    pub work: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { work: WORK }
    }
}

/// A number of bytes as text: 68.7 GB.
fn size(bytes: u64) -> String {
    let units = [("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
    let bytes = bytes as f64;
    match units.into_iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes / unit),
        None => format!("{bytes} bytes"),
    }
}

impl Limits {
    /// Bytes that the check of a case with `bytes` bytes of tensors may take: 64 MiB plus 256 times
    /// `bytes`.
    pub const fn memory(bytes: u64) -> u64 {
        bytes.saturating_mul(MEMORY_PER_BYTE).saturating_add(MEMORY_BASE)
    }

    /// Checks that `case` stays within the limits.
    ///
    /// # Errors
    /// [`CaseError::TooLarge`], naming the config keys that exceed them.
    pub fn check(&self, case: &Case<'_>) -> Result<()> {
        let tensors = case.inputs.values().chain(case.outputs.values());
        let bytes = tensors.map(|t| t.bytes().len() as u64).sum();
        let limit = Self::memory(bytes);
        let (mut all_bytes, mut all_work) = (0u64, 0u64);
        for Demand { what, bytes: more, work } in case.config.operation().demands(case)? {
            all_bytes = all_bytes.saturating_add(more);
            if all_bytes > limit {
                let needed = format!("{} of memory", size(all_bytes));
                let limit = format!(
                    "{}: {}, and {MEMORY_PER_BYTE} times the {} of the case's tensors",
                    size(limit),
                    size(MEMORY_BASE),
                    size(bytes)
                );
                return Err(CaseError::TooLarge { what, needed, limit }.into());
            }
            all_work = all_work.saturating_add(work);
            if all_work > self.work {
                let needed = format!("{all_work} multiply-adds");
                let limit = format!("{}, which --max-work raises", self.work);
                return Err(CaseError::TooLarge { what, needed, limit }.into());
            }
        }
        Ok(())
    }
}
