//! `cutlass_w4a8_mm`: recorded cases of numpy pass, wrong ones fail.

use marlinspike::case::{Case, CaseConfig, Op, ScheduleChoice, W4a8MmConfig};
use marlinspike::check::{OutputReport, Verdict, add_outputs, check_case, mistaken, mistakes};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::products::schedule::{Fp8Kernel, Schedule};

use crate::int8::recorded;

fn report(case: &Case<'_>, name: &str) -> OutputReport {
    let report = check_case(case).expect("inputs that can be used");
    report.outputs.into_iter().find(|o| o.name == name).expect("the output")
}

/// The case with one output changed, element by element.
fn with<'c, T: bytemuck::Pod>(
    case: &Case<'c>,
    name: &str,
    change: impl Fn(usize, T) -> T,
) -> Case<'c> {
    let mut case = case.clone();
    let tensor = case.output(name).unwrap();
    let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
    let values: Vec<T> = bytemuck::allocation::pod_collect_to_vec(tensor.bytes());
    let values: Vec<T> = values.into_iter().enumerate().map(|(i, v)| change(i, v)).collect();
    let bytes = bytemuck::cast_slice(&values).to_vec();
    case.add_output(name, Tensor::new("", dtype, shape, bytes).unwrap());
    case
}

#[test]
fn recorded_cases_pass() {
    let count = recorded(Op::W4a8Mm, |path, case| {
        let report = check_case(case).expect("inputs that can be used");
        assert_eq!(report.verdict, Verdict::Pass, "{path}: {report:?}");
        let names: Vec<_> = report.outputs.iter().map(|o| o.name.as_str()).collect();
        assert_eq!(names, ["weight_chan_scale", "weight_scale", "y"], "{path}");
    });
    assert_eq!(count, 4);
}

#[test]
fn damaged_outputs_fail() {
    recorded(Op::W4a8Mm, |path, case| {
        let code = with(case, "weight_scale", |i, b: u8| if i == 5 { b ^ 1 } else { b });
        let wrong = report(&code, "weight_scale");
        assert_eq!(wrong.verdict, Verdict::Fail, "{path}");
        assert_eq!(wrong.mismatches, 1, "{path}");
        let scale = with(case, "weight_chan_scale", |i, b: u32| if i == 3 { b + 1 } else { b });
        assert_eq!(report(&scale, "weight_chan_scale").verdict, Verdict::Fail, "{path}");
        // Each output is judged from the inputs alone.
        assert_eq!(report(&scale, "y").verdict, Verdict::Pass, "{path}");
        let damages: [fn(usize, u16) -> u16; 3] =
            [|_, _| 0, |_, bits| bits ^ 0x8000, |_, bits| bits.saturating_add(0x80)];
        for damage in damages {
            let wrong = report(&with(case, "y", damage), "y");
            assert_eq!(wrong.verdict, Verdict::Fail, "{path}: {wrong:?}");
        }
    });
}

/// Under a declared schedule every mistake that changes a bit fails and has its name.
#[test]
fn mistakes_are_named() {
    let ids = mistakes(Op::W4a8Mm);
    let mut named = std::collections::BTreeSet::new();
    recorded(Op::W4a8Mm, |path, case| {
        let CaseConfig::W4a8Mm(config) = case.config.clone() else { panic!("{path}") };
        for promoted in [true, false] {
            let schedule = Schedule::w8a8_fp8(Fp8Kernel::Triton, config.dtype, promoted).unwrap();
            let schedule = Some(ScheduleChoice::Given(Box::new(schedule)));
            let mut right = case.clone();
            right.config = W4a8MmConfig { schedule, ..config.clone() }.into();
            add_outputs(&mut right).unwrap();
            assert_eq!(check_case(&right).unwrap().verdict, Verdict::Pass, "{path}");
            for &id in &ids {
                let Some(wrong) = mistaken(&right, id).unwrap() else { continue };
                let report = check_case(&wrong).unwrap();
                assert_eq!(report.verdict, Verdict::Fail, "{path}: {id}");
                let mut causes = report.outputs.iter().filter_map(|o| o.diagnosis.as_ref());
                if causes.any(|d| d.id == id) {
                    named.insert(id);
                }
            }
        }
    });
    let unnamed: Vec<_> = ids.iter().filter(|id| !named.contains(*id)).collect();
    assert!(unnamed.is_empty(), "{unnamed:?}");
}

