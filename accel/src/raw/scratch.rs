//! Memory of the caller for the stages of one operation.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::AccelError;

/// Every part of the scratch memory starts at a multiple of it, as the allocations of the driver do.
const ALIGNMENT: u64 = 256;

/// Memory for the stages of one operation.
#[derive(Debug)]
pub struct Scratch {
    base: u64,
    bytes: u64,
    used: AtomicU64,
}

impl Scratch {
    /// `bytes` bytes at `base`.
    pub fn new(base: u64, bytes: u64) -> Self {
        Self { base, bytes, used: AtomicU64::new(0) }
    }

    /// No memory, only a count of what an operation takes. Nothing may be launched with it.
    pub fn measure() -> Self {
        Self::new(0, u64::MAX)
    }

    /// Bytes taken so far.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The address of `bytes` more bytes.
    ///
    /// # Errors
    /// [`AccelError::Argument`] where they do not fit.
    pub(crate) fn take(&self, bytes: usize) -> Result<u64, AccelError> {
        let used = self.used();
        let first = used.checked_next_multiple_of(ALIGNMENT);
        let last = first.and_then(|first| first.checked_add(bytes as u64));
        let (Some(first), Some(last)) = (first, last.filter(|&last| last <= self.bytes)) else {
            return Err(AccelError::Argument {
                operation: "workspace",
                what: "bytes",
                found: self.bytes.to_string(),
                expected: format!("{used} and {bytes} more"),
            });
        };
        self.used.store(last, Ordering::Relaxed);
        Ok(self.base + first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_memory_is_taken_in_aligned_parts_and_ends() {
        let scratch = Scratch::new(4096, 600);
        assert_eq!(scratch.take(1), Ok(4096));
        assert_eq!(scratch.take(88), Ok(4096 + 256));
        assert_eq!(scratch.take(88), Ok(4096 + 512));
        let error = scratch.take(0).unwrap_err();
        assert!(matches!(error, AccelError::Argument { operation: "workspace", .. }), "{error:?}");
        assert!(Scratch::measure().take(usize::MAX).is_ok());
        assert_eq!(Scratch::measure().take(7), Ok(0));
    }
}
