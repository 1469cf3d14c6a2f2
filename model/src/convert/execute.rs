//! Runs a plan: workers take jobs within a memory budget and write each piece to its place.
//!
//! Operating systems serialize writes to a file, so each worker starts a file of its own, and helps
//! with other workers' files once none is left to start.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;

use rayon::prelude::*;

use super::budget::Budget;
use super::error::ConvertError;
use super::folder::{Folder, Place};
use super::inputs::Inputs;
use super::job::Job as PackJob;
use super::names::TensorKind;
use super::piece::Constants;
use super::plan::{ConversionPlan, ShardPlan, Source, copy_runs};
use super::progress::Progress;
use super::settings::Settings;
pub use super::settings::{Execution, MEMORY};
use super::shard::ShardWriter;
use super::stack::StackPlan;
use super::stack::info::kv_heads;
use super::stack::part::MatrixPart;
use super::target;
use crate::model::Model;

/// Files that are written at the same time: an interrupted run loses their contents.
const OPEN_FILES: usize = 4;

/// Threads that verify files and make them durable. At most `OPEN_FILES + CLOSERS` files and one per
/// worker are open.
const CLOSERS: usize = 4;

/// What a run did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Files that an earlier run had finished.
    pub kept: usize,
    /// Peak memory of all jobs in progress together, in bytes, as the budget counts it.
    pub peak_memory: u64,
}

/// A unit of work of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Job {
    Part { stack: usize, expert: usize, part: MatrixPart },
    Copy { item: usize, bytes: Range<u64> },
}

/// A file in progress.
#[derive(Debug)]
struct OpenFile<'p> {
    plan: &'p ShardPlan,
    writer: ShardWriter<'p>,
    jobs: Vec<Job>,
    /// The next job to take.
    next: AtomicUsize,
    /// Jobs that are not done.
    left: AtomicUsize,
    workers: AtomicUsize,
}

/// State that the workers share.
struct Queue<'a, 's> {
    /// Files that no worker has started.
    waiting: std::vec::IntoIter<&'a ShardPlan>,
    /// Files with jobs left to take.
    open: Vec<Arc<OpenFile<'a>>>,
    finished: usize,
    /// Threads that close files.
    closers: usize,
    folder: &'a mut Folder<'s>,
    failed: Option<ConvertError>,
}

/// A plan and what its jobs read.
#[derive(Clone, Copy)]
pub struct Work<'a> {
    /// The model that is converted.
    pub model: &'a Model<'a>,
    /// What to write.
    pub plan: &'a ConversionPlan,
    /// What the plan was made from.
    pub settings: &'a Settings,
    /// The constants of each of the plan's stacks.
    pub constants: &'a [Constants],
    /// Threads for large jobs.
    pub pool: &'a rayon::ThreadPool,
    /// The hashed input files.
    pub inputs: &'a Inputs,
    /// Receives what is written.
    pub progress: &'a dyn Progress,
}

/// What all jobs need.
struct Context<'a, 's> {
    work: Work<'a>,
    place: Place<'a>,
    budget: Budget,
    /// Memory limit of one job, in bytes, where the work can be cut that small.
    share: u64,
    open_files: usize,
    queue: Mutex<Queue<'a, 's>>,
    /// Whether a worker has failed; checked before each job.
    stopped: AtomicBool,
}

impl<'a, 's> Context<'a, 's> {
    fn queue(&self) -> MutexGuard<'_, Queue<'a, 's>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, error: ConvertError) {
        self.queue().failed.get_or_insert(error);
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// The jobs of a file, in the order of their data.
    fn jobs(&self, shard: &ShardPlan) -> Result<Vec<Job>, ConvertError> {
        let mut jobs = Vec::new();
        for (i, item) in shard.items.iter().enumerate() {
            match item.source {
                Source::Copy => {
                    let len = item.spec.byte_len().unwrap_or(0);
                    jobs.extend(copy_runs(len).map(|bytes| Job::Copy { item: i, bytes }));
                }
                Source::Stack { stack, kind: TensorKind::Weight } => {
                    let plan = &self.work.plan.stacks[stack];
                    let parts = plan.parts(self.share);
                    self.expect_room(plan, &parts)?;
                    for expert in 0..plan.experts.len() {
                        let job =
                            |part: &MatrixPart| Job::Part { stack, expert, part: part.clone() };
                        jobs.extend(parts.iter().map(job));
                    }
                }
                // Written by the jobs of the weight.
                Source::Stack { .. } => {}
            }
        }
        Ok(jobs)
    }

