//! Memory that several devices read and write, in one process or in several.

use std::{ptr, sync::Arc};

use cudarc::driver::{CudaContext, DriverError, result, sys};

/// Memory of one device, for kernels of several. Not from the stream's pool, which gives other devices no access.
pub(crate) struct PeerMemory {
    context: Arc<CudaContext>,
    address: u64,
    bytes: usize,
    owner: Owner,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// Freed when dropped.
    This,
    /// Mapped from another process; unmapped when dropped.
    Process,
    /// Something else, or nothing: left as it is.
    Other,
}

/// What names memory of one process in others, as the driver makes it.
pub(crate) type IpcHandle = [u8; 64];

/// The driver shares whole pieces of this size: memory of several would reach other processes with it.
const SHARED_PIECE: usize = 2 << 20;

impl PeerMemory {
    /// `bytes` zeros, at least one.
    pub(crate) fn zeroed(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DriverError> {
        context.bind_to_thread()?;
        let bytes = bytes.checked_next_multiple_of(SHARED_PIECE).unwrap_or(usize::MAX);
        // SAFETY: a context is current, and the size is not zero.
        let address = unsafe { result::malloc_sync(bytes) }?;
        let memory = Self { context: context.clone(), address, bytes, owner: Owner::This };
        // SAFETY: the memory was allocated above with this size.
        unsafe { result::memset_d8_sync(address, 0, bytes) }?;
        // Streams of this crate do not wait for the default stream, on which the memory is set.
        // SAFETY: null is the default stream.
        unsafe { result::stream::synchronize(ptr::null_mut()) }?;
        Ok(memory)
    }

    /// Memory that something else keeps: `bytes` at that address.
    ///
    /// # Safety
    /// They are there, for kernels of this device, as long as the result and the work launched with it.
    pub(crate) unsafe fn borrowed(context: &Arc<CudaContext>, address: u64, bytes: usize) -> Self {
        Self { context: context.clone(), address, bytes, owner: Owner::Other }
    }

    /// Memory of another process.
    pub(crate) fn open(context: &Arc<CudaContext>, handle: IpcHandle) -> Result<Self, DriverError> {
        context.bind_to_thread()?;
        let handle = sys::CUipcMemHandle {
            reserved: handle.map(|byte| std::ffi::c_char::from_ne_bytes([byte])),
        };
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: a context is current, and the pointer is to a live address. The driver refuses handles that it did not
        // make.
        unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, flags) }.result()?;
        let mut memory =
            Self { context: context.clone(), address, bytes: 0, owner: Owner::Process };
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: the pointers are to live numbers; the address is of memory that was mapped above.
        unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut bytes, address) }.result()?;
        memory.bytes = (base + bytes as u64).saturating_sub(address) as usize;
        Ok(memory)
    }

    /// The handle by which other processes open it: of memory of [`PeerMemory::zeroed`].
    pub(crate) fn handle(&self) -> Result<IpcHandle, DriverError> {
        self.context.bind_to_thread()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the pointer is to a live handle, and the memory is alive; the driver refuses what it cannot share.
        unsafe { sys::cuIpcGetMemHandle(&mut handle, self.address) }.result()?;
        Ok(handle.reserved.map(|byte| byte.to_ne_bytes()[0]))
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Leaves the memory as it is for the rest of the process.
    pub(crate) fn keep(&mut self) {
        self.owner = Owner::Other;
    }

    /// Words from a byte on. Waits for the device.
    pub(crate) fn words<const N: usize>(&self, from: usize) -> Result<[u32; N], DriverError> {
        assert!(from + 4 * N <= self.bytes, "{N} words from {from} of {} bytes", self.bytes);
        self.context.bind_to_thread()?;
        let mut words = [0; N];
        // SAFETY: the memory is alive, and has the words.
        unsafe { result::memcpy_dtoh_sync(&mut words, self.address + from as u64) }?;
        Ok(words)
    }

    /// Writes a word at a byte.
    pub(crate) fn set_word(&self, at: usize, word: u32) -> Result<(), DriverError> {
        assert!(at + 4 <= self.bytes, "a word at {at} of {} bytes", self.bytes);
        self.context.bind_to_thread()?;
        // SAFETY: the memory is alive, and has the word.
        unsafe { result::memcpy_htod_sync(self.address + at as u64, &[word]) }
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        if self.owner == Owner::Other || self.context.bind_to_thread().is_err() {
            return;
        }
        // Both wait for this device; the owner has waited for the kernels of others.
        let _ = match self.owner {
            // SAFETY: the memory was allocated with `malloc_sync`, and is freed once.
            Owner::This => unsafe { result::free_sync(self.address) },
            // SAFETY: the memory was opened from a handle, and is closed once.
            _ => unsafe { sys::cuIpcCloseMemHandle(self.address) }.result(),
        };
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
