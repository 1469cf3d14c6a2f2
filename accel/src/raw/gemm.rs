//! Launch of `marlin_gemm`.

use cudarc::driver::{CudaFunction, DriverError};

use super::launch::{Activation, Argument, Routing, address, launch as launch_early, with_shared_memory};
use crate::{
    device::Device,
    ops::gemm::{Entries, Experts, Gemm},
};

impl From<&Experts<'_>> for Routing {
    fn from(experts: &Experts<'_>) -> Self {
        let nowhere = Self { is_early: experts.is_early.into(), ..Self::default() };
        match experts.entries {
            Entries::Blocks(blocks) => Self {
                sorted_token_ids: address(&blocks.sorted_token_ids),
                expert_ids: address(&blocks.expert_ids),
                num_tokens_post_padded: address(&blocks.num_tokens_post_padded),
                ..nowhere
            },
            Entries::Direct { topk_ids, runs } => Self {
                topk_ids: address(topk_ids),
                expert_of: runs.expert_of.as_ref().map_or(0, address),
                // At most 8192.
                num_experts: runs.run_of.len() as u32,
                ..nowhere
            },
        }
    }
}

/// Launches a product.
///
/// `function` must be the entry point of `marlin_gemm.cu`, compiled with the macros of the weight's
/// form, of the tiling and of what `gemm` has of experts. [`crate::ops::gemm`] alone calls this, with
/// exactly that.
pub(crate) fn launch(
    device: &Device,
    function: &CudaFunction,
    gemm: Gemm<'_>,
) -> Result<(), DriverError> {
    let threads = gemm.tiling.threads();
    let config = with_shared_memory(function, (gemm.grid, 1, 1), threads, gemm.shared_bytes)?;
    let weight = gemm.weight;
    let mut arguments = vec![
        (&weight.qweight).into(),
        (&weight.scales).into(),
        weight.zeros.as_ref().into(),
        weight.g_idx.as_ref().into(),
        weight.bias.as_ref().into(),
        weight.global_scale.as_ref().into(),
        gemm.x.into(),
        (&*gemm.y).into(),
        gemm.size_m.into(),
        gemm.size_n.into(),
        gemm.size_k.into(),
        gemm.chunk_k.into(),
        weight.group_k().into(),
    ];
    let experts = gemm.experts.as_ref();
    let activation = experts.and_then(|experts| experts.activation);
    arguments.push(Argument::Routing(experts.map_or_else(Routing::default, Routing::from)));
    arguments.push(experts.and_then(|experts| experts.topk_weights).into());
    // Below 2^31, as the rows of y are.
    arguments.push(experts.map_or(0, |experts| experts.top_k as u32).into());
    arguments.push(Argument::Activation(activation.map_or_else(Activation::default, Into::into)));
    // SAFETY: the arguments are the entry point's, in its order and of its types, and all of this
    // device. `Gemm` holds only checked values: x has size_m / top_k rows of size_k, y has size_m rows
    // of size_n, or of what the activation makes of that; the weight's buffers are what the reference
    // packs for that shape, N is a multiple of the tile's columns (both halves of N of 64, where it takes
    // of both), K of 64 and of the group; at most 8 chunks of chunk_k make K. Zeros are read only where
    // HAS_ZERO, which the weight's form says. Rows of x beyond size_m are not read, those of y not
    // written; every element of y is written by one thread. Shared memory is as large as the source
    // demands.
    // With experts: `DeviceBlocks` are room for this M and block size, zero until the alignment kernel
    // writes it, so that entries are below size_m or padding, experts below the weight's; or there is an
    // id for each row, of which those beyond the experts are not looked up; there are as many router
    // weights as rows. The kernel waits before it reads x or writes y; a routing that it reads before
    // is older than the last kernel (`is_early`), and weights are written by no kernel.
    unsafe { launch_early(device, function, config, arguments) }
}
