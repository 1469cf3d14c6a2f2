//! Launches of the parts of an expert layer around its products.

use cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};

use super::{ended, one_thread_each, optional};
use crate::{
    device::Device,
    error::AccelError,
    ops::{activation, align, router, sum},
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
    args: &align::Args<'_>,
) -> Result<(Vec<i32>, Vec<i32>, i32), AccelError> {
    let topk_ids = device.upload(args.topk_ids)?;
    let (run_of, label_of) = (device.upload(&args.run_of)?, device.upload(&args.label_of)?);
    let mut sorted = device.zeroed::<i32>(args.most_entries)?;
    let mut experts = device.zeroed::<i32>(args.most_entries / args.block_size as usize)?;
    let mut total = device.zeroed::<i32>(1)?;
    // All three are below 2^31: the entries' sum is, and experts are at most 8192.
    let numel = args.topk_ids.len() as u32;
    let (num_experts, num_runs) = (args.run_of.len() as u32, args.label_of.len() as u32);
    let config = LaunchConfig {
        grid_dim: (num_runs, 1, 1),
        block_dim: (1024, 1, 1),
        shared_mem_bytes: num_runs * 4,
    };
    let mut builder = device.stream().launch_builder(function);
    builder
        .arg(topk_ids.slice())
        .arg(run_of.slice())
        .arg(label_of.slice())
        .arg(sorted.slice_mut())
        .arg(experts.slice_mut())
        .arg(total.slice_mut())
        .arg(&numel)
        .arg(&num_experts)
        .arg(&num_runs)
        .arg(&args.block_size);
    // SAFETY: the arguments are the entry point's, in its order and of its types. run_of has an entry below
    // num_runs for each expert, or -1, and ids beyond the experts are not looked up; the padded runs
    // together have at most most_entries entries, which is derived from the number of tokens and runs.
    // Every run has a block of its own, which writes its part alone.
    ended(align::ROW.name, unsafe { builder.launch(config) })?;
    let total = device.download(&total)?.first().copied().unwrap_or(0);
    Ok((device.download(&sorted)?, device.download(&experts)?, total))
}

/// `function` is the entry point of `moe_activation.cu`.
pub(crate) fn activation(
    device: &Device,
    function: &CudaFunction,
    args: &activation::Args<'_>,
) -> Result<Vec<u16>, AccelError> {
    let gate_up = device.upload(args.gate_up)?;
    let mut out = device.zeroed::<u16>(args.elements as usize)?;
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
    // SAFETY: the arguments are the entry point's, in its order and of its types. gate_up has as many rows,
    // of the width that COLUMNS says, as out has of size_i (checked); each element has one thread.
    ended(activation::ROW.name, unsafe { builder.launch(one_thread_each(args.elements)) })?;
    device.download(&out)
}

/// `function` is the entry point of `moe_sum.cu`.
pub(crate) fn sum(
    device: &Device,
    function: &CudaFunction,
    args: &sum::Args<'_>,
) -> Result<Vec<u16>, AccelError> {
    let down = device.upload(args.down)?;
    let mut y = device.zeroed::<u16>(args.elements as usize)?;
    let mut builder = device.stream().launch_builder(function);
    builder
        .arg(down.slice())
        .arg(y.slice_mut())
        .arg(&args.elements)
        .arg(&args.top_k)
        .arg(&args.size_n);
    // SAFETY: the arguments are the entry point's, in its order and of its types. down has top_k rows of
    // size_n for each of y (checked); each element has one thread.
    ended(sum::ROW.name, unsafe { builder.launch(one_thread_each(args.elements)) })?;
    device.download(&y)
}
