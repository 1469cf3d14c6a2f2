//! Cases on a backend: the golden data by the reference and, if present, by the GPU; and the
//! verdicts for wrong or missing operations.

use crate::common;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;

use marlinspike::case::{Case, Op};
use marlinspike::check::{Declared, Verdict};
use marlinspike::formats::gptq;
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Generator;
use marlinspike_accel::{
    Device,
    backend::{Count, NOT_ON_DEVICE, Operations, Reference, check},
};
use marlinspike_golden::Manifest;
use rayon::prelude::*;

/// Results of the golden cases.
#[derive(Default)]
struct Tally {
    cases: usize,
    passed: usize,
    counts: BTreeMap<&'static str, Count>,
    /// Outputs that are not computed, by reason.
    absent: BTreeMap<String, usize>,
}

/// Checks every golden case; panics at the first output that fails.
fn golden<O: Operations + Sync>(operations: &O) -> Tally {
    let manifest = Manifest::load().unwrap();
    let tally = Mutex::new(Tally::default());
    let paths: Vec<_> =
        manifest.cases().iter().map(|case| manifest.path(&case.file().path)).collect();
    paths.par_iter().for_each(|path| {
        let bytes = std::fs::read(path).unwrap();
        let case = Case::parse(&bytes).unwrap();
        let checked = check(operations, &case, &Declared::default())
            .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut tally = tally.lock().unwrap();
        tally.cases += 1;
        assert_eq!(checked.report.outputs.len(), case.outputs.len(), "{}", path.display());
        for output in &checked.report.outputs {
            let note = output.note.as_deref().unwrap_or_default();
            match (output.verdict, note.strip_prefix(NOT_ON_DEVICE)) {
                (Verdict::Pass, None) => tally.passed += 1,
                (Verdict::Unchecked, Some(reason)) => {
                    *tally.absent.entry(reason.to_owned()).or_default() += 1;
                }
                _ => panic!("{}: {output:#?}", path.display()),
            }
        }
        for (name, count) in checked.counts {
            let sum = tally.counts.entry(name).or_default();
            sum.calls += count.calls;
            sum.outputs += count.outputs;
            sum.differing += count.differing;
        }
    });
    tally.into_inner().unwrap()
}

fn say(tally: &Tally) {
    for (name, Count { calls, outputs, differing }) in &tally.counts {
        assert_eq!(*differing, 0, "{name}");
        common::say(&format!("LAW golden cases, {name}: {calls} cases, {outputs} outputs"));
    }
    let absent: usize = tally.absent.values().sum();
    common::say(&format!(
        "LAW golden cases: {} cases, {} outputs passed their judges, {absent} not on cuda",
        tally.cases, tally.passed
    ));
    for (reason, count) in &tally.absent {
        println!("{count} outputs: {reason}");
    }
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation; --include-ignored runs it")]
fn golden_cases_pass_by_the_reference() {
    let tally = golden(&Reference);
    let expected = [
        "awq_marlin_repack",
        "fp8_gemm",
        "gptq_marlin_repack",
        "marlin_gemm",
        "marlin_gemm, float8_e4m3fn activations",
        "marlin_gemm, int8 activations",
        "marlin_int4_fp8_preprocess",
        "marlin_permute_scales",
        "moe_activation",
        "moe_align_block_size",
        "moe_sum",
        "moe_wna16_marlin_gemm",
        "topk_router",
    ];
    assert_eq!(tally.counts.keys().copied().collect::<Vec<_>>(), expected);
    assert!(tally.passed > 200, "{}", tally.passed);
    let refused = ["input_dtype", "act-order"];
    let is_refused = |reason: &&String| refused.iter().any(|what| reason.contains(what));
    assert_eq!(tally.absent.keys().find(is_refused), None);
    for (reason, count) in &tally.absent {
        println!("{count} outputs: {reason}");
    }
    println!("{} cases, {} outputs passed", tally.cases, tally.passed);
}

#[test]
fn golden_cases_pass_on_the_device() {
    let Some(device) = common::device_or_skip("golden_cases_pass_on_the_device") else { return };
    say(&golden(&*device));
}

/// Checks generated cases, which resemble users' case files. Returns the numbers of outputs that
/// passed and that are not computed.
fn generated<O: Operations + Sync>(operations: &O, cases: Range<u64>) -> [usize; 2] {
    let mut counts = [0; 2];
    for op in [Op::Linear, Op::Moe, Op::Preprocess] {
        let generator = Generator::new(op, 0x6b65).unwrap();
        let outputs: Vec<(Verdict, String)> = cases
            .clone()
            .into_par_iter()
            .flat_map_iter(|index| {
                let case = generator.case(index).unwrap();
                let checked = check(operations, &case, &Declared::default())
                    .unwrap_or_else(|e| panic!("{op} {index}: {e}"));
                assert!(checked.counts.values().all(|count| count.differing == 0), "{op} {index}");
                let outputs = checked.report.outputs.into_iter();
                outputs.map(move |o| (o.verdict, format!("{op} {index} ({}): {o:#?}", case.name)))
            })
            .collect();
        for (verdict, text) in outputs {
            match verdict {
                Verdict::Pass => counts[0] += 1,
                Verdict::Unchecked => counts[1] += 1,
                Verdict::Fail => panic!("{text}"),
            }
        }
    }
    counts
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "minutes under emulation; --include-ignored runs it")]
fn generated_cases_pass_by_the_reference() {
    // Among them a layer in which infinities meet.
    let [passed, absent] = generated(&Reference, 120..140);
    println!("{passed} outputs passed, {absent} not computed");
    assert!(passed > 100);
}

