//! Kernels on candle's stream.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop,
};
use candle_core::{CudaDevice, CudaStorage, Layout, Result, bail};
use marlinspike_accel::borrowed::Scratch;
use marlinspike_accel::memory::Element;
use marlinspike_accel::{AccelError, Buffer, Device};

/// The devices opened so far, which share their compiled modules.
static DEVICES: Mutex<Option<HashMap<usize, Arc<Device>>>> = Mutex::new(None);

fn opened(ordinal: usize) -> Result<Arc<Device>> {
    // A panic elsewhere cannot leave the map half changed, so a poisoned lock is still good.
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let devices = devices.get_or_insert_default();
    if let Some(device) = devices.get(&ordinal) {
        return Ok(device.clone());
    }
    let device = Device::open_for_streams(ordinal).map_err(candle_core::Error::wrap)?;
    let device = Arc::new(device);
    devices.insert(ordinal, device.clone());
    Ok(device)
}

/// Elements of a tensor, and candle's note that this stream uses them. Only [`held`] and [`held_slice`] make it.
pub(super) struct Held<'a> {
    address: u64,
    len: usize,
    _until_launched: SyncOnDrop<'a>,
}

/// The elements of a contiguous tensor of `T`.
pub(super) fn held<'a, T: CudaDType + 'a>(
    storage: &'a CudaStorage,
    layout: &Layout,
    stream: &'a CudaStream,
) -> Result<Held<'a>> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("found a tensor with strides {:?}, expected a contiguous one", layout.stride())
    };
    let (base, guard) = storage.as_cuda_slice::<T>()?.device_ptr(stream);
    let address = base + (start * size_of::<T>()) as u64;
    if !address.is_multiple_of(16) {
        bail!("found a tensor at {} modulo 16, expected 0", address % 16)
    }
    Ok(Held { address, len: end - start, _until_launched: guard })
}

/// The elements of a result that kernels write.
pub(super) fn held_slice<'a, T>(slice: &'a mut CudaSlice<T>, stream: &'a CudaStream) -> Held<'a> {
    let len = slice.len();
    let (address, guard) = slice.device_ptr_mut(stream);
    Held { address, len, _until_launched: guard }
}

/// Memory of candle's allocator for a result.
pub(super) fn allocated<T: DeviceRepr>(device: &CudaDevice, len: usize) -> Result<CudaSlice<T>> {
    // SAFETY: kernels write every element before any is read: a product or layer computes all outputs.
    unsafe { device.alloc::<T>(len) }
}

/// An operation's view of the device, on candle's stream.
pub(super) struct View {
    device: Device,
    is_launched: bool,
    flags: u64,
}

impl View {
    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether kernels are to be launched; else sizes are measured.
    pub(super) fn is_launched(&self) -> bool {
        self.is_launched
    }

    /// The elements of a tensor, of a type as wide.
    pub(super) fn take<T: Element>(&self, held: &Held<'_>) -> Buffer<T> {
        self.at(held.address, held.len)
    }

    /// The bytes of a tensor of 16-bit elements.
    pub(super) fn bytes(&self, held: &Held<'_>, size: usize) -> Buffer<u8> {
        self.at(held.address, held.len * size)
    }

    /// Room for the totals of products of many rows.
    pub(super) fn split(&mut self) -> std::result::Result<(), AccelError> {
        let flags = self.at(self.flags, self.device.split_flags());
        self.device.split_with(&flags)
    }

    fn at<T: Element>(&self, address: u64, len: usize) -> Buffer<T> {
        // SAFETY:
        // - The address is of a tensor that the caller holds (`Held`), aligned to 16 bytes, or of the flags that `run`
        //   holds, or nothing is launched.
        // - Types of a tensor and of its buffer are equally wide: each caller names both.
        // - The work is on the tensor's stream; candle orders other streams by the events that `Held` records.
        unsafe { self.device.borrow(address, len) }
    }
}

/// Runs an operation on candle's stream: `work` once to measure its scratch memory, then to launch it. It returns
/// whether it takes flags.
pub(super) fn run(
    device: &CudaDevice,
    work: impl Fn(&mut View) -> std::result::Result<bool, AccelError>,
) -> Result<()> {
    let stream = device.cuda_stream();
    let own = opened(stream.context().ordinal())?;
    let handle = stream.cu_stream().expose_provenance() as u64;
    let view = |scratch, is_launched, flags| {
        // SAFETY:
        // - The stream is candle's, of the device's primary context, and outlives this function.
        // - The scratch memory is candle's, allocated below on this stream and freed in its order.
        // - Nothing is launched to measure: `work` reads `is_launched`.
        let device = unsafe { own.on_stream(handle, scratch) };
        View { device, is_launched, flags }
    };
    let mut measured = view(Scratch::measure(), false, 0);
    let splits = work(&mut measured).map_err(candle_core::Error::wrap)?;
    let (bytes, count) = (measured.device.scratch_bytes(), measured.device.split_flags());
    let room = allocated::<u8>(device, usize::try_from(bytes).unwrap_or(usize::MAX).max(1))?;
    let flags = device.alloc_zeros::<i32>(if splits { count } else { 1 })?;
    let scratch = Scratch::new(room.device_ptr(&stream).0, bytes);
    let mut launched = view(scratch, true, flags.device_ptr(&stream).0);
    work(&mut launched).map_err(candle_core::Error::wrap)?;
    Ok(())
}
