//! The operations beside Marlin in the kit: the reference obeys, every known mistake falls.

use marlinspike_proptests::mutants::{Mutant, large_methods, methods};
use marlinspike_proptests::{Config, Operation, Reference, ops, run};

fn reference<O: Operation>(cases: u32) {
    let report = run::<O, _>(&Reference, &Config { cases, seed: 0x5eed, regressions: None });
    assert!(report.passed() && report.laws.len() == 4, "{report}");
    assert!(report.laws.iter().all(|law| law.passed == cases), "{report}");
}

macro_rules! references {
    ($($name:ident $op:ident $cases:literal),+ $(,)?) => { $(
        #[test]
        #[cfg_attr(target_arch = "aarch64", ignore = "slow under qemu")]
        fn $name() {
            reference::<ops::$op>($cases);
        }
    )+ };
}

references! {
    swizzle SwizzleBlockscale 200, nvfp4_experts Nvfp4Experts 20, requantize Fp8Requantize 100,
    fnuz NormalizeFnuz 100, gpt_oss GptOssMxfp4 40, fp4_quant ScaledFp4Quant 100,
    fp4_mm ScaledFp4Mm 40, scaled_mm ScaledMm 40, mxint4 TrtllmMxInt4 2, fp8_moe Fp8Moe 6,
}

fn rejected(mutants: Vec<Mutant>, least: usize, cases: u32) {
    assert!(mutants.len() >= least, "{}", mutants.len());
    for mutant in &mutants {
        let report = (mutant.run)(&Config { cases, seed: 1, regressions: None });
        let what = format!("{}: {}", mutant.operation, mutant.name);
        let Some(failure) = report.failure() else { panic!("{what} passed\n{report}") };
        let mismatch = failure.mismatch.as_ref().unwrap_or_else(|| panic!("{what}\n{report}"));
        assert!(mismatch.count > 0 && mismatch.expected != mismatch.found, "{what}\n{report}");
        assert!(!mismatch.place.is_empty() && !failure.input.is_empty(), "{what}\n{report}");
    }
    println!("{} mutants rejected", mutants.len());
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "slow under qemu")]
fn every_mutant_is_rejected() {
    rejected(methods(), 90, 60);
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "slow under qemu")]
fn every_mutant_of_large_operations_is_rejected() {
    rejected(large_methods(), 25, 24);
}
