//! Cases of the operations beside Marlin: generated ones pass, and every known mistake is refused and
//! named.

use std::collections::{BTreeMap, BTreeSet};

use marlinspike::case::{Case, Op};
use marlinspike::check::{self, Verdict, check_case, mistaken};
use marlinspike::vectors::Generator;

/// A case by its number, through a file's bytes.
fn generated(generator: &Generator, index: u64) -> Vec<u8> {
    let case = generator.case(index).unwrap_or_else(|e| panic!("case {index}: {e}"));
    let bytes = case.to_bytes().unwrap();
    let read = Case::parse(&bytes).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    assert_eq!(read.to_bytes().unwrap(), bytes, "{}", case.name);
    assert_eq!((&read.config, &read.outputs), (&case.config, &case.outputs), "{}", case.name);
    bytes
}

/// Every output of `count` cases is right.
fn pass(op: Op, count: u64) {
    let generator = Generator::new(op, 11).unwrap();
    for index in 0..count {
        let bytes = generated(&generator, index);
        let case = Case::parse(&bytes).unwrap();
        let report = check_case(&case).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        assert_eq!(report.outputs.len(), case.outputs.len(), "{}", case.name);
        for output in &report.outputs {
            assert_eq!(output.verdict, Verdict::Pass, "{}: {output:#?}", case.name);
        }
    }
}

/// Of every mistake that shows in a case, the check says that something is wrong; over the cases each
/// mistake has its own name at least once, and there are `expected` of them.
fn mistakes(op: Op, count: u64, expected: usize) {
    let generator = Generator::new(op, 12).unwrap();
    let mut named: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for index in 0..count {
        let case = generator.case(index).unwrap();
        for id in check::mistakes(op) {
            let Some(wrong) = mistaken(&case, id).unwrap() else { continue };
            let report = check_case(&wrong).unwrap();
            let names = named.entry(id).or_default();
            let failed = report.outputs.iter().filter(|o| o.verdict == Verdict::Fail);
            let diagnoses = failed.filter_map(|o| o.diagnosis.as_ref());
            names.extend(diagnoses.map(|d| d.id.clone()));
            // Products without a schedule may hide a mistake in their bound; bits may not.
            let bounded = |n: &Option<String>| n.as_deref().is_some_and(|n| n.contains("bound: "));
            assert!(
                report.verdict == Verdict::Fail || report.outputs.iter().any(|o| bounded(&o.note)),
                "{op}: {id} passed in {}\n{report:#?}",
                case.name
            );
        }
    }
    for (id, names) in &named {
        assert!(names.contains(*id), "{op}: {id} is only ever called {names:?}");
    }
    let ids: BTreeSet<&str> = check::mistakes(op).into_iter().collect();
    assert_eq!(named.keys().copied().collect::<BTreeSet<_>>(), ids, "{op}");
    assert_eq!(ids.len(), expected, "{op}: {ids:?}");
}

macro_rules! operations {
    ($($pass:ident $wrong:ident $op:ident $cases:literal $tried:literal $mistakes:literal),+ $(,)?) => { $(
        #[test]
        #[cfg_attr(target_arch = "aarch64", ignore = "slow under qemu")]
        fn $pass() {
            pass(Op::$op, $cases);
        }

        #[test]
        #[cfg_attr(target_arch = "aarch64", ignore = "slow under qemu")]
        fn $wrong() {
            mistakes(Op::$op, $tried, $mistakes);
        }
    )+ };
}

operations! {
    swizzled_scales wrong_swizzled_scales SwizzleBlockscale 150 40 5,
    mxint4 wrong_mxint4 TrtllmMxInt4 2 2 9,
    nvfp4_experts wrong_nvfp4_experts Nvfp4Experts 32 16 14,
    requantized wrong_requantized Fp8Requantize 36 30 9,
    fnuz wrong_fnuz NormalizeFnuz 12 12 5,
    gpt_oss wrong_gpt_oss GptOssMxfp4 60 30 8,
    fp4_quantized wrong_fp4_quantized ScaledFp4Quant 60 30 5,
    fp4_products wrong_fp4_products ScaledFp4Mm 40 20 10,
    fp8_products wrong_fp8_products ScaledMm 40 20 7,
    fp8_layers wrong_fp8_layers Fp8Moe 12 10 9,
}
