//! Every source compiles for every architecture that matters; needs NVRTC but no GPU.

mod common;

use marlinspike_accel::{
    AccelError,
    nvrtc::{Arch, Define},
};
use marlinspike_kernels::Source;

const ARCHS: [Arch; 4] = [
    Arch { compute_capability: (8, 0), specific: false },
    Arch { compute_capability: (8, 9), specific: false },
    Arch { compute_capability: (9, 0), specific: true },
    Arch { compute_capability: (10, 0), specific: true },
];

#[test]
fn repack_compiles_in_every_variant_for_every_architecture() {
    let test = "repack_compiles_in_every_variant_for_every_architecture";
    let Some(nvrtc) = common::nvrtc_or_skip(test) else { return };
    let source = marlinspike_kernels::source("gptq_marlin_repack").unwrap();
    for arch in ARCHS {
        for variant in 0..8 {
            let defines: [Define; 3] = [
                ("BITS", if variant & 1 == 0 { 4 } else { 8 }),
                ("HAS_PERM", variant >> 1 & 1),
                ("IS_A_8BIT", variant >> 2 & 1),
            ];
            let cubin = nvrtc.compile(source, arch, &defines).unwrap();
            assert_eq!(cubin[..4], *b"\x7fELF", "{arch} {defines:?}");
            let entry = source.name.as_bytes();
            assert!(cubin.windows(entry.len()).any(|window| window == entry), "{arch}");
        }
    }
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
