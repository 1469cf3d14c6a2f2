//! The stream of a device, and the memory that belongs to it.

use std::{ptr, sync::Arc};

use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DevicePtr, DriverError,
    sys::CUstreamCaptureStatus_enum as CUstreamCaptureStatus,
};

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
    totals: u64,
    /// `[thread blocks, MOST_TILE_WARPS]`: 1 while totals wait to be read, else 0.
    ready: u64,
    /// Absent where the memory is the caller's.
    _memory: Option<(CudaSlice<f32>, CudaSlice<u32>)>,
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
            _ => {
                let totals: CudaSlice<f32> =
                    cuda.alloc_zeros(split_blocks * TOTALS_PLACES * MOST_TILE_TOTALS)?;
                let ready: CudaSlice<u32> = cuda.alloc_zeros(split_blocks * MOST_TILE_WARPS)?;
                let addresses = [totals.device_ptr(&cuda).0, ready.device_ptr(&cuda).0];
                Some(SplitTotals { _memory: Some((totals, ready)), ..SplitTotals::at(addresses) })
            }
        };
        Ok(Self { cuda, split_totals })
    }

    /// A stream of another library, without memory for totals.
    ///
    /// # Safety
    /// `handle` is a stream of `context`'s device in its primary context, or 0, and outlives the result.
    pub(crate) unsafe fn borrowed(context: &Arc<CudaContext>, handle: u64) -> Self {
        let handle = ptr::with_exposed_provenance_mut(handle as usize);
        // SAFETY: the conditions of this function. cudarc's events, which would order work on one buffer between streams,
        // are off: the caller orders it.
        Self { cuda: unsafe { context.wrap_borrowed_stream(handle) }, split_totals: None }
    }

    /// Takes totals in memory of the caller.
    pub(crate) fn set_split_totals(&mut self, totals: SplitTotals) {
        self.split_totals = Some(totals);
    }

    /// Whether launches are recorded into a graph, when nothing can be loaded.
    pub(crate) fn is_capturing(&self) -> Result<bool, DriverError> {
        let status = self.cuda.capture_status()?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
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
        [self.totals, self.ready]
    }

    /// Totals in memory that something else keeps.
    pub(crate) fn at([totals, ready]: [u64; 2]) -> Self {
        Self { totals, ready, _memory: None }
    }
}
