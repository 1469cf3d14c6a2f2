//! Cases of the operations beside Marlin: generated ones pass, and every known mistake is refused and
//! named.

use std::collections::{BTreeMap, BTreeSet};

use marlinspike::case::{Case, Op};
use marlinspike::check::{Verdict, check_case, mistaken};
use marlinspike::vectors::Generator;

const OPS: [(Op, u64); 10] = [
    (Op::SwizzleBlockscale, 150),
    (Op::TrtllmMxInt4, 6),
    (Op::Nvfp4Experts, 32),
    (Op::Fp8Requantize, 36),
    (Op::NormalizeFnuz, 24),
    (Op::GptOssMxfp4, 60),
    (Op::ScaledFp4Quant, 80),
    (Op::ScaledFp4Mm, 72),
    (Op::ScaledMm, 72),
    (Op::Fp8Moe, 24),
];

/// A case by its number, through a file's bytes.
fn generated(generator: &Generator, index: u64) -> Vec<u8> {
    let case = generator.case(index).unwrap_or_else(|e| panic!("case {index}: {e}"));
    let bytes = case.to_bytes().unwrap();
    let read = Case::parse(&bytes).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    assert_eq!(read.to_bytes().unwrap(), bytes, "{}", case.name);
    assert_eq!((&read.config, &read.outputs), (&case.config, &case.outputs), "{}", case.name);
    bytes
}

#[test]
fn generated_cases_pass() {
    for (op, count) in OPS {
        let generator = Generator::new(op, 11).unwrap();
        for index in 0..count {
            let bytes = generated(&generator, index);
            let case = Case::parse(&bytes).unwrap();
            let report = check_case(&case).unwrap_or_else(|e| panic!("{}: {e}", case.name));
            assert_eq!(report.outputs.len(), case.outputs.len(), "{}", case.name);
            for output in &report.outputs {
                assert_eq!(output.verdict, Verdict::Pass, "{}: {output:#?}", case.name);
            }
        }
    }
}

/// Of every mistake that shows in a case, the check says that something is wrong, and over the cases of
/// an operation names each mistake at least once by its own id.
#[test]
fn mistakes_are_refused_and_named() {
    for (op, count) in OPS {
        let generator = Generator::new(op, 12).unwrap();
        let mut named: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
        for index in 0..count.min(30) {
            let case = generator.case(index).unwrap();
            for (id, wrong) in mistaken(&case).unwrap() {
                let report = check_case(&wrong).unwrap();
                let names = named.entry(id).or_default();
                let failed = report.outputs.iter().filter(|o| o.verdict == Verdict::Fail);
                let diagnoses = failed.filter_map(|o| o.diagnosis.as_ref());
                names.extend(diagnoses.map(|d| d.id.clone()));
                // Products without a schedule may hide a mistake in their bound; bits may not.
                let bounded = report.outputs.iter().any(|o| {
                    o.note.as_deref().is_some_and(|n| n.contains("bound: "))
                });
                assert!(
                    bounded || report.verdict == Verdict::Fail,
                    "{op}: {id} passed in {}\n{report:#?}",
                    case.name
                );
            }
        }
        assert!(named.len() >= 4, "{op}: {named:#?}");
        for (id, names) in &named {
            assert!(names.contains(*id), "{op}: {id} is only ever called {names:?}");
        }
        println!("{op}: {:?}", named.keys());
    }
}
