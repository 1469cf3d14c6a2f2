//! Launches of the parts of an expert layer around its products.

use cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};

use super::{ended, one_thread_each, optional};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    ops::{
        activation,
        align::{self, DeviceBlocks, Runs},
        router, sum,
    },
};

/// `function` is the entry point of `topk_router.cu`.
pub(crate) fn router(
    device: &Device,
    function: &CudaFunction,
    args: &router::Args<'_>,
) -> Result<(Vec<f32>, Vec<i32>), AccelError> {
    let logits = device.upload(args.logits)?;
    let bias = args.bias.map(|bias| device.upload(bias)).transpose()?;
    let entries = args.rows as usize * args.top_k as usize;
    let mut weights = device.zeroed::<f32>(entries)?;
    let mut ids = device.zeroed::<i32>(entries)?;
    let config = LaunchConfig {
        grid_dim: (args.rows, 1, 1),
        block_dim: (128, 1, 1),
        shared_mem_bytes: args.shared_bytes,
    };
    let mut builder = device.stream().launch_builder(function);
    builder.arg(logits.slice());
    optional(&mut builder, bias.as_ref());
    builder
        .arg(weights.slice_mut())
        .arg(ids.slice_mut())
        .arg(&args.experts)
        .arg(&args.top_k)
        .arg(&args.num_groups)
        .arg(&args.topk_group)
        .arg(&args.renormalize)
        .arg(&args.factor);
    // SAFETY: the arguments are the entry point's, in its order and of its types. `Args` is checked by the
    // reference's router: logits are rows of `experts` finite numbers, a bias has as many; top_k experts
    // and topk_group groups can be chosen, so that no choice comes out empty. Shared memory holds two
    // floats for each expert and one for each group.
    ended(router::ROW.name, unsafe { builder.launch(config) })?;
    Ok((device.download(&weights)?, device.download(&ids)?))
}

/// `function` is the entry point of `moe_align_block_size.cu`.
pub(crate) fn align(
    device: &Device,
    function: &CudaFunction,
    runs: &Runs,
    topk_ids: &Buffer<i32>,
    blocks: &mut DeviceBlocks,
) -> Result<(), AccelError> {
    // All are below 2^31: the entries with their padding are, and experts are at most 8192.
    let (numel, block_size) = (topk_ids.len() as u32, blocks.block_size() as u32);
    let (num_experts, num_runs) = (runs.run_of.len() as u32, runs.label_of.len() as u32);
    let config = LaunchConfig {
        grid_dim: (num_runs, 1, 1),
        // A thread for each entry and each run, as far as a block reaches.
        block_dim: (numel.max(num_runs).next_multiple_of(32).min(1024), 1, 1),
        shared_mem_bytes: num_runs * 4,
    };
    let mut builder = device.stream().launch_builder(function);
    builder
        .arg(topk_ids.slice())
        .arg(runs.run_of.slice())
        .arg(runs.label_of.slice())
        .arg(blocks.sorted_token_ids.slice_mut())
        .arg(blocks.expert_ids.slice_mut())
        .arg(blocks.num_tokens_post_padded.slice_mut())
        .arg(&numel)
        .arg(&num_experts)
        .arg(&num_runs)
        .arg(&block_size);
    // SAFETY: the arguments are the entry point's, in its order and of its types. run_of has an entry below
    // num_runs for each expert, or -1, and ids beyond the experts are not looked up; `blocks` was made
    // as room for so many entries, whatever their ids (checked). Every run has a block of its own,
    // which writes its part alone.
    ended(align::ROW.name, unsafe { builder.launch(config) })
}

/// Launches an activation: `function` is the entry point of `moe_activation.cu`, compiled for `args`;
/// `gate_up` has as many rows, of the width that COLUMNS says, as `out` has of size_i.
pub(crate) fn activate(
    device: &Device,
    function: &CudaFunction,
    args: &activation::Args,
    gate_up: &Buffer<u16>,
    out: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    let mut builder = device.stream().launch_builder(function);
    builder
        .arg(gate_up.slice())
        .arg(out.slice_mut())
        .arg(&args.elements)
        .arg(&args.size_i)
        .arg(&args.alpha)
        .arg(&args.gate_limit)
        .arg(&args.value_limit)
        .arg(&args.up_limit)
        .arg(&args.up_shift);
    // SAFETY: the arguments are the entry point's, in its order and of its types. `Args` holds the number of
    // elements of `out` and the width of gate_up, which its maker checked; each element has one thread.
    ended(activation::ROW.name, unsafe { builder.launch(one_thread_each(args.elements)) })
}

/// Launches a sum: `function` is the entry point of `moe_sum.cu`, with HAS_IDS where there are `slots`;
/// `down` has top_k rows of size_n for each of `y`, and there is an id for each.
pub(crate) fn sum(
    device: &Device,
    function: &CudaFunction,
    args: &sum::Args,
    down: &Buffer<u16>,
    slots: Option<sum::Slots<'_>>,
    y: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    // At most 8192.
    let num_experts = slots.map_or(0, |slots| slots.runs.run_of.len() as u32);
    let mut builder = device.stream().launch_builder(function);
    builder
        .arg(down.slice())
        .arg(y.slice_mut())
        .arg(&args.elements)
        .arg(&args.top_k)
        .arg(&args.size_n);
    if let Some(slots) = slots {
        builder.arg(slots.topk_ids.slice()).arg(slots.runs.run_of.slice()).arg(&num_experts);
    }
    // SAFETY: the arguments are the entry point's, in its order and of its types. `Args` holds the number of
    // elements of y; down has top_k times as many, and there are top_k ids for each row of y (its maker
    // checked). Ids beyond run_of are not looked up. Each element has one thread.
    ended(sum::ROW.name, unsafe { builder.launch(one_thread_each(args.elements)) })
}
