//! Launches on a stream of another library, with memory that it allocated: how torch's operators run.
//!
//! A [`Device`] on such a stream allocates nothing and waits for nothing, so its launches can be captured into a
//! graph. An operation first states how much scratch memory it takes: make a device with [`Scratch::measure`], prepare
//! the operation, and read [`Device::scratch_bytes`].
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{
    device::Device,
    error::AccelError,
    memory::{Buffer, Element},
    raw::stream::{MOST_TILE_TOTALS, MOST_TILE_WARPS, SplitTotals, Stream},
};

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

    /// The address of `bytes` more bytes.
    ///
    /// # Errors
    /// [`AccelError::Argument`] where they do not fit.
    pub(crate) fn take(&self, bytes: usize) -> Result<u64, AccelError> {
        let used = self.used.load(Ordering::Relaxed);
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

impl Device {
    /// This device on a stream of another library, with scratch memory for one operation. The modules are shared.
    ///
    /// # Safety
    /// - `stream` is a stream of this device in its primary context, or 0 for the legacy default stream, and outlives
    ///   the result.
    /// - The scratch memory is memory of this device, aligned to 256 bytes. Until the work launched so far is done,
    ///   nothing but that work uses it; a later use on the same stream is one.
    /// - Nothing is launched with [`Scratch::measure`].
    pub unsafe fn on_stream(&self, stream: u64, scratch: Scratch) -> Self {
        // SAFETY: the first condition of this function.
        self.with_stream(unsafe { Stream::borrowed(self.context(), stream) }, scratch)
    }

    /// Elements of another library for work on this device's stream.
    ///
    /// # Safety
    /// `address` is the address of `len` elements in this device's memory, aligned to 16 bytes. Until the work
    /// launched with them is done, the memory stays allocated, and work on other streams changes none of the elements
    /// and reads none that is written; freeing on the same stream, in its order, is allowed.
    pub unsafe fn borrow<T: Element>(&self, address: u64, len: usize) -> Buffer<T> {
        Buffer::borrowed(address, len, self.stream())
    }

    /// Bytes of scratch memory taken so far; 0 for a device on a stream of its own.
    pub fn scratch_bytes(&self) -> u64 {
        self.scratch().map_or(0, |scratch| scratch.used.load(Ordering::Relaxed))
    }

    /// Elements of the flags that [`Device::split_with`] takes.
    pub fn split_flags(&self) -> usize {
        self.multiprocessors() as usize * MOST_TILE_WARPS
    }

    /// Prepares products of many rows, whose thread blocks hand totals to each other: takes scratch memory for the
    /// totals. `flags` are [`Device::split_flags`] zeros, which the products leave as zeros.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for another number of flags, and where the scratch memory is too small.
    pub fn split_with(&mut self, flags: &Buffer<i32>) -> Result<(), AccelError> {
        let blocks = self.multiprocessors() as usize;
        if flags.len() < self.split_flags() {
            return Err(AccelError::Argument {
                operation: "workspace",
                what: "flags",
                found: flags.len().to_string(),
                expected: format!("{} zeros", self.split_flags()),
            });
        }
        let totals = self.room::<f32>(blocks * MOST_TILE_TOTALS)?.address();
        self.set_split_totals(SplitTotals::at([totals, flags.address()]));
        Ok(())
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
