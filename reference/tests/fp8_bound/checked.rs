//! Cases that declare nothing: outputs of simulated kernels pass, damaged ones fail.

use marlinspike::case::{Case, CaseConfig, Fp8MmConfig, Op, QuantConfig};
use marlinspike::check::{Declared, OutputReport, Verdict, check_case_as};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::products::Class;
use marlinspike::vectors::{Generator, Rng};

use crate::data::{Data, operands, values};
use crate::simulated::scales;
use crate::unit::Unit;

const BF16: ScalarType = ScalarType::BFLOAT16;

/// A `cutlass_scaled_mm` without a declared schedule.
struct Mm {
    shape: [usize; 3],
    codes: [Vec<u32>; 2],
    row_scales: Vec<f32>,
    column_scales: Vec<f32>,
}

impl Mm {
    fn new(shape: [usize; 3]) -> Self {
        let mut random = Rng::new(shape[2] as u64 + 1);
        let codes = operands(&mut random, Data::Normal, shape);
        let [row_scales, column_scales] = [shape[0], shape[1]].map(|n| scales(&mut random, n));
        Self { shape, codes, row_scales, column_scales }
    }

    /// The f32 sums that `chain` makes of the factors of each output, through the epilogue.
    fn made(&self, sum: impl Fn(&[(f64, f64)]) -> f32) -> Vec<u32> {
        let [rows, cols, k] = self.shape;
        let [a, w] = self.codes.each_ref().map(|codes| values(codes));
        let one = |i: usize| {
            let (m, n) = (i / cols, i % cols);
            let terms: Vec<(f64, f64)> = (0..k).map(|j| (a[m * k + j], w[n * k + j])).collect();
            let y = sum(&terms) * self.column_scales[n] * self.row_scales[m];
            BF16.encode_rne(y.into())
        };
        (0..rows * cols).map(one).collect()
    }

    fn case(&self, y: &[u32]) -> Case<'static> {
        let [size_m, size_n, size_k] = self.shape;
        let config = Fp8MmConfig {
            dtype: BF16,
            size_m,
            size_n,
            size_k,
            per_act_token_quant: true,
            per_out_ch_quant: true,
            block: None,
            has_bias: false,
            schedule: None,
        };
        let mut case = Case::new("mm", config.into(), "simulated");
        let bytes = |codes: &[u32]| codes.iter().map(|&c| c as u8).collect::<Vec<u8>>();
        let code = |name: &str, rows: usize, codes: &[u32]| {
            let shape = vec![rows, size_k];
            Tensor::new(name, DType::F8E4M3, shape, bytes(codes)).expect("codes")
        };
        let floats = |name: &str, shape: Vec<usize>, values: &[f32]| {
            Tensor::from_vec(name, DType::F32, shape, values.to_vec()).expect("scales")
        };
        case.add_input("a", code("in.a", size_m, &self.codes[0]));
        case.add_input("weight", code("in.weight", size_n, &self.codes[1]));
        case.add_input("a_scales", floats("in.a_scales", vec![size_m, 1], &self.row_scales));
        let scales = floats("in.weight_scale", vec![size_n, 1], &self.column_scales);
        case.add_input("weight_scale", scales);
        let halves: Vec<u16> = y.iter().map(|&b| b as u16).collect();
        let y = Tensor::from_vec("out.y", DType::BF16, vec![size_m, size_n], halves).expect("y");
        case.add_output("y", y);
        case
    }

    fn report(&self, y: &[u32], declared: &Declared) -> OutputReport {
        let case = self.case(y);
        case.validate().expect("a case");
        let report = check_case_as(&case, declared).expect("inputs that can be used");
        report.outputs.into_iter().find(|o| o.name == "y").expect("y")
    }
}

/// Parts of `length`, each promoted every `promotion` k, added in ascending order.
fn parts(unit: Unit, length: usize, promotion: usize) -> impl Fn(&[(f64, f64)]) -> f32 {
    move |terms| {
        let part = |terms: &[(f64, f64)]| {
            terms.chunks(promotion).fold(0f32, |sum, terms| sum + unit.chain(terms) as f32)
        };
        terms.chunks(length).map(part).fold(0f32, |sum, part| sum + part)
    }
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn outputs_of_known_kernels_pass_by_their_order() {
    for size_k in [1024, 2048] {
        let mm = Mm::new([5, 40, size_k]);
        for (unit, length, promotion) in [
            (Unit::Wgmma, size_k, size_k),
            (Unit::Wgmma, size_k, 128),
            (Unit::Wgmma, size_k / 4, size_k),
            (Unit::Ada, size_k, size_k),
            (Unit::Mma, size_k, size_k),
        ] {
            let y = mm.made(parts(unit, length, promotion));
            let report = mm.report(&y, &Declared::default());
            assert_eq!(report.verdict, Verdict::Pass, "{unit:?}: {report:?}");
            assert!(report.note.as_ref().is_some_and(|n| n.contains("every bit")), "{report:?}");
            assert_eq!((report.mismatches, report.equal_bits), (0, Some(1.0)), "{report:?}");
        }
        // Promotion inside of parts has no schedule, but is one of the class's members.
        let y = mm.made(parts(Unit::Wgmma, 192, 128));
        let report = mm.report(&y, &Declared::default());
        assert_eq!(report.verdict, Verdict::Pass, "{report:?}");
        assert!(
            report.note.as_ref().is_some_and(|n| n.contains("fp8-hopper: wgmma")),
            "{report:?}"
        );
    }
}

/// Outputs that pass if the bound for any order is the only one: error / bound is below 1.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn trivial_damage_of_a_known_kernel_does_not_pass() {
    let hopper = Declared { class: Class::fp8_hopper(), ..Declared::default() };
    for size_k in [1024, 7168] {
        let mm = Mm::new([4, 32, size_k]);
        let y = mm.made(parts(Unit::Wgmma, size_k, size_k));
        let value = |bits: u32| BF16.to_f64(bits);
        let times = |f: f64| y.iter().map(|&b| BF16.encode_rne(f * value(b))).collect::<Vec<u32>>();
        let rotated: Vec<u32> =
            y.chunks(32).flat_map(|row| row[1..].iter().chain(&row[..1]).copied()).collect();
        let no_order = size_k > 1024;
        for (what, found) in [
            ("zeros", times(0.0)),
            ("-y", times(-1.0)),
            ("y / 2", times(0.5)),
            ("columns rotated", rotated),
        ] {
            let report = mm.report(&found, &hopper);
            assert_eq!(report.verdict, Verdict::Fail, "{what}, K {size_k}: {report:?}");
            if !no_order {
                let report = mm.report(&found, &Declared::default());
                assert_eq!(report.verdict, Verdict::Fail, "{what}, K {size_k}: {report:?}");
            }
        }
        let report = mm.report(&times(1.005), &hopper);
        assert_eq!(report.verdict, Verdict::Fail, "x 1.005, K {size_k}: {report:?}");
        assert_eq!(mm.report(&y, &hopper).verdict, Verdict::Pass);
    }
}

