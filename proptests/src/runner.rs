//! Tries every law on many inputs.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;

use marlinspike::vectors::Rng;
use proptest::test_runner::{
    Config as ProptestConfig, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner,
};

use crate::laws::{broken, laws};
use crate::report::{LawReport, Report};
use crate::subject::{Operation, Subject, SubjectError};

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

/// A subject, how many elements it was asked for, and whether it was asked for an input that it does
/// not take: laws make others of the one that was drawn (a rank's part).
struct Counted<'s, S> {
    subject: &'s S,
    outputs: Cell<usize>,
    refused: Cell<bool>,
}

impl<O: Operation, S: Subject<O>> Subject<O> for Counted<'_, S> {
    fn call(&self, input: &O::Input, out: &mut [O::Element]) -> Result<(), SubjectError> {
        self.outputs.set(self.outputs.get() + out.len());
        let called = self.subject.call(input, out);
        self.refused.set(self.refused.get() || called.is_err() && !self.subject.takes(input));
        called
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
                // What a subject does not take is drawn again; most of a lattice may be that.
                max_global_rejects: config.cases.saturating_mul(64).max(1024),
                ..ProptestConfig::default()
            },
            TestRng::from_seed(RngAlgorithm::ChaCha, &bytes),
        );
        let counted = Counted { subject, outputs: Cell::new(0), refused: Cell::new(false) };
        let (passed, left_out) = (Cell::new(0), Cell::new(0));
        // The last failure seen is the minimal one's: shrinking only keeps what fails.
        let last = RefCell::new(None);
        let outcome = runner.run(&O::inputs(), |input| {
            let leave_out = || {
                left_out.set(left_out.get() + u32::from(last.borrow().is_none()));
                Err(TestCaseError::reject("the subject does not take it"))
            };
            if !subject.takes(&input) {
                return leave_out();
            }
            counted.refused.set(false);
            match (law.check)(&counted, &input) {
                Err(_) if counted.refused.get() => leave_out(),
                Ok(()) => {
                    passed.set(passed.get() + u32::from(last.borrow().is_none()));
                    Ok(())
                }
                Err(failure) => {
                    let reason = TestCaseError::fail(failure.what.clone());
                    *last.borrow_mut() = Some(failure);
                    Err(reason)
                }
            }
        });
        let failure = match outcome {
            Ok(()) => None,
            Err(TestError::Fail(reason, minimal)) => {
                Some(last.take().unwrap_or_else(|| broken::<O>(&minimal, reason.message())))
            }
            Err(TestError::Abort(reason)) => Some(crate::Failure {
                input: "none could be drawn".to_owned(),
                minimal: String::new(),
                what: reason.message().to_owned(),
                mismatch: None,
            }),
        };
        let law = LawReport {
            law: law.name,
            passed: passed.get(),
            left_out: left_out.get(),
            outputs: counted.outputs.get(),
            seed: config.seed,
            failure,
        };
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
