//! Running a plan: workers take jobs in order, within a memory budget, and write each piece
//! at its place.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use super::budget::Budget;
use super::error::ConvertError;
use super::job::{self, Constants};
use super::names::Kind;
use super::plan::{Plan, Settings, ShardPlan, Source, copy_runs};
use super::progress::Progress;
use super::report::Reporter;
use super::shard::{self, ShardWriter};
use crate::model::Model;

/// Memory that jobs in progress may take together, in bytes.
const BUDGET: u64 = 1 << 30;

/// How a plan is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Execution {
    /// Worker threads.
    pub threads: usize,
    /// Stop after this many files have been finished in this run. For tests of resumption.
    pub stop_after: Option<usize>,
}

/// A unit of work of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Job {
    Rows { stack: usize, expert: usize, rows: Range<usize> },
    Copy { item: usize, bytes: Range<u64> },
}

/// The jobs of a file, in the order of their data.
fn jobs(plan: &Plan, shard: &ShardPlan) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (i, item) in shard.items.iter().enumerate() {
        match item.source {
            Source::Copy => {
                let len = item.spec.byte_len().unwrap_or(0);
                jobs.extend(copy_runs(len).map(|bytes| Job::Copy { item: i, bytes }));
            }
            Source::Stack { stack, kind: Kind::Weight } => {
                let p = &plan.stacks[stack];
                for expert in 0..p.experts.len() {
                    jobs.extend(p.runs().map(|rows| Job::Rows { stack, expert, rows }));
                }
            }
            // Written by the jobs of the weight.
            Source::Stack { .. } => {}
        }
    }
    jobs
}

/// What all jobs need.
struct Context<'a> {
    model: &'a Model<'a>,
    plan: &'a Plan,
    settings: &'a Settings,
    constants: &'a [Constants],
    pool: &'a rayon::ThreadPool,
    budget: Budget,
    reporter: &'a Reporter,
}

impl Context<'_> {
    /// Most memory of a job, in bytes. A copied piece is written from the mapped file.
    fn memory(&self, job: &Job) -> u64 {
        match job {
            Job::Rows { stack, .. } => self.plan.stacks[*stack].job_bytes(),
            Job::Copy { .. } => 0,
        }
    }

    fn run(&self, job: &Job, shard: &ShardPlan, writer: &ShardWriter) -> Result<(), ConvertError> {
        match job {
            Job::Rows { stack, expert, rows } => {
                let plan = &self.plan.stacks[*stack];
                let constants = self.constants[*stack];
                let pieces = self
                    .pool
                    .install(|| job::run(self.model, plan, constants, self.settings, *expert, rows))
                    .map_err(ConvertError::weight(&plan.module))?;
                for piece in pieces {
                    let source = Source::Stack { stack: *stack, kind: piece.kind };
                    let bytes = piece.bytes.get();
                    writer.write(source, piece.offset, bytes)?;
                    self.reporter.advance(bytes.len() as u64);
                }
            }
            Job::Copy { item, bytes } => {
                let tensor = self.model.tensor(&shard.items[*item].spec.name)?;
                let piece = &tensor.bytes()[bytes.start as usize..bytes.end as usize];
                writer.write_item(*item, bytes.start, piece)?;
                self.reporter.advance(piece.len() as u64);
            }
        }
        Ok(())
    }

    /// All jobs of a file on `threads` threads; the first error stops them.
    fn write_shard(
        &self,
        shard: &ShardPlan,
        writer: &ShardWriter,
        threads: usize,
    ) -> Result<(), ConvertError> {
        let jobs = jobs(self.plan, shard);
        let next = AtomicUsize::new(0);
        let failed: Mutex<Option<ConvertError>> = Mutex::new(None);
        let worker = || {
            while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let share = self.budget.take(self.memory(job));
                let done = self.run(job, shard, writer);
                drop(share);
                if let Err(e) = done {
                    // The others find no more jobs.
                    next.store(jobs.len(), Ordering::Relaxed);
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                }
            }
        };
        std::thread::scope(|s| {
            for _ in 1..threads.min(jobs.len()) {
                s.spawn(worker);
            }
            worker();
        });
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(()),
            Some(e) => Err(e),
        }
    }
}

/// The constants of every stack, in parallel.
///
/// # Errors
/// [`ConvertError::Weight`] naming the module.
pub fn constants(
    model: &Model<'_>,
    plan: &Plan,
    settings: &Settings,
    pool: &rayon::ThreadPool,
) -> Result<Vec<Constants>, ConvertError> {
    pool.install(|| {
        let of = |p: &super::plan::StackPlan| {
            Constants::of(model, p, settings).map_err(ConvertError::weight(&p.module))
        };
        plan.stacks.par_iter().map(of).collect()
    })
}

/// Writes every file of `plan` that `progress` does not have yet.
///
/// # Errors
/// [`ConvertError`]; files finished before it stay, and the next run continues after them.
pub fn write_shards(
    model: &Model<'_>,
    plan: &Plan,
    settings: &Settings,
    constants: &[Constants],
    pool: &rayon::ThreadPool,
    out: &Path,
    progress: &mut Progress,
    execution: Execution,
    reporter: &Reporter,
) -> Result<usize, ConvertError> {
    let budget = Budget::new(BUDGET);
    let context = Context { model, plan, settings, constants, pool, budget, reporter };
    let mut kept = 0;
    let mut finished = 0;
    std::thread::scope(|scope| {
        // A file is made durable while the next one is being filled.
        let mut last: Option<(String, u64, std::thread::ScopedJoinHandle<'_, _>)> = None;
        for shard in &plan.shards {
            let len = shard::file_len(shard)?;
            if progress.has(out, &shard.name, len) {
                kept += 1;
                reporter.advance(shard.items.iter().filter_map(|i| i.spec.byte_len()).sum());
                continue;
            }
            reporter.file(&shard.name);
            let writer = ShardWriter::create(out, shard)?;
            context.write_shard(shard, &writer, execution.threads.max(1))?;
            if let Some((name, len, handle)) = last.take() {
                join(handle)?;
                progress.finished(out, name, len)?;
            }
            last = Some((shard.name.clone(), len, scope.spawn(move || writer.finish())));
            finished += 1;
            if execution.stop_after == Some(finished) {
                break;
            }
        }
        if let Some((name, len, handle)) = last.take() {
            join(handle)?;
            progress.finished(out, name, len)?;
        }
        if execution.stop_after == Some(finished) {
            return Err(ConvertError::Stopped { files: finished });
        }
        Ok(kept)
    })
}

fn join(
    handle: std::thread::ScopedJoinHandle<'_, Result<(), ConvertError>>,
) -> Result<(), ConvertError> {
    match handle.join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