    /// Returns an error for a stack whose smallest part needs more than the whole budget.
    fn expect_room(&self, plan: &StackPlan, parts: &[MatrixPart]) -> Result<(), ConvertError> {
        let needed = parts.iter().map(|part| plan.part_bytes(part)).max().unwrap_or(0);
        if needed <= self.budget.total() {
            return Ok(());
        }
        Err(ConvertError::Memory {
            module: plan.module.clone(),
            shape: plan.slice.shape,
            needed,
            limit: self.budget.total(),
        })
    }

    /// The next file for a worker: a new one, or else the open one with the fewest workers.
    fn next_file(&self) -> Result<Option<Arc<OpenFile<'a>>>, ConvertError> {
        let mut queue = self.queue();
        // Workers that hold a file without jobs left will finish it.
        queue.open.retain(|f| f.next.load(Ordering::Relaxed) < f.jobs.len());
        if queue.open.len() < self.open_files
            && let Some(plan) = queue.waiting.next()
        {
            self.work.progress.file(&plan.name);
            let jobs = self.jobs(plan)?;
            let file = Arc::new(OpenFile {
                plan,
                writer: ShardWriter::create(&self.place, plan)?,
                left: AtomicUsize::new(jobs.len()),
                jobs,
                next: AtomicUsize::new(0),
                workers: AtomicUsize::new(1),
            });
            queue.open.push(file.clone());
            return Ok(Some(file));
        }
        let file = queue.open.iter().min_by_key(|f| f.workers.load(Ordering::Relaxed)).cloned();
        if let Some(file) = &file {
            file.workers.fetch_add(1, Ordering::Relaxed);
        }
        Ok(file)
    }

    /// Takes jobs until none is left or a worker fails.
    fn work<'t>(&'t self, scope: &'t Scope<'t, '_>) -> Result<(), ConvertError> {
        while let Some(file) = self.next_file()? {
            // A file of empty tensors has no jobs.
            if file.jobs.is_empty() {
                self.close(&file, scope);
            }
            while let Some(job) = file.jobs.get(file.next.fetch_add(1, Ordering::Relaxed)) {
                if self.stopped.load(Ordering::Relaxed) {
                    return Ok(());
                }
                self.run(job, &file)?;
                // Acquire and release: the worker of the last job sees all writes.
                if file.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                    self.close(&file, scope);
                }
            }
            file.workers.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn run(&self, job: &Job, file: &OpenFile<'_>) -> Result<(), ConvertError> {
        match job {
            Job::Part { stack, expert, part } => {
                let work = &self.work;
                let (plan, constants) =
                    (&self.work.plan.stacks[*stack], self.work.constants[*stack]);
                let _share = self.budget.take(plan.part_bytes(part));
                let (model, settings, expert) = (work.model, work.settings, *expert);
                let job = PackJob { model, plan, constants, settings, expert, part };
                let pack = || job.run();
                let pieces = match plan.is_large(part) {
                    true => work.pool.install(pack),
                    false => pack(),
                };
                for piece in pieces.map_err(ConvertError::weight(&plan.module))? {
                    let source = Source::Stack { stack: *stack, kind: piece.kind };
                    for (at, bytes) in piece.runs() {
                        file.writer.write(source, at, bytes)?;
                    }
                    self.work.progress.advance(piece.bytes.get().len() as u64);
                }
            }
            // Written from the mapped file.
            Job::Copy { item, bytes } => {
                let tensor = self.work.model.tensor(&file.plan.items[*item].spec.name)?;
                let piece = &tensor.bytes()[bytes.start as usize..bytes.end as usize];
                file.writer.write_item(*item, bytes.start, piece)?;
                self.work.progress.advance(piece.len() as u64);
            }
        }
        Ok(())
    }

    /// Verifies a complete file and makes it durable, on another thread while fewer than
    /// [`CLOSERS`] do so.
    fn close<'t>(&'t self, file: &OpenFile<'a>, scope: &'t Scope<'t, '_>) {
        let (name, writer) = (file.plan.name.as_str(), file.writer.clone());
        let spawn = {
            let mut queue = self.queue();
            let few = queue.closers < CLOSERS;
            queue.closers += usize::from(few);
            few
        };
        if !spawn {
            return self.settle(name, &writer);
        }
        scope.spawn(move || {
            self.settle(name, &writer);
            // The file is closed before another closer may begin.
            drop(writer);
            self.queue().closers -= 1;
        });
    }

    fn settle(&self, name: &str, writer: &ShardWriter<'_>) {
        let done = writer.finish().and_then(|(len, sha256)| {
            // A file counts only if the inputs are still those that were hashed.
            self.work.inputs.look_again(false)?;
            let mut queue = self.queue();
            queue.finished += 1;
            queue.folder.record(name, len, sha256)
        });
        if let Err(e) = done {
            self.fail(e);
        }
    }
}

