//! Every operation's source compiles for every architecture that matters; needs NVRTC but no GPU.

mod common;

use std::collections::BTreeSet;

use marlinspike_accel::{
    AccelError,
    nvrtc::{Arch, Define},
    registry,
};
use marlinspike_kernels::Source;
use rayon::prelude::*;

const ARCHS: [Arch; 4] = [
    Arch { compute_capability: (8, 0), specific: false },
    Arch { compute_capability: (8, 9), specific: false },
    Arch { compute_capability: (9, 0), specific: true },
    Arch { compute_capability: (10, 0), specific: true },
];

/// Variants in which every pair of values that any variant has, of any two macros, occurs.
fn pairwise(variants: &[Vec<Define>]) -> Vec<&Vec<Define>> {
    let pairs = |variant: &Vec<Define>| -> BTreeSet<(Define, Define)> {
        let all = variant.iter().enumerate();
        all.flat_map(|(i, &a)| variant[i..].iter().map(move |&b| (a, b))).collect()
    };
    let of: Vec<_> = variants.iter().map(pairs).collect();
    let mut left: BTreeSet<_> = of.iter().flatten().copied().collect();
    let mut chosen = Vec::new();
    while !left.is_empty() {
        let gain = |i: &usize| of[*i].intersection(&left).count();
        let best = (0..variants.len()).max_by_key(gain).unwrap();
        left.retain(|pair| !of[best].contains(pair));
        chosen.push(&variants[best]);
    }
    // A source without macros has one variant and no pair.
    if chosen.is_empty() { variants.iter().collect() } else { chosen }
}

#[test]
fn pairwise_variants_cover_every_pair() {
    let values = [0, 1, 2];
    let all: Vec<Vec<Define>> = (0..27)
        .map(|i| vec![("A", values[i % 3]), ("B", values[i / 3 % 3]), ("C", values[i / 9])])
        .collect();
    let chosen = pairwise(&all);
    assert!((9..20).contains(&chosen.len()), "{}", chosen.len());
    for (first, second) in [(0, 1), (0, 2), (1, 2)] {
        let pairs: BTreeSet<_> = chosen.iter().map(|v| (v[first].1, v[second].1)).collect();
        assert_eq!(pairs.len(), 9);
    }
}

#[test]
fn every_operation_compiles_for_every_architecture() {
    let test = "every_operation_compiles_for_every_architecture";
    let Some(nvrtc) = common::nvrtc_or_skip(test) else { return };
    let jobs: Vec<(Arch, &Source, Vec<Define>)> = ARCHS
        .into_iter()
        .flat_map(|arch| registry().iter().map(move |row| (arch, row)))
        .filter(|(arch, row)| arch.compute_capability >= row.needs.compute_capability)
        .flat_map(|(arch, row)| {
            let source = marlinspike_kernels::source(row.source).unwrap();
            let variants = (row.variants)(arch);
            let chosen: Vec<_> = pairwise(&variants).into_iter().cloned().collect();
            chosen.into_iter().map(move |defines| (arch, source, defines))
        })
        .collect();
    assert!(jobs.len() > 200, "{} modules", jobs.len());
    jobs.par_iter().for_each(|(arch, source, defines)| {
        let cubin = nvrtc.compile(source, *arch, defines).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(cubin[..4], *b"\x7fELF", "{} {arch} {defines:?}", source.name);
        let entry = source.name.as_bytes();
        assert!(cubin.windows(entry.len()).any(|window| window == entry), "{arch}");
    });
}

#[test]
fn a_refused_source_comes_back_with_the_compilers_log() {
    let test = "a_refused_source_comes_back_with_the_compilers_log";
    let Some(nvrtc) = common::nvrtc_or_skip(test) else { return };
    let source = marlinspike_kernels::source("gptq_marlin_repack").unwrap();
    match nvrtc.compile(source, ARCHS[0], &[("BITS", 3), ("HAS_PERM", 0), ("IS_A_8BIT", 0)]) {
        Err(AccelError::Compile { source_name, arch, reason, log }) => {
            assert_eq!((source_name.as_str(), arch.as_str()), ("gptq_marlin_repack", "sm_80"));
            assert_eq!(reason, "NVRTC_ERROR_COMPILATION");
            assert!(log.contains("BITS must be 4 or 8"), "{log}");
        }
        other => panic!("expected Compile, found {other:?}"),
    }
    let text = Source { name: "nul", text: "\0" };
    let error = nvrtc.compile(&text, ARCHS[0], &[]).unwrap_err();
    assert!(matches!(error, AccelError::Compile { .. }), "{error:?}");
}
