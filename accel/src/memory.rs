//! A device's memory.

use std::fmt::Debug;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr, ValidAsZeroBits};

use marlinspike::weight::{Table, TableData};

use crate::{
    device::{Device, failed},
    error::AccelError,
};

/// A type of elements that kernels know: an integer, or a 16-bit float as its bits.
pub trait Element: DeviceRepr + ValidAsZeroBits + Copy + private::Sealed {}

mod private {
    /// Only this module implements `Element`.
    pub trait Sealed {}
}

macro_rules! elements {
    ($($ty:ty),*) => { $(impl Element for $ty {} impl private::Sealed for $ty {})* };
}

elements!(u8, i8, u16, u32, i32, f32);

/// Elements in a device's memory; freed when dropped, unless the memory is another library's.
pub struct Buffer<T: Element> {
    memory: Memory<T>,
    len: usize,
}

enum Memory<T> {
    Own(CudaSlice<T>),
    Borrowed { address: u64, stream: Arc<CudaStream> },
}

impl<T: Element> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (name, len) = (std::any::type_name::<T>(), self.len());
        write!(f, "Buffer<{name}>[{len}] on device {}", self.stream().context().ordinal())
    }
}

impl<T: Element> Buffer<T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether this very [`Device`] allocated it, so that its stream orders all work on it.
    pub(crate) fn is_on(&self, device: &Device) -> bool {
        Arc::ptr_eq(self.stream(), device.stream())
    }

    /// `len` elements at `address`, used by kernels of `stream`. They are read and written only by kernels that a
    /// [`Device`] of that stream launches.
    pub(crate) fn borrowed(address: u64, len: usize, stream: &Arc<CudaStream>) -> Self {
        Self { memory: Memory::Borrowed { address, stream: stream.clone() }, len }
    }

    pub(crate) fn address(&self) -> u64 {
        match &self.memory {
            // Nothing is recorded when the second part is dropped: the one stream orders everything.
            Memory::Own(slice) => slice.device_ptr(slice.stream()).0,
            Memory::Borrowed { address, .. } => *address,
        }
    }

    fn stream(&self) -> &Arc<CudaStream> {
        match &self.memory {
            Memory::Own(slice) => slice.stream(),
            Memory::Borrowed { stream, .. } => stream,
        }
    }

    /// The allocation.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for memory of another library.
    fn own(&self, operation: &'static str) -> Result<&CudaSlice<T>, AccelError> {
        match &self.memory {
            Memory::Own(slice) => Ok(slice),
            Memory::Borrowed { .. } => Err(AccelError::Argument {
                operation,
                what: "buffer",
                found: "memory of another library".into(),
                expected: "memory that a Device allocated".into(),
            }),
        }
    }
}

impl Device {
    /// Copies `host` to the device.
    ///
    /// # Errors
    /// [`AccelError::Driver`], as where the device has too little memory.
    pub fn upload<T: Element>(&self, host: &[T]) -> Result<Buffer<T>, AccelError> {
        if host.is_empty() {
            return self.zeroed(0);
        }
        let slice = self.stream().clone_htod(host).map_err(failed("cuMemcpyHtoDAsync"))?;
        Ok(Buffer { memory: Memory::Own(slice), len: host.len() })
    }

    /// `len` zeros on the device.
    ///
    /// # Errors
    /// As [`Device::upload`].
    pub fn zeroed<T: Element>(&self, len: usize) -> Result<Buffer<T>, AccelError> {
        // The driver gives no empty allocation, so one element is allocated and never read.
        let slice = self.stream().alloc_zeros(len.max(1)).map_err(failed("cuMemAllocAsync"))?;
        Ok(Buffer { memory: Memory::Own(slice), len })
    }

    /// Room for `len` elements of any value: of this device's [scratch memory](Device::on_stream), if it has some.
    ///
    /// # Errors
    /// As [`Device::upload`]; [`AccelError::Argument`] where the scratch memory is too small.
    pub(crate) fn room<T: Element>(&self, len: usize) -> Result<Buffer<T>, AccelError> {
        match self.scratch() {
            None => self.zeroed(len),
            Some(scratch) => {
                let address = scratch.take(len.saturating_mul(size_of::<T>()))?;
                Ok(Buffer::borrowed(address, len, self.stream()))
            }
        }
    }

    /// Copies a buffer to other memory of this device.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a buffer of another device or library; else as [`Device::upload`].
    pub fn copy<T: Element>(&self, buffer: &Buffer<T>) -> Result<Buffer<T>, AccelError> {
        owned("copy", buffer, buffer.is_on(self), self)?;
        let slice =
            self.stream().clone_dtod(buffer.own("copy")?).map_err(failed("cuMemcpyDtoDAsync"))?;
        Ok(Buffer { memory: Memory::Own(slice), len: buffer.len })
    }

    /// Copies a buffer to the host, after everything launched so far.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a buffer of another device or library; [`AccelError::Driver`], also for a
    /// launch before that failed on the device.
    pub fn download<T: Element>(&self, buffer: &Buffer<T>) -> Result<Vec<T>, AccelError> {
        owned("download", buffer, buffer.is_on(self), self)?;
        let copied = self.stream().clone_dtoh(buffer.own("download")?);
        let mut host = copied.map_err(failed("cuMemcpyDtoHAsync"))?;
        host.truncate(buffer.len);
        Ok(host)
    }
}

/// Returns an error unless the buffer is `ours`: the copy would run on this device's stream, which does not wait
/// for what another device's stream writes to the buffer.
fn owned(
    operation: &'static str,
    buffer: &dyn Debug,
    ours: bool,
    device: &dyn Debug,
) -> Result<(), AccelError> {
    if ours {
        return Ok(());
    }
    Err(AccelError::Argument {
        operation,
        what: "buffer",
        found: format!("{buffer:?}, memory of another device"),
        expected: format!("memory of {device:?}"),
    })
}

/// A table's elements in little-endian bytes, the device's form of scales of any width.
pub(crate) fn bytes(table: &Table) -> Vec<u8> {
    match table.data() {
        TableData::B8(data) => data.clone(),
        TableData::B16(data) => data.iter().flat_map(|bits| bits.to_le_bytes()).collect(),
        TableData::B32(data) => data.iter().flat_map(|bits| bits.to_le_bytes()).collect(),
    }
}

/// A table's 16-bit elements; an empty slice for another width.
pub(crate) fn halves(table: &Table) -> &[u16] {
    match table.data() {
        TableData::B16(data) => data,
        TableData::B8(_) | TableData::B32(_) => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_another_device_is_refused_by_name() {
        assert_eq!(owned("copy", &"Buffer<u8>[4] on device 0", true, &"Device 0"), Ok(()));
        let error = owned("download", &"Buffer<u8>[4] on device 1", false, &"Device 0");
        let error = error.unwrap_err();
        assert!(matches!(error, AccelError::Argument { operation: "download", .. }), "{error:?}");
        let message = error.to_string();
        for part in ["`download`: buffer", "device 1", "another device", "Device 0"] {
            assert!(message.contains(part), "{message}");
        }
    }
}
