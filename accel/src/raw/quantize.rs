//! Launches that quantize rows: one thread block for each.

use cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};

use super::ended;
use crate::{
    device::Device,
    error::AccelError,
    ops::quantize::{FP8, INT8, Rows},
};

fn one_block_each(rows: &Rows<'_>) -> LaunchConfig {
    LaunchConfig { grid_dim: (rows.rows, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 }
}

/// `function` is the entry point of `per_token_quant_int8.cu`.
pub(crate) fn int8(
    device: &Device,
    function: &CudaFunction,
    args: Rows<'_>,
) -> Result<(), AccelError> {
    let config = one_block_each(&args);
    let mut builder = device.stream().launch_builder(function);
    builder
        .arg(args.x.slice())
        .arg(args.codes.slice_mut())
        .arg(args.scales.slice_mut())
        .arg(&args.size_k);
    // SAFETY: the arguments are the entry point's, in its order and of its types, bytes for int8. x and
    // codes have rows * size_k elements, scales has rows, all of this device (`Rows` is checked); a block
    // of whole warps stays in its row.
    ended(INT8.name, unsafe { builder.launch(config) })
}

/// `function` is the entry point of `per_token_quant_fp8.cu`.
pub(crate) fn fp8(
    device: &Device,
    function: &CudaFunction,
    args: Rows<'_>,
    upper: f32,
) -> Result<(), AccelError> {
    let config = one_block_each(&args);
    let mut builder = device.stream().launch_builder(function);
    builder
        .arg(args.x.slice())
        .arg(args.codes.slice_mut())
        .arg(args.scales.slice_mut())
        .arg(&args.size_k)
        .arg(&upper);
    // SAFETY: as for int8, with a number more.
    ended(FP8.name, unsafe { builder.launch(config) })
}
