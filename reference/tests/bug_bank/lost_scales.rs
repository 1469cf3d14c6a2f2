//! Block scales that a kernel reads as zero: e8m0 code 0, and e4m3 scales that Marlin's format cannot
//! hold. Found in vLLM's kernels (docs/src/results/findings.md).

use marlinspike::case::Case;
use marlinspike::check::{OutputReport, Strength, Verdict};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use serde_json::json;

use crate::product_model::{Model, judged, put};
use crate::tools::{case, generated};

const E8M0: &str = "e8m0-code-0-as-zero";
const E4M3: &str = "block-scales-flushed";

/// The case with the scale code `code(group, n)` for each block and activations around 1.
fn with_scales(mut case: Case<'static>, code: impl Fn(usize, usize) -> u8) -> Case<'static> {
    let scales = case.input("weight_scale").expect("scales");
    let (dtype, shape) = (scales.dtype(), scales.shape().to_vec());
    let bytes: Vec<u8> =
        (0..shape[0] * shape[1]).map(|i| code(i % shape[1], i / shape[1])).collect();
    case.add_input(
        "weight_scale",
        Tensor::new("weight_scale", dtype, shape, bytes).expect("scales"),
    );
    let x = case.input("x").expect("x");
    let (dtype, shape) = (x.dtype(), x.shape().to_vec());
    let ty = marlinspike::num::scalar::float_type(dtype).expect("a float");
    let value = |i: usize| ((i * 37 + i / 64 * 11) % 101) as f64 / 32.0 - 1.5;
    let bits = (0..x.len()).map(|i| ty.encode_rne(value(i)) as u16).collect();
    case.add_input("x", Tensor::from_vec::<u16>("x", dtype, shape, bits).expect("x"));
    case
}

/// The report on y where the scales with a code in `lost` are zero.
fn report(case: &Case<'static>, lost: impl Fn(u8) -> bool) -> OutputReport {
    let mut case = case.clone();
    let mut model = Model::new(&case, "y");
    let (n, scales) = (model.n, case.input("weight_scale").expect("scales").clone());
    let groups = scales.shape()[1];
    for (i, s) in model.matrices[0].s.iter_mut().enumerate() {
        if lost(scales.bytes()[i % n * groups + i / n]) {
            *s = 0.0;
        }
    }
    let y = model.compute();
    put(&mut case, "y", &y);
    judged(&mut case, "y")
}

fn named(report: &OutputReport) -> (String, Strength, usize) {
    assert_eq!(report.verdict, Verdict::Fail);
    let diagnosis = report.diagnosis.clone().expect("a diagnosis");
    (diagnosis.id, diagnosis.strength, diagnosis.unexplained)
}

/// Every third column has scales of 2^-127 and 2^-126; the others are ordinary.
fn tiny(group: usize, n: usize) -> u8 {
    if n.is_multiple_of(3) { (group % 2) as u8 } else { 124 + ((group + n) % 5) as u8 }
}

#[test]
fn e8m0_code_0_as_zero() {
    let case = with_scales(case("linear-bf16_mxfp8"), tiny);
    assert_eq!(report(&case, |_| false).verdict, Verdict::Pass);
    assert_eq!(named(&report(&case, |code| code == 0)), (E8M0.into(), Strength::Explains, 0));
    // Code 1 is lost instead, or both: not this mistake.
    for other in [1..=1u8, 0..=1] {
        let (id, strength, _) = named(&report(&case, |code| other.contains(&code)));
        assert!(id != E8M0 || strength != Strength::Explains, "{other:?}: {id}");
    }
    // No scale is 0.
    let ordinary = with_scales(case, |group, n| 1 + tiny(group, n));
    assert_ne!(named(&report(&ordinary, |code| code == 1)).0, E8M0);
}

#[test]
fn e4m3_scales_flushed() {
    let scales = |group: usize, n: usize| match n % 4 {
        0 => (1 + (group * 5 + n) % 60) as u8,
        _ => (20 + (group * 7 + n) % 40) as u8,
    };
    let case = with_scales(case("linear-f16_nvfp4"), scales);
    assert_eq!(report(&case, |_| false).verdict, Verdict::Pass);
    let flushed = |code: u8| (1..=7).contains(&code);
    assert_eq!(named(&report(&case, flushed)), (E4M3.into(), Strength::Explains, 0));
    // Another limit, or all small scales but one.
    for other in [1..=9u8, 3..=7, 1..=5] {
        let (id, strength, _) = named(&report(&case, |code| other.contains(&code)));
        assert!(id != E4M3 || strength != Strength::Explains, "{other:?}: {id}");
    }
}

/// With bfloat16, upstream multiplies the scales by the largest power of two that fits: fewer are lost.
#[test]
fn e4m3_scales_flushed_after_their_factor() {
    let keys = json!({"dtype": "bfloat16", "has_bias": false, "size_n": 64, "size_k": 128});
    let case = generated("linear-f16_nvfp4", keys, 5);
    // The largest scale is 2^7 (code 0x70), the factor 2: codes 1 to 3 are below 2^-7.
    let scales = |group: usize, n: usize| match (group, n % 4) {
        (0, 1) => 0x70,
        (_, 0) => (1 + (group + n / 4) % 7) as u8,
        _ => (40 + (group * 7 + n) % 30) as u8,
    };
    let case = with_scales(case, scales);
    let e4m3 = |code: u8| ScalarType::FLOAT8_E4M3FN.to_f64(code.into());
    assert!(e4m3(3) * 2.0 < 1.0 / 64.0 && e4m3(4) * 2.0 >= 1.0 / 64.0 && e4m3(0x70) * 2.0 <= 448.0);
    assert_eq!(report(&case, |_| false).verdict, Verdict::Pass);
    let found = named(&report(&case, |code| (1..=3).contains(&code)));
    assert_eq!(found, (E4M3.into(), Strength::Explains, 0));
}
