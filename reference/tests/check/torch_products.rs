//! Products that torch and Triton computed on an H200: the verdict names the schedule, and damaged
//! copies fail.

use marlinspike::case::Case;
use marlinspike::check::{Declared, OutputReport, Verdict, check_case_as};
use marlinspike::num::scalar::{ScalarType, f64_to_bf16_rne, f64_to_f16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::products::Class;
use marlinspike_golden::{Manifest, Tier};

/// Products of FP8 codes, and the end of the schedule that gives every bit.
const FP8: [(&str, &str); 7] = [
    ("torch-fp8_row_fast", "wgmma of Hopper, k ascending"),
    ("torch-fp8_tensor_fast", "wgmma of Hopper, k ascending"),
    ("torch-fp8_row_promoted", "wgmma of Hopper, k ascending, promoted to f32 every 128 k"),
    ("torch-fp8_tensor_promoted", "wgmma of Hopper, k ascending, promoted to f32 every 128 k"),
    ("torch-fp8_tensor_split_k", "wgmma of Hopper, k ascending, in parts of 3584 k"),
    ("torch-fp8_triton_block_k_64", "wgmma of Hopper, k ascending, promoted to f32 every 64 k"),
    ("torch-fp8_triton_precise", "mma.sync of Hopper, k ascending"),
];

/// 16-bit products, and the most specific reading that explains them.
const LINEAR: [(&str, &str); 4] = [
    ("torch-linear_f32_bfloat16", "exact"),
    ("torch-linear_fused_bfloat16", "exact_rounded_weights"),
    ("torch-linear_separate_float16", "marlin"),
    ("torch-linear_late_bfloat16", "marlin"),
];

/// Hands the case `name` to `with`.
fn with_case(name: &str, with: impl FnOnce(&Case<'_>)) {
    let golden = Manifest::load().expect("the golden manifest");
    let entry = golden.cases().iter().find(|c| c.name == name).expect(name);
    assert_eq!((entry.producer.as_str(), entry.version.as_str()), ("torch", "2.11.0+cu130"));
    let bytes = std::fs::read(golden.path(&entry.path)).expect("a golden file");
    with(&Case::parse(&bytes).expect("a case"));
}

fn judged(case: &Case<'_>, class: Class) -> OutputReport {
    let declared = Declared { class, ..Declared::default() };
    let [y] =
        check_case_as(case, &declared).expect("a report").outputs.try_into().expect("one output");
    y
}

#[test]
fn the_schedule_of_every_fp8_product_is_found() {
    for (name, schedule) in FP8 {
        with_case(name, |case| {
            let y = judged(case, Class::any_order());
            assert_eq!((y.verdict, y.equal_bits), (Verdict::Pass, Some(1.0)), "{name}: {y:?}");
            let note = y.note.expect("how");
            assert!(note.starts_with("every bit as a known schedule gives it"), "{name}: {note}");
            assert!(note.ends_with(schedule), "{name}: {note}");
        });
    }
}

#[test]
fn the_reading_of_every_linear_product_is_found() {
    for (name, reading) in LINEAR {
        with_case(name, |case| {
            let y = judged(case, Class::any_order());
            assert_eq!(y.verdict, Verdict::Pass, "{name}: {y:?}");
            assert_eq!(y.conventions.first().map(String::as_str), Some(reading), "{name}");
        });
    }
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn damaged_products_fail() {
    // A plain `cargo test` takes every second product.
    for (name, _) in FP8.into_iter().chain(LINEAR).step_by(Tier::current().pick(2, 1, 1)) {
        with_case(name, |case| {
            // By default FP8 products may also come from a unit that keeps fewer bits, in any order: so wide
            // a bound leaves an output unchecked, or states that it admits 14 %. That of Hopper's unit fails.
            let fp8 = FP8.iter().any(|(fp8, _)| *fp8 == name);
            let class = if fp8 { Class::fp8_hopper() } else { Class::any_order() };
            assert_eq!(judged(case, class.clone()).verdict, Verdict::Pass, "{name}");
            for factor in [0.0, -1.0, 0.5, 1.05] {
                let found = case.output("y").expect("y");
                let (dtype, shape) = (found.dtype(), found.shape().to_vec());
                let scaled = |&bits: &u16| match dtype {
                    DType::F16 => f64_to_f16_rne(ScalarType::FLOAT16.to_f64(bits.into()) * factor),
                    _ => f64_to_bf16_rne(ScalarType::BFLOAT16.to_f64(bits.into()) * factor),
                };
                let bits: Vec<u16> = found.elements::<u16>().iter().map(scaled).collect();
                let mut wrong = case.clone();
                wrong
                    .add_output("y", Tensor::from_vec("y", dtype, shape, bits).expect("as before"));
                let verdict = judged(&wrong, class.clone()).verdict;
                assert_eq!(verdict, Verdict::Fail, "{name} times {factor}");
                if factor != 1.05 {
                    let verdict = judged(&wrong, Class::any_order()).verdict;
                    assert_ne!(verdict, Verdict::Pass, "{name} times {factor}");
                }
            }
        });
    }
}
