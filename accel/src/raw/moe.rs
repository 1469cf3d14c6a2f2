//! Launches of the parts of an expert layer around its products.

use cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};

use super::{
    ended,
    launch::{Argument, launch},
    one_thread_each, optional,
};
use crate::{
    device::Device,
    error::AccelError,
    memory::Buffer,
    ops::{
        activation,
        align::{self, DeviceBlocks, Runs},
        gather, router, sum,
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
    let arguments = vec![
        topk_ids.into(),
        (&runs.run_of).into(),
        (&runs.label_of).into(),
        (&blocks.sorted_token_ids).into(),
        (&blocks.expert_ids).into(),
        (&blocks.num_tokens_post_padded).into(),
        numel.into(),
        num_experts.into(),
        num_runs.into(),
        block_size.into(),
    ];
    // SAFETY: the arguments are the entry point's, in its order and of its types. run_of has an entry below
    // num_runs for each expert, or -1, and ids beyond the experts are not looked up; `blocks` was made
    // as room for so many entries, whatever their ids (checked). Every run has a block of its own,
    // which writes its part alone, after it has waited.
    ended(align::ROW.name, unsafe { launch(device, function, config, arguments) })
}

/// `function` is the entry point of `moe_gather.cu`, with ACTIVATES where rows are activated; `from`,
/// `blocks` and `gathered` fit each other.
pub(crate) fn gather(
    device: &Device,
    function: &CudaFunction,
    args: &gather::Args,
    from: &Buffer<u16>,
    blocks: &DeviceBlocks,
    gathered: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    let arguments = vec![
        from.into(),
        (&*gathered).into(),
        (&blocks.sorted_token_ids).into(),
        (&blocks.num_tokens_post_padded).into(),
        args.size_m.into(),
        args.size_k.into(),
        match args.made {
            gather::Made::Copied { top_k } => top_k.into(),
            gather::Made::Activated(activation) => Argument::Activation(activation),
        },
    ];
    // Several short rows to a block.
    let of_row = (args.size_k / 8).next_power_of_two().clamp(32, 256);
    let rows = 256 / of_row;
    let config = LaunchConfig {
        grid_dim: (args.places.div_ceil(rows), 1, 1),
        block_dim: (of_row, rows, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: the arguments are the entry point's, in its order and of its types. Entries of the blocks
    // are below size_m or padding, `from` has size_m / top_k rows of size_k, or size_m rows of the
    // activation's width, and `gathered` one for each place of all blocks (checked). A row has its own
    // threads, which wait first.
    ended(gather::ROW.name, unsafe { launch(device, function, config, arguments) })
}

/// Launches an activation: `function` is the entry point of `moe_activation.cu`;
/// `gate_up` has as many rows, of the width that its columns say, as `out` has of size_i.
pub(crate) fn activate(
    device: &Device,
    function: &CudaFunction,
    args: &activation::Args,
    gate_up: &Buffer<u16>,
    out: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    let arguments = vec![
        gate_up.into(),
        (&*out).into(),
        args.elements.into(),
        args.size_i.into(),
        Argument::Activation(args.activation),
    ];
    let config = one_thread_each(args.elements);
    // SAFETY: the arguments are the entry point's, in its order and of its types. `Args` holds the number of
    // elements of `out` and the width of gate_up, which its maker checked; each element has one thread,
    // which waits first.
    ended(activation::ROW.name, unsafe { launch(device, function, config, arguments) })
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
    let mut arguments = vec![down.into(), (&*y).into(), args.top_k.into(), args.size_n.into()];
    if let Some(slots) = slots {
        let of_slots: [Argument; 3] =
            [slots.topk_ids.into(), slots.runs.expert_of.as_ref().into(), num_experts.into()];
        arguments.extend(of_slots);
    }
    let config = LaunchConfig {
        grid_dim: (args.rows, (args.size_n / args.width).div_ceil(256), 1),
        block_dim: (256, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: the arguments are the entry point's, in its order and of its types. `Args` holds the rows of
    // y and their columns, of which WIDTH divides the number; down has top_k times as many, and there are top_k ids for each row of y (its maker
    // checked). Ids beyond run_of are not looked up. Each element has one thread, which waits
    // first.
    ended(sum::ROW.name, unsafe { launch(device, function, config, arguments) })
}