#[test]
fn generated_cases_pass_on_the_device() {
    let Some(device) = common::device_or_skip("generated_cases_pass_on_the_device") else { return };
    let [passed, absent] = generated(&*device, 0..160);
    common::say(&format!(
        "LAW generated cases: 480 cases, {passed} outputs passed their judges, {absent} not on cuda"
    ));
}

/// The first generated case of that kind.
fn case(op: Op, wanted: impl Fn(&Case<'_>) -> bool) -> Case<'static> {
    let generator = Generator::new(op, 5).unwrap();
    let mut cases = (0..4000).map(|i| generator.case(i).unwrap());
    cases.find(|case| wanted(case)).unwrap_or_else(|| panic!("no such case of {op}"))
}

/// The first golden case of an operation whose generated ones have no outputs.
fn golden_case(op: &str) -> Vec<u8> {
    let path = Manifest::load().unwrap().case_paths(op).swap_remove(0);
    std::fs::read(path).unwrap()
}

/// Whether it has a 16-bit product with integer weights.
fn is_w4a16(case: &Case<'_>) -> bool {
    let plain = |c: &marlinspike::case::QuantConfig| {
        c.input_dtype.is_none()
            && c.checkpoint_format == marlinspike::case::CheckpointFormat::Int(&gptq::FORMAT)
    };
    case.config.quant().is_some_and(plain)
}

/// Whether kernels compute the whole layer: router weights after a product, no shared expert's output.
fn is_on_device(case: &Case<'_>) -> bool {
    let on_x = case.config.to_json().get("router_weight_on").is_some_and(|on| on == "x");
    !on_x && !case.inputs.contains_key("shared_output")
}

/// Whether it has a product with int8 activations.
fn is_w4a8(case: &Case<'_>) -> bool {
    case.config.quant().is_some_and(|c| c.input_dtype == Some(ScalarType::INT8))
}

#[test]
fn wrong_results_fail_and_refusals_are_unchecked() {
    use crate::wrong::{Fault, Faulty};
    let layouts = case(Op::Linear, |c| is_w4a16(c) && c.output("y").is_some());
    let layer = case(Op::Moe, |c| is_w4a16(c) && is_on_device(c) && c.output("y").is_some());
    let dense8 = case(Op::Linear, |c| is_w4a8(c) && c.output("y").is_some());
    let layer8 = case(Op::Moe, |c| is_w4a8(c) && is_on_device(c) && c.output("down").is_some());
    let (tokens, router) = (golden_case("moe_align_block_size"), golden_case("router"));
    let (tokens, router) = (Case::parse(&tokens).unwrap(), Case::parse(&router).unwrap());
    let tried: [(&Case<'_>, &str, &str); 12] = [
        (&layouts, "gptq_marlin_repack", "marlin_qweight"),
        (&layouts, "marlin_permute_scales", "marlin_scales"),
        (&layouts, "marlin_gemm", "y"),
        (&layer, "moe_wna16_marlin_gemm", "gate_up"),
        (&layer, "moe_wna16_marlin_gemm", "down"),
        (&dense8, "marlin_gemm, int8 activations", "y"),
        (&layer8, "marlin_gemm, int8 activations", "gate_up"),
        (&layer8, "marlin_gemm, int8 activations", "down"),
        (&layer, "moe_activation", "activated"),
        (&layer, "moe_sum", "y"),
        (&tokens, "moe_align_block_size", "sorted_token_ids"),
        (&router, "topk_router", "topk_weights"),
    ];
    for (case, operation, output) in tried {
        let verdict = |fault| {
            let faulty = Faulty { operation, fault };
            let checked = check(&faulty, case, &Declared::default()).unwrap();
            let report = checked.report.outputs.iter().find(|o| o.name == output).unwrap().clone();
            (report, checked.counts.get(operation).copied().unwrap_or_default())
        };
        let (right, count) = verdict(Fault::None);
        assert_eq!(right.verdict, Verdict::Pass, "{operation}, {output}: {right:#?}");
        assert!(count.outputs > 0 && count.differing == 0, "{operation}");
        let (wrong, count) = verdict(Fault::LastBit);
        assert_eq!(wrong.verdict, Verdict::Fail, "{operation}, {output}: {wrong:#?}");
        assert!(count.differing > 0, "{operation}");
        assert!(wrong.note.unwrap().contains("not the reference's bits"), "{operation}");
        let (refused, count) = verdict(Fault::Refusal);
        assert_eq!(refused.verdict, Verdict::Unchecked, "{operation}, {output}");
        let note = refused.note.unwrap();
        assert!(note.starts_with(NOT_ON_DEVICE) && note.contains(operation), "{note}");
        assert_eq!(count.calls, 0);
        let failed = Faulty { operation, fault: Fault::Failure };
        assert!(check(&failed, case, &Declared::default()).is_err(), "{operation}");
    }
}

/// Threads may share a device.
#[test]
fn a_device_is_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Device>();
}
