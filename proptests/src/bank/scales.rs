//! Bugs of one matrix's scales.

use marlinspike::Result;
use marlinspike::case::Case;
use marlinspike::check::add_outputs;
use marlinspike::num::tensor::Tensor;

use crate::bug::Bug;
use crate::bug::edit::{self, columns, grouped, misread, single};

pub(super) fn bugs() -> Vec<Bug> {
    [shards(), groups(), blocks()].concat()
}

fn shards() -> Vec<Bug> {
    vec![
        Bug::of_linear(
            2,
            "scale permutation chosen with packed K (K / pack) as K",
            "mistral.rs `gptq_cuda.rs`",
            "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,\
             tensor_parallel.size=null,group_size=32|64,size_k=128|256,size_n=64|192",
            &["scales-other-permutation"],
            |case| {
                edit::input::<u16>(case, "scales", |scales, shape| {
                    misread(scales, shape[1], single, grouped);
                })?;
                add_outputs(case)
            },
        ),
        Bug::of_linear(
            3,
            "scales sharded along K although act-order needs the full table",
            "S#36822, V#11528",
            "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=true,\
             tensor_parallel.style=row,group_size=32,size_k=128,size_n=64|192",
            &["scales-sharded"],
            sharded,
        ),
        Bug {
            outputs: &["marlin_scales"],
            ..Bug::of_linear(
                4,
                "grouped scales not sharded along K without act-order",
                "V#41511",
                "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,\
                 tensor_parallel.style=row,group_size=32|64,size_k=128|256,size_n=64|192",
                &["scales-not-sharded"],
                not_sharded,
            )
        },
    ]
}

fn groups() -> Vec<Bug> {
    vec![
        Bug::of_linear(
            5,
            "act-order `static` treated as `group`: wrong group size inferred",
            "V#41161",
            "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false,\
             tensor_parallel.size=null,group_size=32|64,size_k=256,size_n=64|128",
            &["wrong-group-size"],
            |case| {
                edit::input::<u16>(case, "scales", |scales, shape| {
                    let size_n = shape[1];
                    let old = scales.clone();
                    for (g, row) in scales.chunks_exact_mut(size_n).enumerate() {
                        row.copy_from_slice(&old[g / 2 * size_n..][..size_n]);
                    }
                })?;
                add_outputs(case)
            },
        ),
        Bug::of_linear(
            6,
            "group_size -1 used as a stride",
            "V#37329",
            "checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,group_size=-1,\
             tensor_parallel.style=row,tensor_parallel.rank=3,size_k=128,size_n=320",
            &["group-size-as-stride"],
            |case| {
                let c = edit::linear(case)?;
                let rank = c.quant.tensor_parallel.map_or(0, |tp| tp.rank);
                edit::input::<u16>(case, "scales", |scales, shape| {
                    columns(scales, shape[1], |n| (rank * c.size_k + n) % shape[1]);
                })?;
                add_outputs(case)
            },
        ),
    ]
}

/// The rank reads only its own slice of the groups, the index modulo its length.
fn sharded(case: &mut Case<'static>) -> Result<()> {
    let c = edit::linear(case)?;
    let Some(tp) = c.quant.tensor_parallel else { return add_outputs(case) };
    let groups = case.input("scales")?.shape()[0];
    let own = (groups / tp.size).max(1);
    let start = (tp.rank * own).min(groups - own);
    edit::input::<u32>(case, "g_idx", |g_idx, _| {
        g_idx.iter_mut().for_each(|g| *g = (start + *g as usize % own) as u32);
    })?;
    add_outputs(case)
}

/// The rank holds the groups of every rank. Those of other ranks are not part of its case; they get
/// other values than the rank's own.
fn not_sharded(case: &mut Case<'static>) -> Result<()> {
    let c = edit::linear(case)?;
    add_outputs(case)?;
    let Some(tp) = c.quant.tensor_parallel else { return Ok(()) };
    let scales = edit::found(case, "marlin_scales")?;
    let (own, shape) = (scales.elements::<u16>().into_owned(), scales.shape());
    let other = |rank: usize| own.iter().map(move |s| s ^ (0x15 + rank as u16));
    let all = (0..tp.size).flat_map(|rank| match rank == tp.rank {
        true => own.clone(),
        false => other(rank).collect(),
    });
    let shape = vec![shape[0] * tp.size, shape[1]];
    let tensor = Tensor::from_vec("", scales.dtype(), shape, all.collect::<Vec<u16>>())?;
    case.add_output("marlin_scales", tensor);
    Ok(())
}

fn blocks() -> Vec<Bug> {
    vec![Bug::of_linear(
        16,
        "padded e8m0 bytes reach the product",
        "TransformerEngine#3070",
        "checkpoint_format=mxfp8,dtype=bfloat16,tensor_parallel.size=null,size_k=128,\
             size_n=64|192",
        &["padded-scale-bytes"],
        |case| {
            edit::input::<u8>(case, "weight_scale", |scales, shape| {
                // Padding is a small part of the groups; a missing half of k is another bug.
                let groups = shape[1];
                let real = groups - groups / 4;
                scales.chunks_exact_mut(groups).for_each(|row| row[real..].fill(0));
            })?;
            add_outputs(case)
        },
    )]
}
