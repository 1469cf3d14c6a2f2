//! The stream of a device.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError};

/// A stream for everything that one [`Device`](crate::Device) does. Not the default stream, which
/// no graph can capture.
pub(crate) fn only_stream(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>, DriverError> {
    let stream = context.new_stream()?;
    // SAFETY: cudarc's events order work on one buffer between streams. Here every allocation, copy,
    // launch and release of a device goes through the one stream made above, which runs them in
    // order; buffers never leave the crate with another stream.
    unsafe { context.disable_event_tracking() };
    Ok(stream)
}
