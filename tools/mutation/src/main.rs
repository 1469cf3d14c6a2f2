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
use marlinspike_mutation::build::{self, Built, Package};
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
    #[arg(required_unless_present = "built")]
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
    /// Stop before the tests are run
    #[arg(long)]
    build_only: bool,
    /// Run the tests of an earlier build: its folder may be that of another machine, at the same path
    #[arg(long)]
    built: bool,
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
    fs::create_dir_all(&options.copy).with_context(|| options.copy.display().to_string())?;
    let path = options.copy.join("results.jsonl");
    let before =
        lines(&path)?.into_iter().map(|line| (line.mutant.id, line)).collect::<HashMap<_, _>>();
    let known = |mutant: &Mutant| before.get(&mutant.id).filter(|line| line.mutant == *mutant);
    let file = Mutex::new(OpenOptions::new().create(true).append(true).open(&path)?);
    let write = |mutant: &Mutant, outcome: &Outcome| {
        let line =
            serde_json::to_string(&Line { mutant: mutant.clone(), outcome: outcome.clone() });
        let mut file = file.lock().expect("no panic");
        writeln!(file, "{}", line.expect("strings and numbers"))
            .expect("results.jsonl can be written");
    };
    let built = options.copy.join("built.json");
    if !options.built {
        let (from, to) = (Path::new("."), &options.copy);
        let mut package =
            Package::open(from, to, &options.folder, &options.package, &options.modules)?;
        copy(to, &|path| !package.writes(path))?;
        package.drop_known(&|mutant| {
            known(mutant).is_some_and(|line| line.outcome == Outcome::DoesNotCompile)
        });
        let made =
            package.build(&options.program, &|mutant| write(mutant, &Outcome::DoesNotCompile))?;
        fs::write(&built, serde_json::to_string(&made)?)?;
        if options.build_only {
            return Ok(());
        }
    }
    let built: Built = serde_json::from_str(
        &fs::read_to_string(&built).context("built.json of an earlier build")?,
    )?;
    let limits = Limits {
        jobs: options.jobs,
        test: Duration::from_secs_f64(options.test_seconds),
        mutant: Duration::from_secs_f64(options.mutant_seconds),
        memory: 16 << 20,
    };
    let folder = options.copy.join(&options.folder);
    let tests = trials::baseline(&built.programs, &folder, &limits)?;
    eprintln!("{} mutants, {} tests", built.mutants.len(), tests.len());
    let left: Vec<_> = built.mutants.iter().filter(|&mutant| known(mutant).is_none()).collect();
    trials::run_all(&left, &tests, &folder, &limits, &write);
    print!("{}", report::markdown(&lines(&path)?, &built.constant));
    Ok(())
}

/// Copies the files that git knows and `wanted` accepts.
fn copy(to: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<()> {
    let listed = Command::new("git").args(["ls-files", "-z"]).output().context("git")?;
    if !listed.status.success() {
        bail!("found no git checkout, expected to run in the root of the project's");
    }
    let listed = String::from_utf8(listed.stdout).context("names of files")?;
    for path in listed.split_terminator('\0').filter(|path| wanted(path)) {
        // A file that was deleted is still listed.
        if let Ok(bytes) = fs::read(path) {
            build::write_changed(&to.join(path), &bytes)?;
        }
    }
    Ok(())
}

fn lines(path: &Path) -> Result<Vec<Line>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    fs::read_to_string(path)?.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}
