//! Every golden linear and MoE case passes, except those whose manifest entry states a fault of
//! their producer. No damaged case passes.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use marlinspike::case::{Case, CaseConfig};
use marlinspike::check::{OutputReport, Verdict, check_case};
use marlinspike::num::scalar::{ScalarType, f64_to_bf16_rne, f64_to_f16_rne};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike_golden::{Manifest, Tier};
use rayon::prelude::*;

const PRODUCTS: [&str; 3] = ["y", "gate_up", "down"];

/// Calls `with` for every case of the operation, on all cores.
fn each_case(op: &str, with: impl Fn(&str, Case<'_>) + Sync) {
    each_nth_case(op, 1, with);
}

fn each_nth_case(op: &str, nth: usize, with: impl Fn(&str, Case<'_>) + Sync) {
    let golden = Manifest::load().expect("the golden manifest");
    let paths: Vec<_> = golden.case_paths(op).into_iter().step_by(nth).collect();
    paths.into_par_iter().with_max_len(1).for_each(|path| {
        let bytes = std::fs::read(&path).expect("a golden file");
        let case = Case::parse(&bytes).expect("a case");
        with(&path.file_name().expect("a name").to_string_lossy(), case);
    });
}

/// Calls `with` as [`each_case`] does, without the largest products below the `nightly` tier: every cause is
/// tried on a damaged case, for seconds where a product has 30 million terms. A plain `cargo test` takes every
/// fourth case.
fn each_damaged_case(op: &str, with: impl Fn(&str, Case<'_>) + Sync) {
    let tier = Tier::current();
    each_nth_case(op, tier.pick(4, 1, 1), |path, case| {
        let (terms, most) = match &case.config {
            CaseConfig::Linear(c) => (c.size_m * c.size_n * c.size_k, 1_000_000),
            // Of the first product, with all rows.
            CaseConfig::Moe(c) => {
                (c.size_m * c.top_k * c.hidden_size * c.intermediate_size, 2_000_000)
            }
            _ => (0, 0),
        };
        if terms < tier.pick(most, 10 * most, usize::MAX) {
            with(path, case);
        }
    });
}

/// The diagnosis that the manifest records for the case.
fn known_fault(file: &str) -> Option<String> {
    let golden = Manifest::load().expect("the golden manifest");
    let entry = golden.cases().iter().find(|c| c.path.ends_with(file)).expect("an entry");
    entry.known_fault.clone()
}

fn type_of(tensor: &Tensor<'_>) -> ScalarType {
    if tensor.dtype() == DType::F16 { ScalarType::FLOAT16 } else { ScalarType::BFLOAT16 }
}

fn narrow(ty: ScalarType, x: f64) -> u16 {
    if ty == ScalarType::FLOAT16 { f64_to_f16_rne(x) } else { f64_to_bf16_rne(x) }
}

/// The report on one output after `damage`, which gets its bits.
fn damaged(case: &Case<'_>, output: &str, damage: impl FnOnce(&mut [u16])) -> OutputReport {
    let found = case.output(output).expect("an output");
    let (dtype, shape) = (found.dtype(), found.shape().to_vec());
    let mut bits = found.elements::<u16>().into_owned();
    damage(&mut bits);
    let mut case = case.clone();
    case.add_output(output, Tensor::from_vec(output, dtype, shape, bits).expect("as before"));
    report(&case, output)
}

fn report(case: &Case<'_>, output: &str) -> OutputReport {
    let reports = check_case(case).expect("inputs that can be used").outputs;
    reports.into_iter().find(|o| o.name == output).expect("the output")
}

/// The products of a case with a row of numbers to damage.
fn products<'c>(case: &'c Case<'_>) -> Vec<&'c str> {
    let linear = matches!(case.config, CaseConfig::Linear(_));
    PRODUCTS.into_iter().filter(|p| case.output(p).is_some() && (linear || *p != "y")).collect()
}

#[test]
fn every_case_passes() {
    let (cases, faults) = (AtomicUsize::new(0), AtomicUsize::new(0));
    for op in ["linear", "moe"] {
        each_case(op, |path, case| {
            let report = check_case(&case).expect("a report");
            cases.fetch_add(1, Relaxed);
            let Some(fault) = known_fault(path) else {
                assert_eq!(report.verdict, Verdict::Pass, "{path}: {report:?}");
                return;
            };
            faults.fetch_add(1, Relaxed);
            assert_eq!(report.verdict, Verdict::Fail, "{path}");
            let failed = report.outputs.into_iter().filter(|o| o.verdict != Verdict::Pass);
            let failed: Vec<_> = failed.map(|o| (o.name, o.diagnosis.expect("named"))).collect();
            let [(output, diagnosis)] = &failed[..] else { panic!("{path}: {failed:?}") };
            let found = (output.as_str(), diagnosis.id.as_str(), diagnosis.unexplained);
            assert_eq!(found, ("y", fault.as_str(), 0), "{path}");
        });
    }
    let (cases, faults) = (cases.into_inner(), faults.into_inner());
    assert_eq!(faults, 4);
    assert!(cases >= 29, "{cases}");
}

/// One element moved to one and a half bounds from the exact result.
fn one_element_past_its_bound(op: &str) -> usize {
    let checked = AtomicUsize::new(0);
    each_damaged_case(op, |path, case| {
        for output in products(&case) {
            let tensor = case.output(output).expect("an output");
            let ty = type_of(tensor);
            let value = |bits: u16| ty.to_f64(bits.into());
            let bits = tensor.elements::<u16>().into_owned();
            // In the middle of the output, a number of ordinary size.
            let mean = bits.iter().map(|&b| value(b).abs()).sum::<f64>() / bits.len() as f64;
            let i = (bits.len() / 2..bits.len())
                .find(|&i| (0.3..3.0).contains(&(value(bits[i]).abs() / mean)))
                .expect("an ordinary number");
            // The report's error over bound for a large error gives the bound, and the report
            // states the exact result.
            let far = value(bits[i]) + 64.0 * mean;
            let report = damaged(&case, output, |b| b[i] = narrow(ty, far));
            if report.verdict == Verdict::Pass && report.diagnosis.is_some() {
                panic!("{path}: {output}: accepted {report:?}");
            }
            assert_eq!(report.verdict, Verdict::Fail, "{path}: {output}");
            let first = report.first_mismatch.expect("a place");
            let expected = u32::from_str_radix(&first.expected[2..], 16).expect("bits");
            let exact = ty.to_f64(expected);
            let far = value(narrow(ty, far));
            let bound = (far - exact).abs() / report.max_error_over_bound.expect("a ratio");
            // One unit more than 1.5 bounds, since only half of them are numbers of the type.
            let wanted = exact + 1.5 * bound;
            let mut wrong = narrow(ty, wanted);
            let up = |bits: u16| if bits & 0x8000 == 0 { bits + 1 } else { bits - 1 };
            if value(wrong) < wanted {
                wrong = up(wrong);
            }
            // The report states the rounded exact result, which may be half a unit lower.
            if wrong == up(narrow(ty, exact)) {
                wrong = up(wrong);
            }
            let report = damaged(&case, output, |b| b[i] = wrong);
            assert_eq!(report.verdict, Verdict::Fail, "{path}: {output}: {i} {report:?}");
            checked.fetch_add(1, Relaxed);
        }
    });
    checked.into_inner()
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation; --include-ignored runs it")]
fn one_element_of_a_linear_layer_past_its_bound() {
    let checked = one_element_past_its_bound("linear");
    assert!(checked >= Tier::current().pick(4, 24, 24), "{checked}");
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation; --include-ignored runs it")]
fn one_element_of_experts_past_its_bound() {
    let checked = one_element_past_its_bound("moe");
    assert!(checked >= Tier::current().pick(2, 12, 12), "{checked}");
}

/// A group of k whose activations differ from those that the output was computed with.
#[test]
fn one_group_of_k_dropped() {
    each_damaged_case("linear", |path, case| {
        let CaseConfig::Linear(c) = &case.config else { panic!("{path}") };
        if case.output("y").is_none() {
            return;
        }
        let name = if case.inputs.contains_key("a_q") { "a_q" } else { "x" };
        let x = case.input(name).expect("activations");
        let (bytes, dtype, shape) = (x.dtype().bytes(), x.dtype(), x.shape().to_vec());
        let mut data = x.bytes().to_vec();
        for row in data.chunks_exact_mut(c.size_k * bytes) {
            row[32 * bytes..64 * bytes].fill(0);
        }
        let mut case = case.clone();
        let x = match bytes {
            1 => Tensor::from_vec(name, dtype, shape, data),
            _ => {
                Tensor::from_vec(name, dtype, shape, bytemuck::pod_collect_to_vec::<u8, u16>(&data))
            }
        };
        case.inputs.insert(name.to_owned(), x.expect("as before"));
        assert_eq!(report(&case, "y").verdict, Verdict::Fail, "{path}");
    });
    each_damaged_case("moe", |path, case| {
        // The same for the activations between the products.
        let Some(activated) = case.output("activated") else { return };
        let [rows, i] = activated.dims2().expect("a matrix");
        let (dtype, shape) = (activated.dtype(), activated.shape().to_vec());
        let mut bits = activated.elements::<u16>().into_owned();
        (0..rows).for_each(|row| bits[row * i + 32..row * i + 64].fill(0));
        let mut case = case.clone();
        let tensor = Tensor::from_vec("activated", dtype, shape, bits).expect("as before");
        case.add_output("activated", tensor);
        assert_eq!(report(&case, "down").verdict, Verdict::Fail, "{path}");
        assert_eq!(report(&case, "activated").verdict, Verdict::Fail, "{path}");
    });
}

/// Two rows of one expert are exchanged.
#[test]
fn one_experts_rows_swapped() {
    let swapped = AtomicUsize::new(0);
    each_damaged_case("moe", |path, case| {
        let ids = case.output("topk_ids").expect("ids").elements::<i32>().into_owned();
        for output in products(&case) {
            let [rows, n] = case.output(output).expect("an output").dims2().expect("a matrix");
            let bits = case.output(output).expect("an output").elements::<u16>().into_owned();
            let row = |r: usize| &bits[r * n..][..n];
            let present = |r: usize| row(r).iter().any(|&b| b & 0x7fff != 0);
            let pair = (0..rows)
                .flat_map(|a| (a + 1..rows).map(move |b| (a, b)))
                .find(|&(a, b)| ids[a] == ids[b] && present(a) && present(b) && row(a) != row(b));
            let Some((a, b)) = pair else { continue };
            let report = damaged(&case, output, |bits| {
                (0..n).for_each(|i| bits.swap(a * n + i, b * n + i));
            });
            assert_eq!(report.verdict, Verdict::Fail, "{path}: {output}");
            swapped.fetch_add(1, Relaxed);
        }
    });
    let swapped = swapped.into_inner();
    assert!(swapped >= Tier::current().pick(2, 12, 12), "{swapped}");
}

/// The router weight multiplies a second time.
#[test]
fn router_weight_twice() {
    let checked = AtomicUsize::new(0);
    each_damaged_case("moe", |path, case| {
        if !case.provenance.starts_with("vllm") {
            return;
        }
        let weights = case.output("topk_weights").expect("weights").elements::<f32>().into_owned();
        let down = case.output("down").expect("down");
        let ([_, n], ty) = (down.dims2().expect("a matrix"), type_of(down));
        if weights.iter().all(|&w| w == 1.0) {
            return;
        }
        let report = damaged(&case, "down", |bits| {
            for (row, &w) in bits.chunks_exact_mut(n).zip(&weights) {
                row.iter_mut().for_each(|b| *b = narrow(ty, ty.to_f64((*b).into()) * f64::from(w)));
            }
        });
        assert_eq!(report.verdict, Verdict::Fail, "{path}");
        checked.fetch_add(1, Relaxed);
    });
    let checked = checked.into_inner();
    assert!(checked >= Tier::current().pick(1, 6, 6), "{checked}");
}