#[test]
fn unusable_inputs_are_refused_by_name() {
    recorded(Op::W4a8Mm, |path, case| {
        let scales = case.input("weight_scale").unwrap();
        let mut bits = scales.elements::<u16>().to_vec();
        bits[4] = 0x7fff;
        let mut wrong = case.clone();
        let tensor = Tensor::from_vec("", scales.dtype(), scales.shape().to_vec(), bits).unwrap();
        wrong.add_input("weight_scale", tensor);
        let error = wrong.validate().expect_err("NaN").to_string();
        assert!(error.contains("in.weight_scale"), "{path}: {error}");
        let mut wrong = case.clone();
        let rows = case.input("a_scales").unwrap().shape()[0];
        let zeros = Tensor::from_vec("", DType::F32, vec![rows, 1], vec![0f32; rows]).unwrap();
        wrong.add_input("a_scales", zeros);
        let error = wrong.validate().expect_err("zero").to_string();
        assert!(error.contains("in.a_scales") && error.contains("positive"), "{path}: {error}");
        let mut config = case.config.to_json();
        config.insert("group_size".to_owned(), 40.into());
        let error = CaseConfig::from_json(Op::W4a8Mm, &config).expect_err("40").to_string();
        assert!(error.contains("size_k") && error.contains("40"), "{path}: {error}");
    });
}

/// `y` by loops in f64: the recorded scales of groups and columns, the column's from `from(n)`.
fn multiplied(case: &Case<'_>, from: impl Fn(usize) -> usize) -> Vec<u16> {
    let CaseConfig::W4a8Mm(c) = &case.config else { panic!("{:?}", case.config.op()) };
    let e4m3 = ScalarType::FLOAT8_E4M3FN;
    let floats = |tensor: &Tensor<'_>| tensor.elements::<f32>().into_owned();
    let a_scales = floats(case.input("a_scales").unwrap());
    let columns = floats(case.output("weight_chan_scale").unwrap());
    let words = case.input("weight_packed").unwrap().elements::<u32>().into_owned();
    let value = |code: u8| e4m3.to_f64(code.into());
    let of_groups: Vec<f64> =
        case.output("weight_scale").unwrap().bytes().iter().map(|&b| value(b)).collect();
    let a: Vec<f64> = case.input("a").unwrap().bytes().iter().map(|&b| value(b)).collect();
    let groups = of_groups.len() / c.size_n;
    let weight = |n: usize, k: usize| {
        let code = words[(n * c.size_k + k) / 8] >> (4 * (k % 8)) & 15;
        let scaled = (f64::from(code) - 8.0) * of_groups[n * groups + k / (c.size_k / groups)];
        e4m3.to_f64(e4m3.encode_rne(scaled.clamp(-448.0, 448.0)))
    };
    let y = |i: usize| {
        let (m, n) = (i / c.size_n, i % c.size_n);
        let sum: f64 = (0..c.size_k).map(|k| a[m * c.size_k + k] * weight(n, k)).sum();
        c.dtype.encode_rne(sum * f64::from(columns[from(n)]) * f64::from(a_scales[m])) as u16
    };
    (0..c.size_m * c.size_n).map(y).collect()
}

/// Such checkpoints have no group size of -1 that could be used as a stride.
#[test]
fn the_scale_of_the_neighbouring_column_is_named() {
    let count = recorded(Op::W4a8Mm, |path, case| {
        let CaseConfig::W4a8Mm(c) = case.config.clone() else { panic!("{path}") };
        let size_n = c.size_n;
        let mut case = case.clone();
        case.config = W4a8MmConfig { schedule: None, ..c }.into();
        let judged = |from: &dyn Fn(usize) -> usize| {
            let y = multiplied(&case, from);
            report(&with(&case, "y", |i, _: u16| y[i]), "y")
        };
        let right = judged(&|n| n);
        assert_eq!(right.verdict, Verdict::Pass, "{path}: {right:?}");
        let next: &dyn Fn(usize) -> usize = &|n| (n + 1) % size_n;
        for from in [next, &|n| (n + size_n - 1) % size_n] {
            let wrong = judged(from);
            assert_eq!(wrong.verdict, Verdict::Fail, "{path}");
            let diagnosis = wrong.diagnosis.expect("a diagnosis");
            assert_eq!(diagnosis.id, "scale-of-another-column", "{path}: {diagnosis:?}");
            assert_eq!(diagnosis.unexplained, 0, "{path}: {diagnosis:?}");
        }
    });
    assert_eq!(count, 4);
}
