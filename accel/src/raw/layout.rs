//! Launches that move elements: one thread for each element of the result.

use cudarc::driver::{CudaFunction, PushKernelArg};

use super::{ended, one_thread_each, optional};
use crate::{
    device::Device,
    error::AccelError,
    ops::{awq, permute, repack, scales},
};

/// `function` is the entry point of `gptq_marlin_repack.cu`, compiled with the macros of `args`.
pub(crate) fn gptq(
    device: &Device,
    function: &CudaFunction,
    args: &repack::RepackArgs<'_>,
) -> Result<Vec<u32>, AccelError> {
    let qweight = device.upload(args.qweight())?;
    let perm = args.perm().map(|perm| device.upload(perm)).transpose()?;
    let mut out = device.zeroed::<u32>(args.qweight().len())?;
    let (size_k, size_n) = (args.size_k(), args.size_n());
    let mut config = one_thread_each(args.words().into());
    config.grid_dim.1 = args.experts();
    let mut builder = device.stream().launch_builder(function);
    builder.arg(qweight.slice());
    optional(&mut builder, perm.as_ref());
    builder.arg(out.slice_mut()).arg(&size_k).arg(&size_n);
    // SAFETY: the five arguments are the entry point's, in its order and of its types. `RepackArgs`
    // holds only checked values: for each expert, `qweight` has size_k / PACK * size_n words and so has
    // `out`; `perm`, read only with HAS_PERM, has size_k entries below size_k; the sizes are multiples
    // of the tile. So every index is inside its buffer. Each word of `out` is written by one thread.
    ended(repack::ROW.name, unsafe { builder.launch(config) })?;
    device.download(&out)
}

/// `function` is the entry point of `awq_marlin_repack.cu`.
pub(crate) fn awq(
    device: &Device,
    function: &CudaFunction,
    args: &awq::Args<'_>,
) -> Result<Vec<u32>, AccelError> {
    let qweight = device.upload(args.qweight)?;
    let mut out = device.zeroed::<u32>(args.qweight.len())?;
    let mut builder = device.stream().launch_builder(function);
    builder.arg(qweight.slice()).arg(out.slice_mut()).arg(&args.size_k).arg(&args.size_n);
    // SAFETY: the arguments are the entry point's, in its order and of its types. `Args` holds only
    // checked values: `qweight` has size_k * size_n / PACK words and so has `out`, sizes are
    // multiples of the tile, so that every index is inside. Each word is written by one thread.
    ended(awq::ROW.name, unsafe { builder.launch(one_thread_each(args.words)) })?;
    device.download(&out)
}

/// `function` is the entry point of `marlin_permute_scales.cu`.
pub(crate) fn permute_scales(
    device: &Device,
    function: &CudaFunction,
    args: &scales::Permute<'_>,
) -> Result<Vec<u16>, AccelError> {
    let from = device.upload(args.scales)?;
    let mut out = device.zeroed::<u16>(args.scales.len())?;
    let mut builder = device.stream().launch_builder(function);
    builder.arg(from.slice()).arg(out.slice_mut()).arg(&args.elements);
    // SAFETY: the arguments are the entry point's. Both buffers have `elements` elements, which are
    // whole runs of 64 (checked), so that no index leaves its run; each element has one thread.
    ended(scales::PERMUTE.name, unsafe { builder.launch(one_thread_each(args.elements)) })?;
    device.download(&out)
}

/// `function` is the entry point of `marlin_int4_fp8_preprocess.cu`, with HAS_ZERO where `qzeros` is.
pub(crate) fn int4_fp8(
    device: &Device,
    function: &CudaFunction,
    args: &scales::Int4Fp8<'_>,
) -> Result<Vec<u32>, AccelError> {
    let qweight = device.upload(args.qweight)?;
    let qzeros = args.qzeros.map(|zeros| device.upload(zeros)).transpose()?;
    let mut out = device.zeroed::<u32>(args.qweight.len())?;
    let mut builder = device.stream().launch_builder(function);
    builder.arg(qweight.slice());
    optional(&mut builder, qzeros.as_ref());
    builder.arg(out.slice_mut()).arg(&args.elements).arg(&args.words).arg(&args.group_rows);
    // SAFETY: the arguments are the entry point's. `qweight` and `out` have `elements` words in rows of
    // `words`; `qzeros`, read only with HAS_ZERO, has a row for each group_rows of them (checked).
    ended(scales::INT4_FP8.name, unsafe { builder.launch(one_thread_each(args.elements)) })?;
    device.download(&out)
}

/// `function` is the entry point of `permute_cols.cu`.
pub(crate) fn permute_cols(
    device: &Device,
    function: &CudaFunction,
    args: &permute::Args<'_>,
) -> Result<Vec<u16>, AccelError> {
    let (x, perm) = (device.upload(args.x)?, device.upload(args.perm)?);
    let mut out = device.zeroed::<u16>(args.x.len())?;
    let mut builder = device.stream().launch_builder(function);
    builder
        .arg(x.slice())
        .arg(perm.slice())
        .arg(out.slice_mut())
        .arg(&args.elements)
        .arg(&args.size_k);
    // SAFETY: the arguments are the entry point's. x and out have `elements` elements in rows of size_k,
    // perm has size_k entries below size_k (checked), so that no index leaves its row.
    ended(permute::ROW.name, unsafe { builder.launch(one_thread_each(args.elements)) })?;
    device.download(&out)
}

/// `function` is the entry point of `moe_permute_cols.cu`.
pub(crate) fn permute_experts(
    device: &Device,
    function: &CudaFunction,
    args: permute::ExpertArgs<'_>,
) -> Result<(), AccelError> {
    let mut builder = device.stream().launch_builder(function);
    builder.arg(args.x.slice()).arg(args.perm.slice()).arg(args.topk_ids.slice());
    optional(&mut builder, args.runs.expert_of.as_ref());
    builder
        .arg(args.out.slice_mut())
        .arg(&args.pairs)
        .arg(&args.num_experts)
        .arg(&args.size_k)
        .arg(&args.top_k);
    // SAFETY: the arguments are the entry point's, in its order and of its types, and all of this device.
    // `ExpertArgs` holds only checked values: `out` is pairs of a row of size_k (even) for each of the
    // topk_ids, x a row for each top_k of them, perm a row of entries below size_k (`MarlinWeight`) for
    // each expert that `expert_of` names, or without it for each of num_experts. Every element of `out` is written by one thread.
    ended(permute::EXPERTS.name, unsafe { builder.launch(one_thread_each(args.pairs)) })
}
