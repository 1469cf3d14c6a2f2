//! Launch of `marlin_gemm_a8`.

use cudarc::driver::{CudaFunction, PushKernelArg};

use super::{ended, launch::with_shared_memory, optional};
use crate::{
    device::{Device, failed},
    error::AccelError,
    ops::gemm_a8::Gemm,
};

/// Launches a product.
///
/// `function` must be the entry point of `marlin_gemm_a8.cu`, compiled with the macros of the weight's
/// form and of `gemm`'s rows and stages, with IS_MOE where `gemm` is routed. [`crate::ops::gemm_a8`]
/// alone calls this, with exactly that.
pub(crate) fn launch(
    device: &Device,
    name: &'static str,
    function: &CudaFunction,
    gemm: Gemm<'_>,
) -> Result<(), AccelError> {
    let grid = (gemm.size_n / 32, gemm.blocks, 1);
    let config = with_shared_memory(function, grid, gemm.chunks * 32, gemm.shared_bytes);
    let config = config.map_err(failed(name))?;
    let weight = gemm.weight;
    let x_factor = weight.input_global_scale();
    // Below 2^31, as the rows of y are.
    let top_k = gemm.routed.map_or(1, |routed| routed.top_k as u32);
    let mut builder = device.stream().launch_builder(function);
    builder.arg(weight.qweight.slice()).arg(weight.scales.slice());
    optional(&mut builder, weight.zeros.as_ref());
    optional(&mut builder, weight.bias.as_ref());
    builder
        .arg(gemm.x.codes.slice())
        .arg(gemm.x.scales.slice())
        .arg(gemm.y.slice_mut())
        .arg(&x_factor)
        .arg(&gemm.size_m)
        .arg(&gemm.size_n)
        .arg(&gemm.size_k)
        .arg(&gemm.chunk_k);
    let blocks = gemm.routed.map(|routed| routed.blocks);
    optional(&mut builder, blocks.map(|blocks| &blocks.sorted_token_ids));
    optional(&mut builder, blocks.map(|blocks| &blocks.expert_ids));
    optional(&mut builder, blocks.map(|blocks| &blocks.num_tokens_post_padded));
    optional(&mut builder, gemm.routed.and_then(|routed| routed.topk_weights));
    builder.arg(&top_k);
    // SAFETY: the arguments are the entry point's, in its order and of its types, and all of this
    // device. `Gemm` holds only checked values: x has rows of size_k codes and as many scales, y size_m
    // rows of size_n; the weight's buffers are what the reference packs for that shape, N is a multiple
    // of 64, K of 128; there are `chunks` chunks of chunk_k, at most 8. Zeros are read only where
    // HAS_ZERO, which the weight's form says. Rows of x beyond size_m are not read, those of y not
    // written; every element of y is written by one thread. Shared memory is as large as the source
    // demands. Routed: `DeviceBlocks` are room for this M and block size, zero until the alignment kernel
    // writes it, so that entries are below size_m or padding, experts below the weight's; there are as
    // many router weights as rows.
    ended(name, unsafe { builder.launch(config) })
}