/// Generated cases without their schedule: a layer's products, and 4-bit weights with e4m3
/// activations.
#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn schedules_of_layers_and_linear_cases_are_found() {
    let mut found = 0;
    for op in [Op::Linear, Op::Fp8Moe] {
        let vectors = Generator::new(op, 3).expect("a generator");
        let mut left = 12;
        for index in 0..vectors.lattice().len() as u64 {
            let mut case = vectors.case(index).expect("a case");
            match &mut case.config {
                CaseConfig::Linear(c) => {
                    let QuantConfig { input_dtype: Some(ScalarType::FLOAT8_E4M3FN), .. } = c.quant
                    else {
                        continue;
                    };
                    c.schedule = None;
                }
                CaseConfig::Fp8Moe(c) => {
                    (c.schedule_w13, c.schedule_w2) = (None, None);
                }
                other => panic!("{:?}", other.op()),
            }
            let report = check_case_as(&case, &Declared::default()).expect("inputs");
            for output in
                report.outputs.iter().filter(|o| ["y", "gate_up", "down"].contains(&&*o.name))
            {
                let by_schedule =
                    output.note.as_ref().is_some_and(|n| n.contains("every bit as a known"));
                assert_ne!(output.verdict, Verdict::Fail, "{}: {output:?}", case.name);
                found += usize::from(by_schedule);
            }
            left -= 1;
            if left == 0 {
                break;
            }
        }
    }
    assert!(found >= 24, "{found}");
}

/// K = 100 is a multiple of 4, as upstream's operator requires, but of no unit's 32 k. No schedule can
/// compute such a product, and its bound judges it.
#[test]
fn a_k_that_no_unit_divides_is_judged_by_its_bound() {
    let mm = Mm::new([4, 24, 100]);
    let sum = |terms: &[(f64, f64)]| terms.iter().map(|(a, w)| a * w).sum::<f64>() as f32;
    let right = mm.made(sum);
    let verdict = |y: &[u32]| mm.report(y, &Declared::default());
    assert_eq!(verdict(&right).verdict, Verdict::Pass);
    let scale_of_next_column: Vec<u32> = {
        let mut other = Mm::new([4, 24, 100]);
        other.column_scales.rotate_left(1);
        other.made(sum)
    };
    let stale: Vec<u32> =
        right[..24].iter().chain(&right[..24]).chain(&right[48..]).copied().collect();
    for (what, y) in [
        ("scale of the next column", scale_of_next_column),
        ("row 1 holds row 0", stale),
        ("half of k", mm.made(|terms| sum(&terms[..50]))),
    ] {
        let report = verdict(&y);
        assert_eq!(report.verdict, Verdict::Fail, "{what}: {report:?}");
        assert!(report.mismatches > 0, "{what}: {report:?}");
    }
}

/// Upstream's operator multiplies by any number. A column whose scale is zero is zero; a negative scale
/// changes the sign.
#[test]
fn a_weights_scale_may_be_zero_or_negative() {
    let mut mm = Mm::new([4, 24, 128]);
    (mm.column_scales[5], mm.column_scales[9]) = (0.0, -mm.column_scales[9]);
    let sum = |terms: &[(f64, f64)]| terms.iter().map(|(a, w)| a * w).sum::<f64>() as f32;
    let right = mm.made(sum);
    assert!(right[5] & 0x7fff == 0 && right[6] & 0x7fff != 0);
    let verdict = |y: &[u32]| mm.report(y, &Declared::default()).verdict;
    assert_eq!(verdict(&right), Verdict::Pass);
    for (at, bits) in [(24 + 5, BF16.encode_rne(0.25)), (24 + 9, right[24 + 9] ^ 0x8000)] {
        let mut wrong = right.clone();
        wrong[at] = bits;
        assert_eq!(verdict(&wrong), Verdict::Fail, "{at}");
    }
    for bad in [f32::NAN, f32::INFINITY] {
        mm.column_scales[5] = bad;
        let refused = mm.case(&right).validate().expect_err("a scale that is no number");
        assert!(refused.to_string().contains("in.weight_scale"), "{refused}");
    }
    (mm.column_scales[5], mm.row_scales[2]) = (1.0, 0.0);
    let refused = mm.case(&right).validate().expect_err("an activation scale of zero");
    assert!(refused.to_string().contains("in.a_scales"), "{refused}");
}