/// The constants of every stack, in parallel.
///
/// # Errors
/// [`ConvertError::Weight`] naming the module.
pub fn constants(
    model: &Model<'_>,
    plan: &ConversionPlan,
    settings: &Settings,
    pool: &rayon::ThreadPool,
) -> Result<Vec<Constants>, ConvertError> {
    let context = target::Context { model, kv_heads: kv_heads(model), settings };
    pool.install(|| {
        let of = |p: &StackPlan| {
            let constants = settings.format.target().constants(p, context);
            constants.map_err(ConvertError::weight(&p.module))
        };
        plan.stacks.par_iter().map(of).collect()
    })
}

/// Writes every file of the plan that `folder` does not have yet.
///
/// # Errors
/// [`ConvertError`]; files finished before it stay, and the next run continues after them.
pub fn write_shards(
    work: Work<'_>,
    folder: &mut Folder<'_>,
    execution: Execution,
) -> Result<Written, ConvertError> {
    let mut kept = 0;
    let mut waiting = Vec::with_capacity(work.plan.shards.len());
    for shard in &work.plan.shards {
        if folder.has(&shard.name) {
            kept += 1;
            work.progress.advance(shard.items.iter().filter_map(|i| i.spec.byte_len()).sum());
        } else {
            waiting.push(shard);
        }
    }
    let left_out = execution.stop_after.is_some_and(|files| files <= waiting.len());
    waiting.truncate(execution.stop_after.unwrap_or(usize::MAX));
    let threads = execution.threads.get();
    let place = folder.place();
    let queue = Queue {
        waiting: waiting.into_iter(),
        open: Vec::new(),
        finished: 0,
        closers: 0,
        folder,
        failed: None,
    };
    let context = Context {
        work,
        place,
        budget: Budget::new(execution.memory),
        share: execution.memory / threads as u64,
        open_files: threads.min(OPEN_FILES),
        queue: Mutex::new(queue),
        stopped: AtomicBool::new(false),
    };
    std::thread::scope(|scope| {
        let worker = || {
            if let Err(e) = context.work(scope) {
                context.fail(e);
            }
        };
        for _ in 1..threads {
            scope.spawn(worker);
        }
        worker();
    });
    let peak_memory = context.budget.peak();
    let queue = context.queue.into_inner().unwrap_or_else(PoisonError::into_inner);
    match queue.failed {
        Some(error) => Err(error),
        None if left_out => Err(ConvertError::Stopped { files: queue.finished }),
        None => Ok(Written { kept, peak_memory }),
    }
}
