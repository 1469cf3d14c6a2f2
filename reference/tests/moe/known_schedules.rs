//! Products of a layer with FP8 activations and without a declared schedule: the known schedules
//! are tried, and one that gives every bit is named.

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{Declared, OutputReport, Verdict, check_case_as};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use marlinspike::products::Convention;
use marlinspike::vectors::{Rng, case_of, lattice};

const EVERY_BIT: &str = "every bit as a known schedule gives it";
const CASES: usize = 6;

fn judged(case: &Case<'_>, output: &str, convention: Option<Convention>) -> OutputReport {
    let declared = Declared { convention, ..Declared::default() };
    let report = check_case_as(case, &declared).expect("a report");
    report.outputs.into_iter().find(|o| o.name == output).expect("the output")
}

fn is_named(report: &OutputReport) -> bool {
    report.note.as_deref().is_some_and(|note| note.starts_with(EVERY_BIT))
}

/// The case with `output` changed.
fn changed<'c>(case: &Case<'c>, output: &str, change: impl FnOnce(&mut [u16])) -> Case<'c> {
    let found = case.output(output).expect("an output");
    let (dtype, shape) = (found.dtype(), found.shape().to_vec());
    let mut bits = found.elements::<u16>().into_owned();
    change(&mut bits);
    let mut case = case.clone();
    case.add_output(output, Tensor::from_vec(output, dtype, shape, bits).expect("as before"));
    case
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn known_schedules_of_fp8_layers_are_found() {
    let all = lattice(Op::Moe).expect("configs");
    let fp8 = |config: &&CaseConfig| match config {
        CaseConfig::Moe(c) => c.quant.input_dtype == Some(ScalarType::FLOAT8_E4M3FN),
        _ => false,
    };
    let fp8: Vec<&CaseConfig> = all.iter().filter(fp8).collect();
    let (mut found, mut refused) = (0, 0);
    for config in fp8.iter().step_by((fp8.len() / CASES).max(1)) {
        let mut rng = Rng::new(17);
        let mut case = case_of((*config).clone(), &mut rng).expect("a case");
        let CaseConfig::Moe(c) = &mut case.config else { panic!("{config:?}") };
        if c.schedule_w13.is_none() {
            continue;
        }
        (c.schedule_w13, c.schedule_w2) = (None, None);
        for output in ["gate_up", "down"] {
            // A rank's slice of k may give zeros alone, which every schedule does.
            let bits = case.output(output).expect("an output").elements::<u16>();
            if bits.iter().all(|b| b & 0x7fff == 0) {
                continue;
            }
            let report = judged(&case, output, None);
            assert_eq!(report.verdict, Verdict::Pass, "{config:?} {output}: {report:?}");
            assert!(is_named(&report), "{config:?} {output}: {report:?}");
            assert!(is_named(&judged(&case, output, Some(Convention::Canonical))));
            found += 1;
            // No schedule gives an output with one changed bit, even if it is within the bounds.
            let last_bit = changed(&case, output, |bits| {
                let some = bits.iter_mut().rfind(|b| **b & 0x7fff != 0).expect("a number");
                *some ^= 1;
            });
            assert!(!is_named(&judged(&last_bit, output, None)), "{config:?} {output}");
            let negated = changed(&case, output, |bits| {
                bits.iter_mut().filter(|b| **b & 0x7fff != 0).for_each(|b| *b ^= 0x8000);
            });
            let report = judged(&negated, output, None);
            assert_ne!(report.verdict, Verdict::Pass, "{config:?} {output}: {report:?}");
            refused += usize::from(report.verdict == Verdict::Fail);
        }
    }
    assert!(found >= CASES && refused >= CASES, "{found} {refused}");
}
