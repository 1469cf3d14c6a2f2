//! The stream of a device, and the memory that belongs to it.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DriverError};

/// A stream with the memory where its kernels keep totals of tiles: those that wait for other parts of k, and those that
/// one thread block hands to the next.
/// Kernels of one stream run one after another; those of two streams would need two such memories, so it is the
/// stream's.
pub(crate) struct Stream {
    cuda: Arc<CudaStream>,
    split_totals: Option<SplitTotals>,
}

/// Memory for totals of tiles. It is allocated with the stream, 39 MB on an H200, since the first product that needs it
/// may be part of a recording, when no memory can be allocated.
#[derive(Debug)]
pub(crate) struct SplitTotals {
    /// `[thread blocks, TOTALS_PLACES, MOST_TILE_TOTALS]`
    totals: CudaSlice<f32>,
    /// `[thread blocks, MOST_TILE_WARPS]`: 1 while totals wait to be read, else 0.
    ready: CudaSlice<u32>,
}

/// Outputs of a tile at most.
pub(crate) const MOST_TILE_TOTALS: usize = 192 * 128;
/// Places for the totals of a thread block's tiles.
pub(crate) const TOTALS_PLACES: usize = 3;
/// Warps that compute a tile at most.
pub(crate) const MOST_TILE_WARPS: usize = 12;

impl Stream {
    /// The stream for everything that one [`Device`](crate::Device) does. Not the default stream, which no graph can
    /// capture. `split_blocks`: thread blocks that may share tiles at once; 0: no kernel does.
    pub(crate) fn only(
        context: &Arc<CudaContext>,
        split_blocks: usize,
    ) -> Result<Self, DriverError> {
        let cuda = context.new_stream()?;
        // SAFETY: cudarc's events order work on one buffer between streams.
        // - Every allocation, copy, launch and release of a device goes through the one stream made above, which runs
        //   them in order.
        // - Buffers never leave the crate with another stream.
        unsafe { context.disable_event_tracking() };
        let split_totals = match split_blocks {
            0 => None,
            _ => Some(SplitTotals {
                totals: cuda.alloc_zeros(split_blocks * TOTALS_PLACES * MOST_TILE_TOTALS)?,
                ready: cuda.alloc_zeros(split_blocks * MOST_TILE_WARPS)?,
            }),
        };
        Ok(Self { cuda, split_totals })
    }

    pub(crate) fn cuda(&self) -> &Arc<CudaStream> {
        &self.cuda
    }

    /// Absent where no kernel splits tiles.
    pub(crate) fn split_totals(&self) -> Option<&SplitTotals> {
        self.split_totals.as_ref()
    }
}

impl SplitTotals {
    /// Addresses of the totals, and of whether they are ready.
    pub(crate) fn addresses(&self) -> [u64; 2] {
        let (totals, ready) = (&self.totals, &self.ready);
        [totals.device_ptr(totals.stream()).0, ready.device_ptr(ready.stream()).0]
    }
}
