//! Tests every property on many inputs.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;

use marlinspike::vectors::Rng;
use proptest::test_runner::{
    Config as ProptestConfig, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner,
};

use crate::laws::{broken, laws};
use crate::report::{LawReport, Report};
use crate::subject::{Operation, Subject, SubjectError};

/// The configuration of a run.
#[derive(Debug, Clone)]
pub struct Config {
    /// Inputs per property.
    pub cases: u32,
    /// Seed of the inputs; reproduces a failure.
    pub seed: u64,
    /// A folder for the seed and the minimal input of each failure, one file per operation and
    /// property; `None` writes nothing.
    pub regressions: Option<PathBuf>,
}

impl Default for Config {
    fn default() -> Self {
        Self { cases: 256, seed: 0, regressions: None }
    }
}

/// A subject with the number of elements it computed and whether it was called with an unsupported
/// input, since properties derive inputs from the drawn one (such as a rank's part).
struct Counted<'s, O: Operation> {
    subject: &'s dyn Subject<O>,
    outputs: Cell<usize>,
    refused: Cell<bool>,
}

impl<O: Operation> Subject<O> for Counted<'_, O> {
    fn call(&self, input: &O::Input, out: &mut [O::Element]) -> Result<(), SubjectError> {
        self.outputs.set(self.outputs.get() + out.len());
        let called = self.subject.call(input, out);
        self.refused.set(self.refused.get() || called.is_err() && !self.subject.takes(input));
        called
    }

    fn claims_bits(&self) -> bool {
        self.subject.claims_bits()
    }
}

/// Tests every property of `O` on `subject` and reports the results. Each property stops at its
/// first failure, which is shrunk to a minimal input.
pub fn run<O: Operation, S: Subject<O>>(subject: &S, config: &Config) -> Report {
    run_dyn::<O>(subject, config)
}

/// [`run`], compiled once for each operation: a copy for each subject takes minutes.
fn run_dyn<O: Operation>(subject: &dyn Subject<O>, config: &Config) -> Report {
    let mut report = Report { operation: O::NAME, seed: config.seed, laws: Vec::new() };
    for (i, law) in laws::<O>().into_iter().enumerate() {
        let mut words = Rng::for_case(config.seed, i as u64);
        let bytes: Vec<u8> = (0..4).flat_map(|_| words.next_u64().to_le_bytes()).collect();
        let mut runner = TestRunner::new_with_rng(
            ProptestConfig {
                cases: config.cases,
                failure_persistence: None,
                // A subject may be slow, so shrinking is limited to a number of calls.
                max_shrink_iters: 512,
                // Unsupported inputs are drawn again; a subject may not support most of a lattice.
                max_global_rejects: config.cases.saturating_mul(64).max(1024),
                ..ProptestConfig::default()
            },
            TestRng::from_seed(RngAlgorithm::ChaCha, &bytes),
        );
        let counted = Counted { subject, outputs: Cell::new(0), refused: Cell::new(false) };
        let (passed, left_out) = (Cell::new(0), Cell::new(0));
        // The last failure is the minimal one, since shrinking keeps only failing inputs.
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
            // A failed write must not hide the report.
            let _ = std::fs::create_dir_all(folder)
                .and_then(|()| std::fs::write(folder.join(name), text));
        }
        report.laws.push(law);
    }
    report
}
