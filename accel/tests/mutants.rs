//! Wrong kernels: each compiles, and on a GPU a law rejects it.

mod common;
mod subject;

use std::thread;

use marlinspike_accel::{Device, mutants::MUTANTS, mutants::Mutant, nvrtc::Arch, registry};
use marlinspike_proptests::{Failure, Operation, Subject, laws, ops};
use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::TestRunner,
};
use rayon::prelude::*;

use subject::Cuda;

/// A mutant that does not compile would prove nothing. Needs NVRTC but no GPU.
#[test]
fn every_mutant_compiles() {
    let Some(nvrtc) = common::nvrtc_or_skip("every_mutant_compiles") else { return };
    let arch = Arch::of_device((9, 0));
    MUTANTS.par_iter().for_each(|mutant| {
        let source = mutant.text().unwrap();
        let row = registry().iter().find(|row| row.source == source.name).unwrap();
        // The last variant has every part of the source that only some have.
        let parameters = (row.variants)(arch).unwrap().pop().unwrap();
        nvrtc.compile(source, arch, &parameters).unwrap_or_else(|e| panic!("{}: {e}", mutant.name));
    });
}

/// The law that rejects the mutant, after how many inputs, and how. Inputs are not shrunk: each of the
/// smaller ones might need a module of its own.
fn rejected<O: Operation>(mutant: &'static Mutant) -> Option<(&'static str, usize, Failure)>
where
    Cuda: Subject<O>,
{
    let (cuda, mut runner) =
        (Cuda(Device::open().unwrap().with_mutant(mutant)), TestRunner::deterministic());
    let drawn = (0..2000).map(|_| O::inputs().new_tree(&mut runner).unwrap().current());
    drawn.filter(|input| Subject::<O>::takes(&cuda, input)).take(200).enumerate().find_map(
        |(after, input)| {
            laws::<O>().iter().find_map(|law| {
                let failure = (law.check)(&cuda, &input).err()?;
                Some((law.name, after, failure))
            })
        },
    )
}

type Rejected = fn(&'static Mutant) -> Option<(&'static str, usize, Failure)>;

/// The operations whose laws are tried on a mutant of each source.
fn operations(mutant: &'static Mutant) -> &'static [Rejected] {
    match mutant.source {
        "awq_marlin_repack" => &[rejected::<ops::AwqRepack>],
        "gptq_marlin_repack" => &[rejected::<ops::Repack>],
        "marlin_gemm" => &[rejected::<ops::DenseProduct>, rejected::<ops::ExpertProduct>],
        "marlin_gemm_a8" => &[rejected::<ops::DenseProduct>],
        // No law of the kit has enough rows: tests/many_rows.rs rejects them.
        "marlin_gemm_wgmma" | "moe_gather" => &[],
        "marlin_int4_fp8_preprocess" => &[rejected::<ops::Preprocess>],
        "marlin_permute_scales" => &[rejected::<ops::PermuteScales>],
        "moe_activation" => &[rejected::<ops::Activate>],
        "moe_align_block_size" => &[rejected::<ops::AlignBlocks>],
        "moe_permute_cols" => &[rejected::<ops::MoeLayer>],
        "moe_sum" => &[rejected::<ops::SumSlots>],
        "per_token_quant_fp8" => &[rejected::<ops::PerTokenFp8>],
        "per_token_quant_int8" => &[rejected::<ops::PerTokenInt8>],
        "permute_cols" => &[rejected::<ops::DenseProduct>],
        "topk_router" => &[rejected::<ops::TopkRouter>],
        other => panic!("no law for {other}"),
    }
}

#[test]
fn every_mutant_is_rejected() {
    if common::device_or_skip("every_mutant_is_rejected").is_none() {
        return;
    }
    let reject = |mutant: &'static Mutant| {
        let Mutant { name, source, .. } = mutant;
        let found = operations(mutant).iter().find_map(|rejected| rejected(mutant));
        let Some((law, after, failure)) = found else {
            panic!("{source}: {name} passed every law")
        };
        let how = failure.mismatch.map_or(failure.what, |mismatch| mismatch.to_string());
        common::say(&format!("MUTANT {source}, {name}: {law}, after {after} inputs: {how}"));
    };
    let mutants = MUTANTS.iter().filter(|mutant| !operations(mutant).is_empty());
    thread::scope(|scope| {
        let started: Vec<_> =
            mutants.clone().map(|mutant| scope.spawn(move || reject(mutant))).collect();
        started.into_iter().for_each(|thread| thread.join().unwrap());
    });
    common::say(&format!("LAW wrong kernels rejected: {0} of {0}", mutants.count()));
}
