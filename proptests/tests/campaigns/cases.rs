//! Properties of operations on whole cases: the reference passes, every mutant is rejected.

use marlinspike_golden::Tier;
use marlinspike_proptests::mutants;
use marlinspike_proptests::{Config, Operation, Reference, ops, run};

fn reference<O: Operation>(cases: u32) {
    let report = run::<O, _>(&Reference, &Config { cases, seed: 0x5eed, regressions: None });
    assert!(report.passed() && report.laws.len() == 4, "{report}");
    assert!(report.laws.iter().all(|law| law.passed == cases), "{report}");
}

/// Every mutant of an operation is rejected, and the report states the place.
fn rejected<O: Operation>(cases: u32, expected: usize) {
    let mutants: Vec<_> = mutants::cases().into_iter().filter(|m| m.operation == O::NAME).collect();
    assert_eq!(mutants.len(), expected, "{}", O::NAME);
    // A plain `cargo test` takes every fifth.
    for mutant in mutants.iter().step_by(Tier::current().pick(5, 1, 1)) {
        let report = (mutant.run)(&Config { cases, seed: 1, regressions: None });
        let what = format!("{}: {}", mutant.operation, mutant.name);
        let Some(failure) = report.failure() else { panic!("{what} passed\n{report}") };
        let mismatch = failure.mismatch.as_ref().unwrap_or_else(|| panic!("{what}\n{report}"));
        assert!(mismatch.count > 0 && mismatch.expected != mismatch.found, "{what}\n{report}");
        assert!(!mismatch.place.is_empty() && !failure.input.is_empty(), "{what}\n{report}");
    }
}

macro_rules! operations {
    ($($right:ident $wrong:ident $op:ident $cases:literal $tried:literal $mutants:literal),+ $(,)?) => { $(
        #[test]
        #[cfg_attr(target_arch = "aarch64", ignore = "slow under qemu")]
        fn $right() {
            reference::<ops::$op>($cases);
        }

        #[test]
        #[cfg_attr(target_arch = "aarch64", ignore = "slow under qemu")]
        fn $wrong() {
            rejected::<ops::$op>($tried, $mutants);
        }
    )+ };
}

operations! {
    swizzle wrong_swizzle SwizzleBlockscale 100 10 10,
    mxint4 wrong_mxint4 TrtllmMxInt4 2 4 14,
    nvfp4_experts wrong_nvfp4_experts Fp4Experts 10 24 19,
    requantize wrong_requantize Fp8Requantize 50 12 15,
    fnuz wrong_fnuz NormalizeFnuz 50 8 10,
    gpt_oss wrong_gpt_oss LoadWeightsMxfp4 20 8 13,
    fp4_quant wrong_fp4_quant ScaledFp4Quant 50 6 10,
    fp4_mm wrong_fp4_mm ScaledFp4Mm 20 6 19,
    scaled_mm wrong_scaled_mm ScaledMm 20 60 20,
    scaled_mm_azp wrong_scaled_mm_azp Int8Mm 40 60 22,
    static_int8 wrong_static_int8 StaticInt8Quant 40 60 12,
    dynamic_int8 wrong_dynamic_int8 DynamicInt8Quant 40 60 13,
    w4a8_mm wrong_w4a8_mm W4a8Mm 20 20 21,
    fp8_moe wrong_fp8_moe Fp8Moe 4 60 20,
    int8_moe wrong_int8_moe Int8Moe 4 40 16,
    mxfp4_int8 wrong_mxfp4_int8 E2m1Int8Linear 20 20 18,
    mxfp4_int8_moe wrong_mxfp4_int8_moe E2m1Int8Moe 8 16 15,
}
