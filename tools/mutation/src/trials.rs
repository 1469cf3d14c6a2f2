//! Runs of tests: once to see what each reaches, then for each mutant.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::build::Program;
use crate::source::Mutant;

/// Limits of the runs.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Processes at once.
    pub jobs: usize,
    /// Tests that take longer are left out.
    pub test: Duration,
    /// Time of the tests that a mutant runs, by their times without a mutant.
    pub mutant: Duration,
    /// Address space of a process, in KiB: a mutant may ask for a huge allocation.
    pub memory: u64,
}

/// A test, what it reaches and how long it takes.
#[derive(Debug, Clone)]
pub struct Test {
    /// Its program's name and its own.
    pub name: String,
    program: PathBuf,
    filter: String,
    seconds: f64,
    reached: BTreeSet<u32>,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Passed,
    Failed,
    TimedOut,
}

/// What the tests say of a mutant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// A test fails.
    Killed {
        /// The test.
        by: String,
    },
    /// A test does not end in time.
    TimedOut {
        /// The test.
        by: String,
    },
    /// Every test passes.
    Survived {
        /// Tests that were run.
        tests: usize,
        /// Tests that reach the mutant but would have exceeded the limit.
        left_out: usize,
    },
    /// No test reaches it.
    NotReached,
    /// It does not compile.
    DoesNotCompile,
}

/// Runs every test alone and records the places that it reaches. Tests that fail or are slow are left out and named.
///
/// # Errors
/// Where a program cannot be run.
pub fn baseline(programs: &[Program], folder: &Path, limits: &Limits) -> Result<Vec<Test>> {
    let mut all = Vec::new();
    for program in programs {
        let listed = Command::new(&program.path)
            .args(["--list", "--format", "terse"])
            .current_dir(folder)
            .output();
        let listed = listed.with_context(|| program.path.display().to_string())?.stdout;
        let names = String::from_utf8_lossy(&listed).into_owned();
        let names = names.lines().filter_map(|line| line.strip_suffix(": test"));
        all.extend(names.map(|name| (program.clone(), name.to_owned())));
    }
    let made = Mutex::new(Vec::new());
    spread(limits.jobs, &all, |number, (program, filter)| {
        let file = std::env::temp_dir().join(format!("reached-{}-{number}", std::process::id()));
        let mut test = Test {
            name: format!("{} {filter}", program.name),
            program: program.path.clone(),
            filter: filter.clone(),
            seconds: 0.0,
            reached: BTreeSet::new(),
        };
        let start = Instant::now();
        let end = run(
            &test,
            folder,
            ("MUTANT_REACHED", &file.display().to_string()),
            limits.test,
            limits.memory,
        );
        test.seconds = start.elapsed().as_secs_f64();
        let text = fs::read_to_string(&file).unwrap_or_default();
        test.reached = text.lines().filter_map(|line| line.parse().ok()).collect();
        let _ = fs::remove_file(&file);
        match end {
            End::Passed => made.lock().expect("no panic").push(test),
            End::Failed => eprintln!("left out, since it fails without a mutant: {}", test.name),
            End::TimedOut => {
                eprintln!("left out, since it takes more than {:?}: {}", limits.test, test.name)
            }
        }
    });
    let mut made = made.into_inner().expect("no panic");
    made.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    Ok(made)
}

/// Runs the tests that reach each mutant, the fastest first, until one fails; `done` is called for each result.
pub fn run_all(
    mutants: &[&Mutant],
    tests: &[Test],
    folder: &Path,
    limits: &Limits,
    done: &(dyn Fn(&Mutant, &Outcome) + Sync),
) {
    let mut reaching: BTreeMap<u32, Vec<&Test>> = BTreeMap::new();
    for test in tests {
        for &place in &test.reached {
            reaching.entry(place).or_default().push(test);
        }
    }
    spread(limits.jobs, mutants, |_, mutant| {
        let tests = reaching.get(&mutant.place).map_or(&[][..], Vec::as_slice);
        done(mutant, &trial(mutant, tests, folder, limits));
    });
}

fn trial(mutant: &Mutant, tests: &[&Test], folder: &Path, limits: &Limits) -> Outcome {
    if tests.is_empty() {
        return Outcome::NotReached;
    }
    let (mut spent, mut count) = (0.0, 0);
    for test in tests {
        spent += test.seconds;
        if count > 0 && spent > limits.mutant.as_secs_f64() {
            break;
        }
        count += 1;
        let limit = Duration::from_secs_f64(3.0 + 10.0 * test.seconds);
        match run(test, folder, ("MUTANT", &mutant.id.to_string()), limit, limits.memory) {
            End::Passed => {}
            End::Failed => return Outcome::Killed { by: test.name.clone() },
            End::TimedOut => return Outcome::TimedOut { by: test.name.clone() },
        }
    }
    Outcome::Survived { tests: count, left_out: tests.len() - count }
}

fn run(test: &Test, folder: &Path, variable: (&str, &str), limit: Duration, memory: u64) -> End {
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!("ulimit -v {memory}; ulimit -c 0; exec \"$0\" \"$@\"")])
        .arg(&test.program);
    command.args(["--exact", &test.filter, "--test-threads", "1"]).current_dir(folder);
    command
        .env(variable.0, variable.1)
        .env("RAYON_NUM_THREADS", "1")
        .env("PROPTEST_FAILURE_PERSISTENCE", "off");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let Ok(mut child) = command.spawn() else { return End::Failed };
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return End::Passed,
            Ok(None) if start.elapsed() < limit => std::thread::sleep(Duration::from_millis(2)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return End::TimedOut;
            }
            _ => return End::Failed,
        }
    }
}

/// Calls `work` for each item, in `jobs` threads.
fn spread<T: Sync>(jobs: usize, items: &[T], work: impl Fn(usize, &T) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(at) else { break };
                    work(at, item);
                }
            });
        }
    });
}
