//! Launches that may begin while the kernel before them on the stream still runs.

use std::{ffi::c_void, ptr};

use cudarc::driver::{
    CudaFunction, DevicePtr, DriverError, LaunchConfig,
    sys::{
        self, CUfunction_attribute_enum as Attribute, CUlaunchAttribute,
        CUlaunchAttributeID_enum as AttributeId, CUlaunchAttributeValue, CUlaunchConfig,
        CUtensorMap,
    },
};

use crate::{
    device::Device,
    memory::{Buffer, Element},
};

/// One argument of a kernel, in the bytes that the kernel takes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Argument {
    /// An address in the device's memory; 0: the null pointer.
    Pointer(u64),
    U32(u32),
    U64(u64),
    Routing(Routing),
    Activation(Activation),
    /// A matrix as the copy engine takes it.
    TensorMap(CUtensorMap),
}

/// `Routing` of `routing.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Routing {
    pub(crate) sorted_token_ids: u64,
    pub(crate) expert_ids: u64,
    pub(crate) num_tokens_post_padded: u64,
    pub(crate) topk_ids: u64,
    pub(crate) expert_of: u64,
    pub(crate) num_experts: u32,
    pub(crate) is_early: u32,
}

/// `Activation` of `activation.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Activation {
    pub(crate) function: u32,
    pub(crate) columns: u32,
    pub(crate) exchanged: u32,
    pub(crate) alpha: f32,
    pub(crate) gate_limit: f32,
    pub(crate) value_limit: f32,
    pub(crate) up_limit: f32,
    pub(crate) up_shift: f32,
}

const _: () = assert!(size_of::<Routing>() == 48 && size_of::<Activation>() == 32);

impl<T: Element> From<&Buffer<T>> for Argument {
    fn from(buffer: &Buffer<T>) -> Self {
        Self::Pointer(address(buffer))
    }
}

impl<T: Element> From<Option<&Buffer<T>>> for Argument {
    fn from(buffer: Option<&Buffer<T>>) -> Self {
        Self::Pointer(buffer.map_or(0, address))
    }
}

impl From<u32> for Argument {
    fn from(value: u32) -> Self {
        Self::U32(value)
    }
}

impl From<u64> for Argument {
    fn from(value: u64) -> Self {
        Self::U64(value)
    }
}

/// Where a buffer is in its device's memory.
pub(crate) fn address<T: Element>(buffer: &Buffer<T>) -> u64 {
    let slice = buffer.slice();
    // Nothing is recorded when the second part is dropped: the one stream orders everything.
    slice.device_ptr(slice.stream()).0
}

/// A grid of one dimension whose thread blocks have so much dynamic shared memory, more than 48 KiB too.
///
/// # Errors
/// The driver's, for more than the device has.
pub(super) fn with_shared_memory(
    function: &CudaFunction,
    grid_dim: (u32, u32, u32),
    threads: u32,
    shared_bytes: u32,
) -> Result<LaunchConfig, DriverError> {
    let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    function.set_attribute(attribute, shared_bytes.cast_signed())?;
    Ok(LaunchConfig { grid_dim, block_dim: (threads, 1, 1), shared_mem_bytes: shared_bytes })
}

/// Launches `function`, which may begin before the kernel before it on the stream has ended, where
/// the device and its driver know that (from 9.0 and 12.3 on).
///
/// # Safety
/// `arguments` must be the entry point's, in its order and of its types, and keep every access inside
/// their buffers. On a device from 9.0 on, the kernel must follow the rule of `depend.cuh`: until it
/// has waited for the kernel before it, it writes nothing, and reads nothing that one writes.
pub(super) unsafe fn launch(
    device: &Device,
    function: &CudaFunction,
    config: LaunchConfig,
    mut arguments: Vec<Argument>,
) -> Result<(), DriverError> {
    let mut pointers: Vec<*mut c_void> = arguments
        .iter_mut()
        .map(|argument| match argument {
            Argument::Pointer(value) | Argument::U64(value) => ptr::from_mut(value).cast(),
            Argument::U32(value) => ptr::from_mut(value).cast(),
            Argument::Routing(value) => ptr::from_mut(value).cast(),
            Argument::Activation(value) => ptr::from_mut(value).cast(),
            Argument::TensorMap(value) => ptr::from_mut(value).cast(),
        })
        .collect();
    let mut early = CUlaunchAttribute {
        id: AttributeId::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let stream = device.stream();
    stream.context().bind_to_thread()?;
    let config = CUlaunchConfig {
        gridDimX: config.grid_dim.0,
        gridDimY: config.grid_dim.1,
        gridDimZ: config.grid_dim.2,
        blockDimX: config.block_dim.0,
        blockDimY: config.block_dim.1,
        blockDimZ: config.block_dim.2,
        sharedMemBytes: config.shared_mem_bytes,
        hStream: stream.cu_stream(),
        attrs: &mut early,
        numAttrs: device.launches_early().into(),
    };
    // SAFETY: the configuration, its attribute and the values that `pointers` point to outlive the call,
    // which copies them; the caller answers for the arguments.
    unsafe {
        sys::cuLaunchKernelEx(
            &config,
            function.cu_function(),
            pointers.as_mut_ptr(),
            ptr::null_mut(),
        )
    }
    .result()
}
