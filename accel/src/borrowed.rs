//! Launches on a stream of another library, with memory that it allocated: how torch's operators run.
//!
//! A [`Device`] on such a stream allocates nothing and waits for nothing, so its launches can be captured into a
//! graph. An operation first states how much scratch memory it takes: make a device with [`Scratch::measure`], prepare
//! the operation, and read [`Device::scratch_bytes`].
#![allow(unsafe_code)]

pub use crate::raw::scratch::Scratch;
use crate::{
    device::Device,
    error::AccelError,
    memory::{Buffer, Element},
    ops::Rank,
    raw::peers::PeerMemory,
    raw::stream::{MOST_TILE_TOTALS, MOST_TILE_WARPS, SplitTotals, Stream, TOTALS_PLACES},
};

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
        self.scratch().map_or(0, |scratch| scratch.used())
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
        let totals = self.room::<f32>(blocks * TOTALS_PLACES * MOST_TILE_TOTALS)?.address();
        self.set_split_totals(SplitTotals::at([totals, flags.address()]));
        Ok(())
    }
}

impl Rank {
    /// A rank in memory that an engine has mapped: `addresses` are where this device sees the memory of each
    /// rank, [`Rank::bytes`] of that capacity, in order of rank.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for another number of addresses than 1, 2, 4 or 8, and for one that is not a
    /// multiple of 256.
    ///
    /// # Safety
    /// - At each address are this many bytes that kernels of this device read and write, memory of this device or of a
    ///   peer. They are zeros, on all ranks, before the first call on any rank.
    /// - Nothing else uses them until the last call on every rank is done.
    /// - Every rank has the same capacity, and the memory of the same ranks in the same order.
    pub unsafe fn of_addresses(
        device: &Device,
        rank: usize,
        addresses: &[u64],
        capacity: usize,
    ) -> Result<Self, AccelError> {
        let bytes = Self::bytes(capacity)?;
        // SAFETY: the conditions of this function.
        let memory = |&address| unsafe { PeerMemory::borrowed(device.context(), address, bytes) };
        Self::borrowed(device, rank, addresses.iter().map(memory).collect(), capacity)
    }
}
