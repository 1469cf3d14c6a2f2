//! Typed launches: a [`Kernel`] takes the arguments of its entry point and no others.
#![allow(unsafe_code)]

pub(crate) mod tensor_map;

use std::{ffi::c_void, marker::PhantomData, ptr};

use cudarc::driver::{
    DriverError,
    sys::{
        self, CUlaunchAttribute, CUlaunchAttributeID_enum as AttributeId, CUlaunchAttributeValue,
        CUlaunchConfig,
    },
};

use marlinspike::products::schedule::{self, Schedule};

use crate::{
    device::Device,
    error::AccelError,
    memory::{Buffer, Element},
    nvrtc::Parameter,
    operation::Row,
};

/// An address in the device's memory, as a kernel takes it.
#[derive(Debug, Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct Pointer(u64);

impl Pointer {
    pub(crate) const NULL: Self = Self(0);

    pub(crate) fn new(address: u64) -> Self {
        Self(address)
    }

    pub(crate) fn address(self) -> u64 {
        self.0
    }
}

impl<T: Element> From<&Buffer<T>> for Pointer {
    fn from(buffer: &Buffer<T>) -> Self {
        Self(buffer.address())
    }
}

impl<T: Element> From<&mut Buffer<T>> for Pointer {
    fn from(buffer: &mut Buffer<T>) -> Self {
        Self::from(&*buffer)
    }
}

/// The null pointer where the buffer is absent.
impl<T: Element> From<Option<&Buffer<T>>> for Pointer {
    fn from(buffer: Option<&Buffer<T>>) -> Self {
        buffer.map_or(Self::NULL, Self::from)
    }
}

/// `Routing` of `routing.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Routing {
    pub(crate) sorted_token_ids: Pointer,
    pub(crate) expert_ids: Pointer,
    pub(crate) num_tokens_post_padded: Pointer,
    pub(crate) topk_ids: Pointer,
    pub(crate) expert_of: Pointer,
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

/// `Placing` of `place_entries.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Placing {
    pub(crate) topk_ids: Pointer,
    pub(crate) run_of: Pointer,
    pub(crate) place_of: Pointer,
    pub(crate) expert_ids: Pointer,
    pub(crate) block_rows: Pointer,
    pub(crate) num_tokens_post_padded: Pointer,
    pub(crate) num_experts: u32,
    pub(crate) num_runs: u32,
    pub(crate) block_size: u32,
}

/// `FewEntries` of `few_entries.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct FewEntries {
    topk_ids: Pointer,
    run_of: Pointer,
    entries: u32,
    num_experts: u32,
    num_runs: u32,
}

impl FewEntries {
    /// The kernel's `MOST_FOUND`.
    const MOST: usize = 32;

    /// What `placing` places, if that is few entries.
    pub(crate) fn of(placing: &Placing, entries: usize) -> Self {
        let Placing { topk_ids, run_of, num_experts, num_runs, .. } = *placing;
        let entries = if entries <= Self::MOST { entries as u32 } else { 0 };
        Self { topk_ids, run_of, entries, num_experts, num_runs }
    }

    /// Whether there are entries, and few.
    pub(crate) fn is_few(&self) -> bool {
        self.entries > 0
    }
}

/// `Ranks` of `ranks.cuh`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Ranks {
    pub(crate) parts: [Pointer; 8],
    pub(crate) outputs: [Pointer; 8],
    pub(crate) flags: [Pointer; 8],
    pub(crate) calls: Pointer,
    pub(crate) status: Pointer,
    pub(crate) rank: u32,
    pub(crate) turn: u32,
}

/// `Cut` of `cut.cuh`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Cut {
    begins: [u32; Self::MOST_CHUNKS + 1],
    chunks: u32,
    run: u32,
}

impl Cut {
    const MOST_CHUNKS: usize = Schedule::CANONICAL_CHUNKS;
}

impl From<schedule::Cut> for Cut {
    /// Of a K below 2^31.
    fn from(cut: schedule::Cut) -> Self {
        let mut begins = [cut.size_k as u32; Self::MOST_CHUNKS + 1];
        for (to, begin) in begins.iter_mut().zip(cut.begins()) {
            *to = begin as u32;
        }
        Self { begins, chunks: cut.chunks() as u32, run: cut.leaf_chunks().max(2) as u32 }
    }
}

const _: () = assert!(size_of::<Routing>() == 48 && size_of::<Activation>() == 32);
const _: () = assert!(size_of::<Cut>() == 44 && size_of::<Ranks>() == 216);
const _: () = assert!(size_of::<Placing>() == 64 && size_of::<FewEntries>() == 32);

/// The arguments of an entry point, in its order and of its types. Declared by [`arguments!`]; a test compares
/// [`SIZES`](Self::SIZES) with the compiled kernels.
///
/// A value is made only of checked arguments: every access that the kernel makes with it stays inside the buffers that
/// it points to, and those are of the device that it is launched on.
pub(crate) trait Arguments {
    /// Bytes of each argument.
    const SIZES: &'static [usize];

    /// The address of each argument.
    fn pointers(&mut self) -> Vec<*mut c_void>;
}

