//! Tests the mutants of a package; see the library's page.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use marlinspike_mutation::build::Package;
use marlinspike_mutation::report::{self, Line};
use marlinspike_mutation::source::Mutant;
use marlinspike_mutation::trials::{self, Limits, Outcome};

/// Tests the mutants of a package of this workspace:
/// `cargo run --release -p marlinspike-mutation -- /tmp/mutants src/num src/act_order`
#[derive(Parser)]
struct Options {
    /// Folder for the copy of the workspace and its build; `results.jsonl` there is continued
    copy: PathBuf,
    /// Files or folders of the package
    #[arg(required = true)]
    modules: Vec<String>,
    /// Folder of the package
    #[arg(long, default_value = "reference")]
    folder: String,
    /// Name of the package
    #[arg(long, default_value = "marlinspike")]
    package: String,
    /// Test programs to run: `marlinspike` for the unit tests, `layouts` for `tests/layouts`; all by default
    #[arg(long)]
    program: Vec<String>,
    /// Processes at once
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Seconds after which a test is left out
    #[arg(long, default_value_t = 20.0)]
    test_seconds: f64,
    /// Seconds of tests for each mutant
    #[arg(long, default_value_t = 20.0)]
    mutant_seconds: f64,
}

fn main() -> Result<()> {
    let options = Options::parse();
    copy(&options.copy)?;
    let mut package =
        Package::open(&options.copy, &options.folder, &options.package, &options.modules)?;
    let path = options.copy.join("results.jsonl");
    let before = lines(&path)?;
    let before: HashMap<u32, Line> =
        before.into_iter().map(|line| (line.mutant.id, line)).collect();
    let known = |mutant: &Mutant| before.get(&mutant.id).filter(|line| line.mutant == *mutant);
    let file = Mutex::new(OpenOptions::new().create(true).append(true).open(&path)?);
    let write = |mutant: &Mutant, outcome: &Outcome| {
        let line =
            serde_json::to_string(&Line { mutant: mutant.clone(), outcome: outcome.clone() });
        let mut file = file.lock().expect("no panic");
        writeln!(file, "{}", line.expect("strings and numbers"))
            .expect("results.jsonl can be written");
    };
    package.drop_known(&|mutant| {
        known(mutant).is_some_and(|line| line.outcome == Outcome::DoesNotCompile)
    });
    let programs =
        package.build(&options.program, &|mutant| write(mutant, &Outcome::DoesNotCompile))?;
    let limits = Limits {
        jobs: options.jobs,
        test: Duration::from_secs_f64(options.test_seconds),
        mutant: Duration::from_secs_f64(options.mutant_seconds),
        memory: 16 << 20,
    };
    let folder = package.root.join(&package.folder);
    let tests = trials::baseline(&programs, &folder, &limits)?;
    eprintln!("{} mutants, {} tests", package.mutants().count(), tests.len());

    let left =
        package.mutants().filter(|&mutant| !package.is_dropped(mutant) && known(mutant).is_none());
    trials::run_all(&left.collect::<Vec<_>>(), &tests, &folder, &limits, &write);
    print!("{}", report::markdown(&lines(&path)?, package.constant()));
    Ok(())
}

/// Copies the files of the commit that is checked out, over what an earlier run left.
fn copy(to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    let archive = to.join("sources.tar");
    let git = Command::new("git").args(["archive", "--output"]).arg(&archive).arg("HEAD").status();
    let tar = || Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(to).status();
    if !git.context("git")?.success() || !tar().context("tar")?.success() {
        bail!("found no commit to copy, expected to run in the project's checkout");
    }
    Ok(fs::remove_file(archive)?)
}

fn lines(path: &Path) -> Result<Vec<Line>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    fs::read_to_string(path)?.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}
