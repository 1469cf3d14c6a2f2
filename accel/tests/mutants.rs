//! Wrong kernels: each compiles, and on a GPU a law rejects it.

mod common;
mod subject;

use marlinspike_accel::{Device, mutants::MUTANTS, mutants::Mutant, nvrtc::Arch, registry};
use marlinspike_proptests::{Config, Operation, Report, Subject, ops, run};
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
        let defines = (row.variants)(arch).pop().unwrap();
        nvrtc.compile(source, arch, &defines).unwrap_or_else(|e| panic!("{}: {e}", mutant.name));
    });
}

fn tried<O: Operation>(mutant: &'static Mutant) -> Report
where
    Cuda: Subject<O>,
{
    let cuda = Cuda(Device::open().unwrap().with_mutant(mutant));
    run::<O, _>(&cuda, &Config { cases: 200, seed: 0x6d75, regressions: None })
}

/// The operations whose laws are tried on a mutant of each source.
fn reports(mutant: &'static Mutant) -> Vec<fn(&'static Mutant) -> Report> {
    match mutant.source {
        "awq_marlin_repack" => vec![tried::<ops::AwqRepack>],
        "gptq_marlin_repack" => vec![tried::<ops::Repack>],
        "marlin_gemm" => vec![tried::<ops::DenseProduct>, tried::<ops::ExpertProduct>],
        "marlin_int4_fp8_preprocess" => vec![tried::<ops::Preprocess>],
        "marlin_permute_scales" => vec![tried::<ops::PermuteScales>],
        "moe_activation" => vec![tried::<ops::Activate>],
        "moe_align_block_size" => vec![tried::<ops::AlignBlocks>],
        "moe_sum" => vec![tried::<ops::SumSlots>],
        "per_token_quant_fp8" => vec![tried::<ops::PerTokenFp8>],
        "per_token_quant_int8" => vec![tried::<ops::PerTokenInt8>],
        "permute_cols" => vec![tried::<ops::DenseProduct>],
        "topk_router" => vec![tried::<ops::TopkRouter>],
        other => panic!("no law for {other}"),
    }
}

#[test]
fn every_mutant_is_rejected() {
    if common::device_or_skip("every_mutant_is_rejected").is_none() {
        return;
    }
    let rejected = |mutant: &'static Mutant| {
        let failure = reports(mutant).iter().find_map(|tried| {
            let report = tried(mutant);
            let law = report.laws.iter().find(|law| law.failure.is_some())?;
            Some((law.law, law.passed, law.failure.clone()?))
        });
        let Some((law, after, failure)) = failure else {
            panic!("{}: {} passed every law", mutant.source, mutant.name)
        };
        let mismatch = failure.mismatch.map_or(failure.what, |m| m.to_string());
        let (source, name) = (mutant.source, mutant.name);
        common::say(&format!("MUTANT {source}, {name}: {law}, after {after} inputs: {mismatch}"));
    };
    MUTANTS.par_iter().for_each(rejected);
    common::say(&format!("LAW mutants rejected: {0} of {0}", MUTANTS.len()));
}
