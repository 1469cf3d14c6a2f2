//! `fused_experts_int8_w8a8`: recorded cases of numpy pass, wrong ones fail.

use std::collections::BTreeSet;

use marlinspike::case::{Case, Op};
use marlinspike::check::{OutputReport, Verdict, check_case, mistaken, mistakes};
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use marlinspike::products::{Int8Epilogue, Int8Product};
use marlinspike::vectors::Rng;
use marlinspike::weight::{Codes, Groups, Table, TableData, Weight};

use crate::int8::recorded;

fn output(case: &Case<'_>, name: &str) -> OutputReport {
    let report = check_case(case).expect("inputs that can be used");
    report.outputs.into_iter().find(|o| o.name == name).expect("the output")
}

/// The case with the bytes of one output changed.
fn with<'c>(case: &Case<'c>, name: &str, change: impl Fn(&mut [u8])) -> Case<'c> {
    let mut case = case.clone();
    let tensor = case.output(name).unwrap();
    let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
    let mut bytes = tensor.bytes().to_vec();
    change(&mut bytes);
    case.add_output(name, Tensor::new("", dtype, shape, bytes).unwrap());
    case
}

#[test]
fn recorded_cases_pass() {
    let mut notes = Vec::new();
    let count = recorded(Op::Int8Moe, |path, case| {
        let report = check_case(case).expect("inputs that can be used");
        assert_eq!(report.verdict, Verdict::Pass, "{path}: {report:?}");
        assert_eq!(report.outputs.len(), 8, "{path}");
        notes.extend(report.outputs.into_iter().map(|o| o.note.unwrap_or_default()));
    });
    assert_eq!(count, 5);
    let with = |part: &str| notes.iter().filter(|n| n.contains(part)).count();
    assert_eq!(with("compared for every bit with int32 sums of"), 6, "{notes:?}");
    assert_eq!(with("by the declared quantizer `product`"), 12, "{notes:?}");
    assert_eq!(with("from in.x by `product`"), 4, "{notes:?}");
}

#[test]
fn damaged_outputs_fail() {
    recorded(Op::Int8Moe, |path, case| {
        for name in ["a1q", "a2q"] {
            let wrong = output(&with(case, name, |bytes| bytes[7] ^= 2), name);
            assert_eq!((wrong.verdict, wrong.mismatches), (Verdict::Fail, 1), "{path}: {name}");
            assert_eq!(wrong.first_mismatch.unwrap().k, Some(7), "{path}: {name}");
        }
        for name in ["a1q_scale", "a2q_scale"] {
            let wrong = output(&with(case, name, |bytes| bytes[4] ^= 64), name);
            assert_eq!((wrong.verdict, wrong.mismatches), (Verdict::Fail, 1), "{path}: {name}");
        }
        for name in ["gate_up", "activated", "down", "y"] {
            let moved: fn(&mut [u8]) = |bytes| bytes.rotate_left(bytes.len() / 4 * 2);
            for damage in [|bytes: &mut [u8]| bytes.fill(0), moved] {
                let wrong = output(&with(case, name, damage), name);
                assert_eq!(wrong.verdict, Verdict::Fail, "{path}: {name}: {wrong:?}");
            }
        }
    });
}

/// Codes without their scales are not judged. The product is judged by the rows that the declared quantizer
/// makes of x, or a known one.
#[test]
fn a_case_without_scales_is_not_judged() {
    recorded(Op::Int8Moe, |path, case| {
        let mut half = case.clone();
        half.outputs.remove("a1q_scale");
        let report = check_case(&half).unwrap();
        assert_ne!(report.verdict, Verdict::Pass, "{path}");
        let of = |name: &str| report.outputs.iter().find(|o| o.name == name).unwrap().verdict;
        assert_eq!((of("a1q"), of("gate_up")), (Verdict::Unchecked, Verdict::Pass), "{path}");
    });
}

