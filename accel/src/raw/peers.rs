//! Memory that several devices read and write.

use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, result, sys};

/// Zeroed memory of one device. Not from the stream's pool, which gives other devices no access.
pub(crate) struct PeerMemory {
    context: Arc<CudaContext>,
    address: u64,
    bytes: usize,
}

impl PeerMemory {
    /// `bytes` zeros.
    pub(crate) fn zeroed(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DriverError> {
        context.bind_to_thread()?;
        let bytes = bytes.max(1);
        // SAFETY: a context is current, and the size is not zero.
        let address = unsafe { result::malloc_sync(bytes) }?;
        let memory = Self { context: context.clone(), address, bytes };
        // SAFETY: the memory was allocated above with this size.
        unsafe { result::memset_d8_sync(address, 0, bytes) }?;
        Ok(memory)
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// The first word. Waits for the device.
    pub(crate) fn first_word(&self) -> Result<u32, DriverError> {
        assert!(self.bytes >= 4, "{} bytes hold no word", self.bytes);
        self.context.bind_to_thread()?;
        let mut word = [0u32];
        // SAFETY: the memory is alive and has at least the four bytes that are read.
        unsafe { result::memcpy_dtoh_sync(&mut word, self.address) }?;
        Ok(word[0])
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: the memory was allocated with `malloc_sync` and is freed once. Freeing waits for this device; the
            // owner has waited for the kernels of others.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Lets kernels of `from` access memory of `to`; nothing to do for one device. Once enabled, access stays.
pub(crate) fn enable_access(
    from: &Arc<CudaContext>,
    to: &Arc<CudaContext>,
) -> Result<(), DriverError> {
    if from.ordinal() == to.ordinal() {
        return Ok(());
    }
    from.bind_to_thread()?;
    // SAFETY: both contexts are alive; the flags must be zero.
    match unsafe { sys::cuCtxEnablePeerAccess(to.cu_ctx(), 0) } {
        sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        status => status.result(),
    }
}
