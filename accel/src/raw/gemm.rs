//! Launch of `marlin_gemm`.

use std::sync::Arc;

use cudarc::driver::{
    CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg,
    sys::CUfunction_attribute_enum as Attribute,
};

use super::optional;
use crate::ops::gemm::Gemm;

/// Launches a product.
///
/// `function` must be the entry point of `marlin_gemm.cu`, compiled with the macros of the weight's
/// form and of the tiling, with IS_MOE where `gemm` is routed; `blocks` the blocks of rows.
/// [`crate::ops::gemm`] alone calls this, with exactly that.
pub(crate) fn launch(
    stream: &Arc<CudaStream>,
    function: &CudaFunction,
    blocks: u32,
    gemm: Gemm<'_>,
) -> Result<(), DriverError> {
    function.set_attribute(
        Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        gemm.shared_bytes.cast_signed(),
    )?;
    let config = LaunchConfig {
        grid_dim: (gemm.tiling.ranks, gemm.size_n / gemm.tiling.n_tile, blocks),
        block_dim: (gemm.tiling.threads(), 1, 1),
        shared_mem_bytes: gemm.shared_bytes,
    };
    let weight = gemm.weight;
    let group_k = weight.group_k();
    // Below 2^31, as the rows of y are.
    let top_k = gemm.routed.map_or(1, |routed| routed.top_k as u32);
    let mut builder = stream.launch_builder(function);
    builder.arg(weight.qweight.slice()).arg(weight.scales.slice());
    optional(&mut builder, weight.zeros.as_ref());
    optional(&mut builder, weight.bias.as_ref());
    optional(&mut builder, weight.global_scale.as_ref());
    builder
        .arg(gemm.x.slice())
        .arg(gemm.y.slice_mut())
        .arg(&gemm.size_m)
        .arg(&gemm.size_n)
        .arg(&gemm.size_k)
        .arg(&gemm.chunk_k)
        .arg(&group_k);
    if let Some(routed) = &gemm.routed {
        builder
            .arg(routed.blocks.sorted_token_ids.slice())
            .arg(routed.blocks.expert_ids.slice())
            .arg(routed.blocks.num_tokens_post_padded.slice());
        optional(&mut builder, routed.topk_weights);
        builder.arg(&top_k);
    }
    // SAFETY: the arguments are the entry point's, in its order and of its types, and all of this
    // device. `Gemm` holds only checked values: x has size_m rows of size_k, y as many of size_n; the
    // weight's buffers are what the reference packs for that shape, N is a multiple of the tile's columns, K
    // of 64 and of the group; at most 8 chunks of chunk_k make K. Zeros are read only where HAS_ZERO, which the weight's
    // form says. Rows of x beyond size_m are not read, those of y not written; every element of y is
    // written by one thread. Shared memory is as large as the source demands.
    // Routed: `DeviceBlocks` are room for this M and block size, zero until the alignment kernel writes
    // it, so that entries are below size_m or padding, experts below the weight's; there are as many
    // router weights as rows.
    unsafe { builder.launch(config) }.map(drop)
}
