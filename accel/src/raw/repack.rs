//! Launch of `gptq_marlin_repack`.

use std::sync::Arc;

use cudarc::driver::{
    CudaFunction, CudaSlice, CudaStream, DriverError, LaunchConfig, PushKernelArg,
};

use crate::ops::repack::RepackArgs;

const THREADS: u32 = 256;

/// Copies the arguments to the device, launches, copies the result back.
///
/// `function` must be the entry point of the source `gptq_marlin_repack`, compiled with the
/// macros of `args`; [`crate::ops::repack`] alone calls this, with exactly that.
pub(crate) fn launch(
    stream: &Arc<CudaStream>,
    function: &CudaFunction,
    args: &RepackArgs<'_>,
) -> Result<Vec<u32>, DriverError> {
    let qweight = stream.clone_htod(args.qweight())?;
    // The kernel built without HAS_PERM never reads it.
    let perm: CudaSlice<u32> = match args.perm() {
        Some(perm) => stream.clone_htod(perm)?,
        None => stream.null()?,
    };
    let mut out = stream.alloc_zeros::<u32>(args.qweight().len())?;
    let config = LaunchConfig {
        grid_dim: (args.words().div_ceil(THREADS), 1, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    };
    let (size_k, size_n) = (args.size_k(), args.size_n());
    let mut builder = stream.launch_builder(function);
    builder.arg(&qweight).arg(&perm).arg(&mut out).arg(&size_k).arg(&size_n);
    // SAFETY: the five arguments are the entry point's, in its order and of its types. `RepackArgs`
    // holds only checked values: `qweight` has size_k / PACK * size_n words and so has `out`; `perm`
    // has size_k entries below size_k; the sizes are multiples of the tile. So every index the
    // kernel forms is inside its buffer. It writes `out` alone, each word by one thread.
    unsafe { builder.launch(config) }?;
    stream.clone_dtoh(&out)
}
