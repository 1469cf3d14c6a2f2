//! Launches that measure a device.

use cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};

use super::ended;
use crate::{
    device::Device, error::AccelError, limits::Reads, memory::Buffer, ops::gemm::parameters::size,
};

/// Threads of a block of both sources.
pub(crate) const THREADS: u32 = 256;

/// `function` is the entry point of `read_limit.cu`.
pub(crate) fn read(
    device: &Device,
    function: &CudaFunction,
    reads: &mut Reads,
) -> Result<(), AccelError> {
    let config = LaunchConfig {
        grid_dim: (reads.blocks, 1, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    };
    let count = reads.vectors();
    let mut builder = device.stream().launch_builder(function);
    builder.arg(reads.words.slice_mut()).arg(reads.result.slice_mut()).arg(&count);
    // SAFETY: the arguments are the entry point's, in its order and of its types. `Reads` has whole
    // rounds of eight vectors of 16 bytes for each thread, so that no access is past the last word,
    // and a result for each thread.
    ended("read_limit", unsafe { builder.launch(config) })
}

/// `function` is the entry point of `matrix_limit.cu`, compiled with WGMMA as `wgmma` says.
pub(crate) fn matrix(
    device: &Device,
    function: &CudaFunction,
    wgmma: bool,
    blocks: u32,
    rounds: u32,
    result: &mut Buffer<f32>,
) -> Result<(), AccelError> {
    let needed = u64::from(blocks) * u64::from(THREADS);
    if u64::try_from(result.len()) != Ok(needed) {
        let reason = format!("a result of {} elements, not {needed}", result.len());
        return Err(AccelError::Driver { call: "matrix_limit", reason });
    }
    let config = LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: size("matrix_limit", "SHARED_BYTES", &[("WGMMA", wgmma.into())]),
    };
    let mut builder = device.stream().launch_builder(function);
    builder.arg(result.slice_mut()).arg(&rounds);
    // SAFETY: the arguments are the entry point's. Each thread writes its element of `result`, which
    // has one for each (checked above); operands are in as much shared memory as the source takes.
    ended("matrix_limit", unsafe { builder.launch(config) })
}
