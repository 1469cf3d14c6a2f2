//! Launches of the parts of an expert layer around its products.

use cudarc::driver::{
    CudaFunction, LaunchConfig, PushKernelArg, sys::CUfunction_attribute_enum as Attribute,
};

use super::{
    ended,
    launch::{Activation, Argument, launch},
    optional,
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
    // reference's router: logits are rows of `experts` numbers, finite or -inf (whose scores are 0), a bias
    // has as many finite ones; top_k experts and topk_group groups can be chosen, so that no choice comes
    // out empty. Shared memory holds two
    // floats for each expert and one for each group.
    ended(router::ROW.name, unsafe { builder.launch(config) })?;
    Ok((device.download(&weights)?, device.download(&ids)?))
}

/// A grid in which a thread makes one of `pieces` pieces of each of `rows` rows: rows in its first dimension, of
/// blocks of whole warps along a row.
fn one_thread_each_piece(rows: u32, pieces: u32) -> LaunchConfig {
    let along = pieces.next_multiple_of(32).min(256);
    let across = 256 / along;
    LaunchConfig {
        grid_dim: (rows.div_ceil(across), pieces.div_ceil(along), 1),
        block_dim: (along, across, 1),
        shared_mem_bytes: 0,
    }
}

/// `function` is the entry point of `moe_align_block_size.cu`, with RANKS as `shape` says, which was made for so
/// many entries and runs.
pub(crate) fn align(
    device: &Device,
    function: &CudaFunction,
    shape: align::Shape,
    runs: &Runs,
    topk_ids: &Buffer<i32>,
    blocks: &mut DeviceBlocks,
) -> Result<(), AccelError> {
    // All are below 2^31: the entries with their padding are, and experts are at most 8192.
    let (numel, block_size) = (topk_ids.len() as u32, blocks.block_size() as u32);
    let (num_experts, num_runs) = (runs.run_of.len() as u32, runs.runs as u32);
    let bytes = shape.shared_bytes;
    if shape.ranks > 1 {
        let most = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        ended(align::ROW.name, function.set_attribute(most, bytes.cast_signed()))?;
    }
    let config = LaunchConfig {
        grid_dim: (shape.ranks, 1, 1),
        block_dim: (shape.warps * 32, 1, 1),
        shared_mem_bytes: bytes,
    };
    let arguments = vec![
        topk_ids.into(),
        (&runs.run_of).into(),
        (&blocks.sorted_token_ids).into(),
        (&blocks.expert_ids).into(),
        (&blocks.num_tokens_post_padded).into(),
        blocks.place_of().into(),
        numel.into(),
        num_experts.into(),
        num_runs.into(),
        block_size.into(),
        // Below 2^31, as room is made.
        (blocks.places() as u32).into(),
    ];
    // SAFETY: the arguments are the entry point's, in its order and of its types. run_of has a run below
    // num_runs for each expert, or -1, and ids beyond the experts are not looked up; `blocks` was made
    // as room for so many entries, whatever their ids (checked). Shared memory holds the counts that the
    // source demands (`Shape`). Each entry has a place of its own; padding is written before a barrier,
    // entries behind it, all after the kernel has waited.
    ended(align::ROW.name, unsafe { launch(device, function, config, arguments) })
}

/// `function` is the entry point of `moe_gather.cu`, with ACTIVATES where rows are activated; `from`,
/// `blocks` and `gathered` fit each other.
pub(crate) fn gather(
    device: &Device,
    function: &CudaFunction,
    args: gather::Args<'_>,
    from: &Buffer<u16>,
    blocks: &DeviceBlocks,
    gathered: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    let mut arguments = vec![
        from.into(),
        (&*gathered).into(),
        blocks.place_of().into(),
        args.entries.into(),
        args.size_k.into(),
    ];
    let pieces = args.size_k / 8;
    let config = match args.made {
        gather::Made::Copied { top_k, weights } => {
            arguments.push(Argument::Activation(Activation::default()));
            arguments.extend([Argument::from(weights.of_entries), (&*weights.of_places).into()]);
            arguments.push(top_k.into());
            // Four pieces to a thread, as evenly as whole warps allow.
            let blocks = pieces.div_ceil(4 * 256);
            LaunchConfig {
                grid_dim: (args.entries / top_k, blocks, 1),
                block_dim: (pieces.div_ceil(4 * blocks).next_multiple_of(32), 1, 1),
                shared_mem_bytes: 0,
            }
        }
        gather::Made::Activated(activation) => {
            arguments.push(Argument::Activation(activation));
            arguments.extend([Argument::Pointer(0), Argument::Pointer(0), Argument::U32(1)]);
            one_thread_each_piece(args.entries, pieces)
        }
    };
    // SAFETY: the arguments are the entry point's, in its order and of its types. There is a place below
    // those of `gathered`, or a negative number, for each entry: zero until the alignment kernel writes it;
    // `from` has entries / top_k rows of size_k, or as many as `gathered` of the activation's width
    // (checked). There is a router weight for each entry, and room for one of each place. A row has its own
    // threads, which write after they have waited. What they read of x
    // before, the last kernel does not write: `gather_on_device` says so to its callers.
    ended(gather::ROW.name, unsafe { launch(device, function, config, arguments) })
}

/// Launches an activation: `function` is the entry point of `moe_activation.cu` for `args.width`;
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
        args.rows.into(),
        args.size_i.into(),
        Argument::Activation(args.activation),
    ];
    let config = one_thread_each_piece(args.rows, args.size_i / args.width);
    // SAFETY: the arguments are the entry point's, in its order and of its types. `Args` holds the rows of both
    // buffers and their columns, of which WIDTH divides the number; its maker checked them. Each piece has
    // one thread, which waits first.
    ended(activation::ROW.name, unsafe { launch(device, function, config, arguments) })
}

/// Launches a sum: `function` is the entry point of `moe_sum.cu`, with SLOTS as `slots` says; `down` has
/// top_k rows of size_n for each of `y`, or one for each place, and there is an id or a place for each slot.
pub(crate) fn sum(
    device: &Device,
    function: &CudaFunction,
    args: &sum::Args,
    down: &Buffer<u16>,
    slots: Option<sum::Slots<'_>>,
    y: &mut Buffer<u16>,
) -> Result<(), AccelError> {
    let mut arguments = vec![down.into(), (&*y).into(), args.top_k.into(), args.size_n.into()];
    match slots {
        None => arguments.extend([Argument::Pointer(0), Argument::Pointer(0), Argument::U32(0)]),
        Some(sum::Slots::OfExperts { topk_ids, runs }) => {
            // At most 8192.
            let num_experts = runs.run_of.len() as u32;
            let ids = [topk_ids.into(), runs.expert_of.as_ref().into(), num_experts.into()];
            arguments.extend::<[Argument; 3]>(ids);
        }
        Some(sum::Slots::InBlocks(blocks)) => {
            let none = [Argument::Pointer(0), Argument::U32(0)];
            arguments.extend(std::iter::once(blocks.place_of().into()).chain(none));
        }
    }
    let config = LaunchConfig {
        grid_dim: (args.rows, (args.size_n / args.width).div_ceil(256), 1),
        block_dim: (256, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: the arguments are the entry point's, in its order and of its types. `Args` holds the rows of
    // y and their columns, of which WIDTH divides the number; down has top_k times as many, or a row for each
    // place, and there are top_k ids or places for each row of y (its maker checked). Ids beyond run_of are
    // not looked up, places are below those that there is room for or negative. Each element has one thread,
    // which waits first.
    ended(sum::ROW.name, unsafe { launch(device, function, config, arguments) })
}
