//! Every operation's source compiles for every supported architecture; needs NVRTC but no GPU.

use crate::common;

use std::collections::BTreeSet;

use marlinspike_accel::{
    AccelError,
    nvrtc::{Arch, Parameter},
    registry,
    warm::jobs,
};
use marlinspike_golden::Tier;
use marlinspike_kernels::Source;
use rayon::prelude::*;

/// An architecture, and whether its tilings are its own: neighbours share them. Only for those with their own do the
/// nightly tests compile every pair of values of any two parameters. A plain `cargo test` compiles for Hopper alone.
const ARCHS: [(Arch, bool); 4] = [
    (Arch { compute_capability: (8, 0), specific: false }, true),
    (Arch { compute_capability: (8, 9), specific: false }, false),
    (Arch { compute_capability: (9, 0), specific: true }, true),
    (Arch { compute_capability: (10, 0), specific: true }, false),
];

/// A subset of `variants` that covers every value of each parameter; with `pairs`, every pair of
/// values of any two parameters.
fn covering(variants: &[Vec<Parameter>], pairs: bool) -> Vec<&Vec<Parameter>> {
    let parts = |variant: &Vec<Parameter>| -> BTreeSet<(Parameter, Parameter)> {
        let all = variant.iter().enumerate();
        let others = |i: usize| if pairs { &variant[i..] } else { &variant[i..=i] };
        all.flat_map(|(i, &a)| others(i).iter().map(move |&b| (a, b))).collect()
    };
    let of: Vec<_> = variants.iter().map(parts).collect();
    let mut left: BTreeSet<_> = of.iter().flatten().copied().collect();
    let mut chosen = Vec::new();
    while !left.is_empty() {
        let gain = |i: &usize| of[*i].intersection(&left).count();
        let best = (0..variants.len()).max_by_key(gain).unwrap();
        left.retain(|part| !of[best].contains(part));
        chosen.push(&variants[best]);
    }
    // A source without parameters has one variant and no part.
    if chosen.is_empty() { variants.iter().collect() } else { chosen }
}

#[test]
fn covering_variants_have_every_value_or_every_pair() {
    let values = [0, 1, 2];
    let all: Vec<Vec<Parameter>> = (0..27)
        .map(|i| vec![("A", values[i % 3]), ("B", values[i / 3 % 3]), ("C", values[i / 9])])
        .collect();
    let (single, chosen) = (covering(&all, false), covering(&all, true));
    assert_eq!(single.len(), 3);
    assert!((9..20).contains(&chosen.len()), "{}", chosen.len());
    for (first, second) in [(0, 1), (0, 2), (1, 2)] {
        let pairs: BTreeSet<_> = chosen.iter().map(|v| (v[first].1, v[second].1)).collect();
        assert_eq!(pairs.len(), 9);
    }
}

#[test]
fn every_source_compiles_for_every_architecture() {
    let test = "every_source_compiles_for_every_architecture";
    let Some(nvrtc) = common::nvrtc_or_skip(test) else { return };
    let mut modules: Vec<(Arch, &Source, Vec<Parameter>)> = Vec::new();
    let tier = Tier::current();
    for (arch, distinct) in ARCHS {
        let pairs = distinct && tier == Tier::Nightly;
        if arch.compute_capability != (9, 0) && tier == Tier::Plain {
            continue;
        }
        for source in marlinspike_kernels::SOURCES.iter() {
            // Of all operations that share the source.
            let variants: Vec<Vec<Parameter>> = jobs(registry(), &[arch])
                .unwrap()
                .into_iter()
                .filter(|job| job.row.source == source.name)
                .map(|job| job.parameters)
                .collect();
            // Instructions of a single architecture.
            let only = ["marlin_gemm_wgmma", "marlin_gemm_a8_wgmma", "fp8_gemm"]
                .contains(&source.name)
                && arch.compute_capability != (9, 0);
            assert_eq!(variants.is_empty(), only, "{} for {arch}", source.name);
            if variants.is_empty() {
                continue;
            }
            let chosen = covering(&variants, pairs).into_iter().cloned();
            modules.extend(chosen.map(|parameters| (arch, source, parameters)));
        }
    }
    // A plain `cargo test` compiles every fifth.
    let modules: Vec<_> = modules.into_iter().step_by(tier.pick(5, 1, 1)).collect();
    println!("{} modules", modules.len());
    assert!(modules.len() > tier.pick(6, 80, 150), "{} modules", modules.len());
    modules.par_iter().for_each(|(arch, source, parameters)| {
        let cubin = nvrtc.compile(source, *arch, parameters).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(cubin[..4], *b"\x7fELF", "{} {arch} {parameters:?}", source.name);
        let row = registry().iter().find(|row| row.source == source.name).unwrap();
        assert_eq!(common::cubin::argument_sizes(&cubin), row.arguments, "{}", source.name);
        let entry = source.name.as_bytes();
        assert!(cubin.windows(entry.len()).any(|window| window == entry), "{arch}");
    });
}

#[test]
fn a_refused_source_comes_back_with_the_compilers_log() {
    let test = "a_refused_source_comes_back_with_the_compilers_log";
    let Some(nvrtc) = common::nvrtc_or_skip(test) else { return };
    let source = marlinspike_kernels::source("gptq_marlin_repack").unwrap();
    match nvrtc.compile(source, ARCHS[0].0, &[("BITS", 3), ("HAS_PERM", 0), ("IS_A_8BIT", 0)]) {
        Err(AccelError::Compile { source_name, arch, reason, log }) => {
            assert_eq!((source_name.as_str(), arch.as_str()), ("gptq_marlin_repack", "sm_80"));
            assert_eq!(reason, "NVRTC_ERROR_COMPILATION");
            assert!(log.contains("BITS must be 4 or 8"), "{log}");
        }
        other => panic!("expected Compile, found {other:?}"),
    }
    let text = Source { name: "nul", text: "\0" };
    let error = nvrtc.compile(&text, ARCHS[0].0, &[]).unwrap_err();
    assert!(matches!(error, AccelError::Compile { .. }), "{error:?}");
}