/// Declares the arguments of an entry point.
macro_rules! arguments {
    ($(#[$about:meta])* $name:ident { $($field:ident: $ty:ty),* $(,)? }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy)]
        struct $name {
            $($field: $ty),*
        }

        impl $crate::launch::Arguments for $name {
            const SIZES: &'static [usize] = &[$(size_of::<$ty>()),*];

            fn pointers(&mut self) -> Vec<*mut std::ffi::c_void> {
                vec![$(std::ptr::from_mut(&mut self.$field).cast()),*]
            }
        }
    };
}
pub(crate) use arguments;

/// The thread blocks of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) blocks: (u32, u32, u32),
    pub(crate) threads: (u32, u32, u32),
    /// Dynamic shared memory of a thread block.
    pub(crate) shared_bytes: u32,
}

impl Grid {
    /// Without shared memory.
    pub(crate) fn new(blocks: (u32, u32, u32), threads: (u32, u32, u32)) -> Self {
        Self { blocks, threads, shared_bytes: 0 }
    }

    /// At least `elements` threads, at most 2^38.
    pub(crate) fn one_thread_each(elements: u64) -> Self {
        let blocks = u32::try_from(elements.div_ceil(256)).unwrap_or(u32::MAX);
        Self::new((blocks, 1, 1), (256, 1, 1))
    }

    /// A thread for each of `pieces` pieces of each of `rows` rows: rows in the first dimension, blocks of whole
    /// warps along a row.
    pub(crate) fn one_thread_each_piece(rows: u32, pieces: u32) -> Self {
        let along = pieces.next_multiple_of(32).min(256);
        let across = 256 / along;
        let blocks = (rows.div_ceil(across), pieces.div_ceil(along), 1);
        Self::new(blocks, (along, across, 1))
    }

    /// Whole warps of one thread block for each of `rows` rows, with 16 bytes of shared memory for each of its pieces.
    pub(crate) fn whole_rows(rows: u32, pieces: u32) -> Self {
        let along = pieces.next_multiple_of(32).min(1024);
        let across = (256 / along).max(1);
        let grid = Self::new((rows.div_ceil(across), 1, 1), (along, across, 1));
        Self { shared_bytes: across * pieces * 16, ..grid }
    }
}

/// An operation's kernel.
pub(crate) struct Kernel<A> {
    row: &'static Row,
    starts_early: bool,
    arguments: PhantomData<fn(A)>,
}

impl<A: Arguments> Kernel<A> {
    /// The kernel of that operation's source.
    pub(crate) const fn new(row: &'static Row) -> Self {
        Self { row, starts_early: false, arguments: PhantomData }
    }

    /// The kernel of a source that follows the rule of `depend.cuh`: launches may start while the kernel before them on
    /// the stream runs, where the device and its driver support that (from 9.0 and 12.3 on).
    pub(crate) const fn early(row: &'static Row) -> Self {
        Self { row, starts_early: true, arguments: PhantomData }
    }

    /// Compiles the source under these parameters, unless that was done before, and launches it.
    ///
    /// # Errors
    /// [`AccelError::Capability`], [`AccelError::NvrtcMissing`] and [`AccelError::Compile`] from preparing the kernel,
    /// [`AccelError::Driver`] from launching it.
    pub(crate) fn launch(
        &self,
        device: &Device,
        parameters: &[Parameter],
        grid: Grid,
        mut arguments: A,
    ) -> Result<(), AccelError> {
        let function = device.function(self.row, parameters, grid.shared_bytes)?;
        let failed = |error: DriverError| AccelError::Driver {
            call: self.row.name,
            reason: error.to_string(),
        };
        let mut pointers = arguments.pointers();
        let mut early = CUlaunchAttribute {
            id: AttributeId::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let stream = device.stream();
        stream.context().bind_to_thread().map_err(failed)?;
        let config = CUlaunchConfig {
            gridDimX: grid.blocks.0,
            gridDimY: grid.blocks.1,
            gridDimZ: grid.blocks.2,
            blockDimX: grid.threads.0,
            blockDimY: grid.threads.1,
            blockDimZ: grid.threads.2,
            sharedMemBytes: grid.shared_bytes,
            hStream: stream.cu_stream(),
            attrs: &mut early,
            numAttrs: (self.starts_early && device.launches_early()).into(),
        };
        // SAFETY:
        // - The configuration, its attribute and the values behind `pointers` outlive the call, which copies them.
        // - `pointers` are of the entry point's arguments: `A` is its list, compared with the compiled kernel by a test.
        // - The kernel's accesses stay inside live buffers of this device: the contract of `Arguments`. Buffers are
        //   released through the same stream, after the kernel; memory of another library by the conditions of
        //   `Device::on_stream`.
        // - A kernel that starts early follows the rule of `depend.cuh`: until it has waited for the kernel before it,
        //   it writes nothing, and reads nothing that one writes.
        unsafe {
            sys::cuLaunchKernelEx(
                &config,
                function.cu_function(),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        }
        .result()
        .map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::FewEntries;

    #[test]
    fn the_kernel_finds_tiles_of_as_many_entries() {
        let most = marlinspike_kernels::constant("marlin_gemm_a8_wgmma", "MOST_FOUND", &[]);
        assert_eq!(most, Ok(FewEntries::MOST as u32));
    }
}