#[test]
fn mistakes_fail_and_are_named() {
    let ids = mistakes(Op::Int8Moe);
    let mut named = BTreeSet::new();
    recorded(Op::Int8Moe, |path, case| {
        let declared = case.config.to_json()["quantizer"].is_string();
        for &id in &ids {
            let Some(wrong) = mistaken(case, id).unwrap() else { continue };
            let report = check_case(&wrong).unwrap();
            // Both roundings of halves are known quantizers.
            if id == "halves-to-even" && !declared {
                continue;
            }
            assert_eq!(report.verdict, Verdict::Fail, "{path}: {id}: {report:?}");
            let mut causes = report.outputs.iter().filter_map(|o| o.diagnosis.as_ref());
            if causes.any(|d| d.id == id) {
                named.insert(id);
            }
        }
    });
    let unnamed: Vec<_> = ids.into_iter().filter(|id| !named.contains(id)).collect();
    assert_eq!(unnamed, ["halves-to-even"], "this one has a place alone");
}

fn weight(shape: Shape, code: impl Fn(usize, usize) -> i8) -> Weight<'static> {
    let scales = vec![0x3a80_0000; shape.size_n];
    Weight {
        name: "w".to_owned(),
        ty: ScalarType::INT8,
        codes: Codes::from_fn(8, shape, |k, n| code(k, n) as u8).unwrap(),
        scales: Table::new(ScalarType::FLOAT32, 1, shape.size_n, TableData::B32(scales)).unwrap(),
        zeros: None,
        groups: Groups::Uniform(GroupSize::Channel),
        global_scale: None,
        bias: None,
    }
}

/// The integer of at most 24 bits nearest to `x`, the even one at halves.
fn to_24_bits(x: i64) -> i64 {
    let size = 64 - x.unsigned_abs().leading_zeros();
    let Some(drop) = size.checked_sub(24).filter(|&drop| drop > 0) else { return x };
    let (unit, magnitude) = (1i64 << drop, x.abs());
    let (whole, rest) = (magnitude / unit, magnitude % unit);
    let up = rest * 2 > unit || rest * 2 == unit && whole % 2 == 1;
    (whole + i64::from(up)) * unit * x.signum()
}

/// Sums beyond 2^24 are rounded after each block, and every order of blocks is within the bound.
#[test]
fn sums_of_blocks_round_as_f32() {
    let shape = Shape::new(4160, 8);
    let mut rng = Rng::new(7);
    let small: Vec<i8> = (0..shape.size_k).map(|_| 127 - (rng.next_u32() % 4) as i8).collect();
    let weight = weight(shape, |k, n| if n == 0 { small[k] } else { small[(k * n) % 4160] });
    let (a, a_scales) = (small.repeat(2), vec![1.0 / 1024.0; 2]);
    let router = [0.3f32, 0.7];
    let product = Int8Product {
        a: &a,
        a_scales: &a_scales,
        weight: &weight,
        router_weights: Some(&router),
        dtype: ScalarType::BFLOAT16,
    };
    let bounds = product.block_bounds().unwrap();
    let mut all = BTreeSet::new();
    for size in [16, 32, 64, 128, 4160] {
        let sums = product.block_sums(size).unwrap();
        for (i, &sum) in sums.iter().enumerate() {
            let n = i % shape.size_n;
            let column: Vec<i64> =
                (0..shape.size_k).map(|k| i64::from(weight.codes.get(k, n) as i8)).collect();
            let parts = small.chunks(size).zip(column.chunks(size));
            let part = |(a, w): (&[i8], &[i64])| -> i64 {
                a.iter().zip(w).map(|(&a, &w)| i64::from(a) * w).sum()
            };
            let expected = parts.map(part).fold(0, |sum, p| to_24_bits(sum + to_24_bits(p)));
            assert_eq!(f64::from(sum), expected as f64, "{size} {n}");
            all.insert((n, sum.to_bits()));
        }
        let outputs = product.outputs_of(&sums, Int8Epilogue::Triton);
        for (bound, bits) in bounds.iter().zip(outputs) {
            assert!(bound.ratio(ScalarType::BFLOAT16.to_f64(bits)) <= 1.0, "{size}: {bound:?}");
            assert!(bound.ratio(ScalarType::BFLOAT16.to_f64(bits + 2)) > 1.0, "{size}: {bound:?}");
        }
    }
    assert!(all.len() > shape.size_n, "the size of a block must show");
    assert!(product.block_sums(0).is_err());
}
