//! Wrong kernels: each compiles, and on a GPU a law rejects it.

use crate::common;

use std::thread;

use marlinspike_accel::{
    Device,
    nvrtc::Arch,
    operation::{Mutant, Row},
    registry::mutants,
};
use marlinspike_golden::Tier;
use marlinspike_kernels::{Source, source};
use marlinspike_proptests::{Failure, Operation, Subject, laws, ops};
use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::TestRunner,
};
use rayon::prelude::*;

use crate::many_rows::hopper_or_skip;
use crate::subject::Cuda;

/// A mutant that does not compile proves nothing. Needs NVRTC but no GPU. A plain `cargo test` compiles one of each
/// source.
#[test]
fn every_mutant_compiles() {
    let Some(nvrtc) = common::nvrtc_or_skip("every_mutant_compiles") else { return };
    let arch = Arch::of_device((9, 0));
    let mut tried: Vec<_> = mutants().collect();
    if Tier::current() == Tier::Plain {
        tried.dedup_by_key(|(row, _)| row.source);
    }
    tried.into_par_iter().for_each(|(row, mutant)| {
        let text = mutant.text(source(row.source).unwrap()).unwrap();
        let wrong = Source { name: row.source, text: text.leak() };
        // The last variant has every part of the source that only some have.
        let parameters = (row.variants)(arch).unwrap().pop().unwrap();
        nvrtc.compile(&wrong, arch, &parameters).unwrap_or_else(|e| panic!("{}: {e}", mutant.name));
    });
}

/// The law that rejects the mutant, the number of inputs tried before, and the failure. Inputs are
/// not shrunk, since each smaller one might need a module of its own.
fn rejected<O: Operation>(
    row: &'static Row,
    mutant: &'static Mutant,
) -> Option<(&'static str, usize, Failure)>
where
    Cuda: Subject<O>,
{
    let device = Device::open().unwrap().with_mutant(row, mutant).unwrap();
    let (cuda, mut runner) = (Cuda(device), TestRunner::deterministic());
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

type Rejected = fn(&'static Row, &'static Mutant) -> Option<(&'static str, usize, Failure)>;

/// The operations whose laws are tried on a mutant of each source.
fn operations(row: &Row) -> &'static [Rejected] {
    match row.source {
        "awq_marlin_repack" => &[rejected::<ops::AwqRepack>],
        "gptq_marlin_repack" => &[rejected::<ops::Repack>],
        "marlin_gemm" => &[rejected::<ops::DenseProduct>, rejected::<ops::ExpertProduct>],
        "marlin_gemm_a8" => &[rejected::<ops::DenseProduct>, rejected::<ops::ExpertProduct>],
        // No law of the kit has enough rows: many_rows.rs rejects them.
        "marlin_gemm_wgmma" | "moe_gather" => &[],
        // The kit has no operations of this schedule: w4a8.rs rejects them.
        "marlin_gemm_a8_wgmma" => &[],
        // The kit has no operations of W8A8-FP8: fp8_gemm.rs rejects them.
        "fp8_gemm" | "per_token_group_quant_fp8" => &[],
        // Several ranks have no law of the kit: kernels/peers.rs rejects them.
        "add_ranks" | "moe_sum_ranks" => &[],
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
    let Some(_gpu) = common::device_or_skip("every_mutant_is_rejected") else { return };
    let reject = |row: &'static Row, mutant: &'static Mutant| {
        let (name, source) = (mutant.name, row.source);
        let found = operations(row).iter().find_map(|rejected| rejected(row, mutant));
        let Some((law, after, failure)) = found else {
            panic!("{source}: {name} passed every law")
        };
        let how = failure.mismatch.map_or(failure.what, |mismatch| mismatch.to_string());
        common::say(&format!("MUTANT {source}, {name}: {law}, after {after} inputs: {how}"));
    };
    let tried: Vec<_> = mutants().filter(|(row, _)| !operations(row).is_empty()).collect();
    thread::scope(|scope| {
        let started: Vec<_> =
            tried.iter().map(|&(row, mutant)| scope.spawn(move || reject(row, mutant))).collect();
        started.into_iter().for_each(|thread| thread.join().unwrap());
    });
    common::say(&format!("LAW wrong kernels rejected: {0} of {0}", tried.len()));
}

/// The laws of layers whose rows are e4m3fn reject wrong kernels of their products. w4a8.rs and fp8_gemm try
/// every one, with sizes that these layers do not have.
#[test]
fn laws_of_e4m3_rows_reject_wrong_products() {
    let test = "laws_of_e4m3_rows_reject_wrong_products";
    let Some(_gpu) = hopper_or_skip(test) else { return };
    let laws: [(&str, Rejected); 2] = [
        ("marlin_gemm_a8_wgmma", rejected::<ops::W4a8Experts>),
        ("fp8_gemm", rejected::<ops::Fp8Experts>),
    ];
    for (source, rejected) in laws {
        let of_source = mutants().filter(|(row, _)| row.source == source);
        let found = of_source.filter_map(|(row, mutant)| {
            let (law, after, _) = rejected(row, mutant)?;
            common::say(&format!("MUTANT {source}, {}: {law}, after {after} inputs", mutant.name));
            Some(mutant.name)
        });
        assert!(found.count() > 0, "{source}: no mutant is rejected");
    }
}
