//! Fuzzes a whole kernel through cases: generates inputs, judges the kernel's outputs by
//! [`check`](marlinspike::check), and shrinks a failing case to a minimal one with its cause.
//!
//! ```
//! use marlinspike::case::Op;
//! use marlinspike_proptests::campaign::{Campaign, Filter, Limit, Outputs, Trial};
//!
//! // A kernel that only flips the highest bit of every code.
//! let campaign = Campaign::new(Op::Preprocess, 7, Filter::default())?;
//! let mut wrong = |trial: &Trial| {
//!     let mut qweight = trial.case.inputs["qweight"].elements::<u32>().into_owned();
//!     qweight.iter_mut().for_each(|word| *word ^= 0x8888_8888);
//!     let shape = trial.wanted[0].shape.clone().unwrap();
//!     let dtype = marlinspike::num::tensor::DType::I32;
//!     let y = marlinspike::num::tensor::Tensor::from_vec("qweight", dtype, shape, qweight).unwrap();
//!     Ok(Outputs::from([("qweight".to_owned(), y)]))
//! };
//! let summary = campaign.run(&mut wrong, &Limit::cases(4), &mut |_| ())?;
//! assert!(!summary.findings.is_empty());
//! # Ok::<(), marlinspike_proptests::campaign::CampaignError>(())
//! ```
//!
//! A kernel is anything that implements [`Kernel`]: a closure, another process ([`ProcessKernel`]) or
//! a shared library ([`LibraryKernel`]).

mod configurations;
mod coverage;
mod error;
#[cfg(unix)]
mod exchange;
mod filter;
mod finding;
mod kernel;
mod laws;
#[cfg(unix)]
mod library;
mod merge;
#[cfg(unix)]
mod process;
mod regressions;
mod shard;
mod shrink;
mod summary;
#[cfg(unix)]
mod supervisor;
#[cfg(unix)]
mod tree;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use marlinspike::case::{Case, CaseConfig, Op};
use marlinspike::check::{CaseReport, Declared, Verdict, check_case_as};
use marlinspike::vectors::Generator;
use serde_json::{Map, Value};

pub use coverage::Coverage;
pub use error::CampaignError;
pub use filter::{Filter, axes};
pub use finding::{Failure, Finding};
pub use kernel::{Fault, Kernel, OutputSpec, Outputs, Trial};
pub use laws::Laws;
#[cfg(unix)]
pub use library::{ABI_VERSION, HEADER, LibraryKernel, serve};
pub use merge::{Merged, MergedCampaign, MergedFinding, MergedRun, MissingShard, merge};
#[cfg(unix)]
pub use process::{ProcessKernel, Protocol};
pub use regressions::{keep, kept};
pub use shard::Shard;
pub use summary::{KeptCase, KeptResult, RecordedCause, RecordedFinding, Run, Summary};
#[cfg(unix)]
pub use supervisor::{supervise, supervised};

use shrink::Shrinker;

/// The configuration of a campaign.
#[derive(Debug, Clone)]
pub struct Campaign {
    generator: Generator,
    op: Op,
    filter: Filter,
    /// Config keys that every case gets, such as a declared `schedule`.
    pub set: Map<String, Value>,
    /// The outputs that the kernel must compute; if empty, `y`, or all outputs of an operation
    /// without `y`.
    pub outputs: Vec<String>,
    /// The declared arithmetic of the kernel.
    pub declared: Declared,
    /// Properties that are tested on cases without a wrong output.
    pub laws: Laws,
    /// The part of the cases to run.
    pub shard: Shard,
    /// Limits on kernel runs and time for shrinking one finding.
    pub shrink: (u32, Duration),
}

/// Limits at which a campaign ends.
#[derive(Debug, Clone, Copy)]
pub struct Limit {
    /// Cases.
    pub cases: u64,
    /// Time; a case that has started is finished.
    pub time: Option<Duration>,
    /// Distinct findings.
    pub findings: usize,
}

impl Limit {
    /// A number of cases and 8 distinct findings, without a limit of time.
    pub fn cases(cases: u64) -> Self {
        Self { cases, time: None, findings: 8 }
    }
}

/// The result of one case.
#[derive(Debug, Clone)]
pub enum Judgement {
    /// Every output passed.
    Pass,
    /// No output failed, but some could not be judged.
    Unchecked(String),
    /// The kernel does not support the configuration.
    Skipped(String),
    /// The kernel is wrong or violated the protocol.
    Wrong(Box<Failure>),
}

