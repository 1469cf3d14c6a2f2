//! Tries every law on many inputs.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;

use marlinspike::vectors::Rng;
use proptest::test_runner::{
    Config as ProptestConfig, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner,
};

use crate::laws::{broken, laws};
use crate::report::{LawReport, Report};
use crate::subject::{Operation, Subject};

/// How much is tried.
#[derive(Debug, Clone)]
pub struct Config {
    /// Inputs per law.
    pub cases: u32,
    /// Where the inputs come from; print it, and a failure can be seen again.
    pub seed: u64,
    /// A folder where the seed and the minimal input of a failure are written, one file per
    /// operation and law; nothing is written without one.
    pub regressions: Option<PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self { cases: 256, seed: 0, regressions: None }
    }
}

/// Tries every law of `O` on `subject`; the report says which held. Each law stops at its first
/// failure, shrunk to a minimal input.
pub fn run<O: Operation, S: Subject<O>>(subject: &S, config: &Config) -> Report {
    let mut report = Report { operation: O::NAME, seed: config.seed, laws: Vec::new() };
    for (i, law) in laws::<O>().into_iter().enumerate() {
        let mut words = Rng::for_case(config.seed, i as u64);
        let bytes: Vec<u8> = (0..4).flat_map(|_| words.next_u64().to_le_bytes()).collect();
        let mut runner = TestRunner::new_with_rng(
            ProptestConfig {
                cases: config.cases,
                failure_persistence: None,
                // A subject may be slow; a minimal case is worth some calls, not any number.
                max_shrink_iters: 512,
                ..ProptestConfig::default()
            },
            TestRng::from_seed(RngAlgorithm::ChaCha, &bytes),
        );
        let passed = Cell::new(0);
        // The last failure seen is the minimal one's: shrinking only keeps what fails.
        let failed = RefCell::new(Vec::new());
        let outcome = runner.run(&O::inputs(), |input| match (law.check)(subject, &input) {
            Ok(()) => {
                passed.set(passed.get() + u32::from(failed.borrow().is_empty()));
                Ok(())
            }
            Err(failure) => {
                failed.borrow_mut().push(());
                Err(TestCaseError::fail(failure.what))
            }
        });
        let failure = match outcome {
            Ok(()) => None,
            // A subject that is not deterministic may pass on the input that it failed on.
            Err(TestError::Fail(reason, minimal)) => {
                let again = (law.check)(subject, &minimal).err();
                Some(again.unwrap_or_else(|| broken::<O>(&minimal, reason.message())))
            }
            Err(TestError::Abort(reason)) => Some(crate::Failure {
                input: "none could be drawn".to_owned(),
                minimal: String::new(),
                what: reason.message().to_owned(),
                mismatch: None,
            }),
        };
        let law = LawReport { law: law.name, passed: passed.get(), seed: config.seed, failure };
        if let (Some(folder), Some(failure)) = (&config.regressions, &law.failure) {
            let name = format!("{}-{i}-{:016x}.txt", O::NAME, config.seed);
            let text = format!("seed {:#018x}\nlaw {}\n{failure:#?}\n", config.seed, law.law);
            // A report matters more than its copy on a full disk.
            let _ = std::fs::create_dir_all(folder)
                .and_then(|()| std::fs::write(folder.join(name), text));
        }
        report.laws.push(law);
    }
    report
}