/// Progress of a campaign.
#[derive(Debug)]
pub enum Event<'e> {
    /// A kept case was judged.
    Kept(&'e Path, &'e Judgement),
    /// A case was judged.
    Judged(u64, &'e Judgement),
    /// A finding is being shrunk.
    Shrinking(&'e str),
    /// A finding that differs from all previous ones.
    Found(&'e Finding),
}

impl Campaign {
    /// A campaign over the configurations of `op` that pass `filter`.
    ///
    /// # Errors
    /// [`CampaignError::Filter`]; [`CampaignError::Reference`] where the operation's cases cannot be
    /// generated.
    pub fn new(op: Op, seed: u64, filter: Filter) -> Result<Self, CampaignError> {
        let generator = filter.restrict(Generator::new(op, seed)?.hard())?;
        Ok(Self {
            generator,
            op,
            filter,
            set: Map::new(),
            outputs: Vec::new(),
            declared: Declared::default(),
            laws: Laws::default(),
            shard: Shard::WHOLE,
            shrink: (400, Duration::from_secs(60)),
        })
    }

    /// The operation.
    pub fn op(&self) -> Op {
        self.op
    }

    /// The configurations that cases are drawn from.
    pub fn lattice(&self) -> &[CaseConfig] {
        self.generator.lattice()
    }

    /// The inputs of case `index`.
    ///
    /// # Errors
    /// [`CampaignError::Output`]; the reference's errors for keys of [`Campaign::set`].
    pub fn trial(&self, index: u64) -> Result<Trial, CampaignError> {
        self.trial_of(self.generator.case(index)?)
    }

    /// The inputs of a drawn case, without the canonical schedule that generated cases declare and
    /// with the keys of [`Campaign::set`].
    fn trial_of(&self, mut case: Case<'static>) -> Result<Trial, CampaignError> {
        let undeclared = case.config.without_schedules().map_err(marlinspike::Error::from)?;
        let mut map = undeclared.to_json();
        map.extend(self.set.clone());
        case.config = CaseConfig::from_json(case.op, &map).map_err(marlinspike::Error::from)?;
        Trial::new(case, &self.outputs)
    }

    /// Runs the kernel on the cases kept in `folder`, then on drawn cases, and keeps each finding in
    /// `folder`.
    ///
    /// # Errors
    /// The errors of [`kept`], [`Campaign::run`] and [`keep`].
    pub fn run_with_kept(
        &self,
        folder: Option<&Path>,
        kernel: &mut dyn Kernel,
        limit: &Limit,
        on: &mut dyn FnMut(Event<'_>),
    ) -> Result<Run, CampaignError> {
        let mut judged = Vec::new();
        for (path, trial) in folder.map_or(Ok(Vec::new()), |folder| kept(self, folder))? {
            let judgement = self.judge(kernel, &trial)?;
            on(Event::Kept(&path, &judgement));
            judged.push(KeptCase::new(&path, &judgement));
        }
        let summary = self.run(kernel, limit, on)?;
        let mut files = Vec::new();
        for (folder, finding) in
            folder.iter().flat_map(|f| summary.findings.iter().map(move |x| (f, x)))
        {
            files.push(keep(folder, finding)?.display().to_string());
        }
        Ok(Run::new(summary, files, judged))
    }

    /// Runs the kernel on cases until a limit is reached.
    ///
    /// # Errors
    /// The errors of [`Campaign::trial`] and [`Campaign::judge`]. A kernel's faults are findings.
    pub fn run(
        &self,
        kernel: &mut dyn Kernel,
        limit: &Limit,
        on: &mut dyn FnMut(Event<'_>),
    ) -> Result<Summary, CampaignError> {
        let start = Instant::now();
        let mut summary = self.empty(limit.cases);
        let mut shrunk = BTreeSet::new();
        for index in (0..limit.cases).filter(|index| self.shard.contains(*index)) {
            let late = limit.time.is_some_and(|time| start.elapsed() >= time);
            if late || summary.findings.len() >= limit.findings {
                break;
            }
            summary.next = index + 1;
            let trial = self.trial(index)?;
            let judgement = self.judge(kernel, &trial)?;
            on(Event::Judged(index, &judgement));
            if !matches!(judgement, Judgement::Skipped(_)) {
                summary.coverage.count(&trial.case.config);
            }
            match judgement {
                Judgement::Pass => summary.passed += 1,
                Judgement::Skipped(reason) => {
                    summary.skipped += 1;
                    summary.skipped_reason.get_or_insert(reason);
                }
                Judgement::Unchecked(reason) => {
                    summary.unchecked += 1;
                    summary.unchecked_reason.get_or_insert(reason);
                }
                Judgement::Wrong(failure) => {
                    summary.failed += 1;
                    if shrunk.insert(failure.signature()) {
                        on(Event::Shrinking(&failure.signature()));
                        let finding = self.shrunk(kernel, index, trial, *failure);
                        // Shrinking may reveal a common cause of two different failures.
                        if !summary.findings.iter().any(|f| f.signature == finding.signature) {
                            shrunk.insert(finding.signature.clone());
                            on(Event::Found(&finding));
                            summary.findings.push(finding);
                        }
                    }
                }
            }
        }
        summary.seconds = start.elapsed().as_secs_f64();
        Ok(summary)
    }

    /// Runs the kernel on one case, judges its outputs and tests [`Campaign::laws`]. A trial's inputs are
    /// valid, so outputs that `check` refuses, such as `topk_ids` out of range, are the kernel's fault.
    ///
    /// # Errors
    /// [`CampaignError::Kernel`] for a kernel that cannot be started, [`CampaignError::Exchange`] if its
    /// inputs or outputs cannot be exchanged.
    pub fn judge(
        &self,
        kernel: &mut dyn Kernel,
        trial: &Trial,
    ) -> Result<Judgement, CampaignError> {
        let wrong = |fault| match fault {
            Fault::NotStarted { program, problem } => {
                Err(CampaignError::Kernel { kernel: program, problem })
            }
            Fault::Exchange { folder, problem } => Err(CampaignError::Exchange { folder, problem }),
            fault => Ok(Judgement::Wrong(Box::new(Failure::fault(trial, fault)))),
        };
        let unreadable = |detail| wrong(Fault::Unreadable { detail });
        let outputs = match kernel.run(trial) {
            Ok(outputs) => outputs,
            Err(Fault::Unsupported { reason }) => return Ok(Judgement::Skipped(reason)),
            Err(fault) => return wrong(fault),
        };
        let mut case = trial.case.clone();
        for (name, tensor) in &outputs {
            if !trial.wanted.iter().any(|wanted| wanted.name == *name) {
                let expected: Vec<_> = trial.wanted.iter().map(|w| w.name.as_str()).collect();
                return unreadable(format!(
                    "found output `{name}`, expected {}",
                    expected.join(", ")
                ));
            }
            case.add_output(name, tensor.clone());
        }
        if let Some(absent) = trial.wanted.iter().find(|w| !case.outputs.contains_key(&w.name)) {
            return unreadable(format!("output `{}` is absent", absent.name));
        }
        let report = match check_case_as(&case, &self.declared) {
            Ok(report) => report,
            Err(error) => return unreadable(error.to_string()),
        };
        if report.verdict != Verdict::Fail
            && let Some(fault) = self.laws.broken(kernel, trial, &outputs)
        {
            return wrong(fault);
        }
        Ok(match report.verdict {
            Verdict::Pass => Judgement::Pass,
            Verdict::Fail => Judgement::Wrong(Box::new(Failure::wrong(case, report))),
            Verdict::Unchecked => Judgement::Unchecked(unchecked_reason(&report)),
        })
    }

    /// The smallest failing case that shrinking finds.
    fn shrunk(
        &self,
        kernel: &mut dyn Kernel,
        index: u64,
        trial: Trial,
        failure: Failure,
    ) -> Finding {
        let mut shrinker = Shrinker::new(self, kernel, failure.clone());
        let (trial, mut minimal) = shrinker.minimal(trial, failure.clone());
        let runs = shrinker.runs();
        // A kept case passes the same reference outputs to the kernel.
        for (name, tensor) in trial.reference {
            minimal.case.outputs.entry(name).or_insert(tensor);
        }
        Finding::new(self, index, failure, minimal, runs)
    }
}

fn unchecked_reason(report: &CaseReport) -> String {
    let unchecked = report.outputs.iter().find(|o| o.verdict == Verdict::Unchecked);
    unchecked.and_then(|o| o.note.clone()).unwrap_or_else(|| "there is no output".to_owned())
}
