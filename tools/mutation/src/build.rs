//! The copy of a package with its mutants, and its test programs.

use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use walkdir::WalkDir;

use crate::source::{Branched, Mutant, Source};

/// Rounds in which mutants that do not compile are taken out.
const ROUNDS: usize = 12;

/// A package in a copy of its workspace.
pub struct Package {
    /// Root of the workspace's copy.
    pub root: PathBuf,
    /// Folder of the package below it.
    pub folder: String,
    /// Name of the package.
    pub name: String,
    files: Vec<(String, Source)>,
    dropped: BTreeSet<u32>,
}

/// What a build made.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Built {
    /// The mutants in it.
    pub mutants: Vec<Mutant>,
    /// Mutants that constant functions and items would have, by file.
    pub constant: Vec<(String, usize)>,
    /// The tests.
    pub programs: Vec<Program>,
}

/// A test program of the package.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Program {
    /// Its name: the target's.
    pub name: String,
    /// The file.
    pub path: PathBuf,
}

impl Package {
    /// Finds the mutants below `modules`: files or folders of the package in the workspace `from`, `src/num` for
    /// example. `root` is the workspace's copy.
    ///
    /// # Errors
    /// Where a file cannot be read or is not Rust, or there is no file.
    pub fn open(
        from: &Path,
        root: &Path,
        folder: &str,
        name: &str,
        modules: &[String],
    ) -> Result<Self> {
        let mut paths = Vec::new();
        for module in modules {
            for entry in WalkDir::new(from.join(folder).join(module)).sort_by_file_name() {
                let path = entry.with_context(|| format!("module {module}"))?.into_path();
                let is_test = path.file_stem().is_some_and(|stem| stem == "tests");
                if path.extension().is_some_and(|extension| extension == "rs") && !is_test {
                    paths.push(path);
                }
            }
        }
        // The root of the crate gets the branches' module.
        let library = from.join(folder).join("src/lib.rs");
        let (mut files, mut next) = (Vec::new(), 0);
        for path in paths {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let file = path.strip_prefix(from.join(folder))?.display().to_string();
            let source = Source::parse(&file, &text, next)?;
            next += source.mutants.len() as u32;
            files.push((file, source));
        }
        if files.is_empty() {
            bail!("found no Rust file below {}, expected the modules' files", modules.join(", "));
        }
        if !files.iter().any(|(file, _)| file == "src/lib.rs") {
            let text =
                fs::read_to_string(&library).with_context(|| library.display().to_string())?;
            files.push(("src/lib.rs".to_owned(), Source::plain(&text)));
        }
        Ok(Self {
            root: root.to_owned(),
            folder: folder.to_owned(),
            name: name.to_owned(),
            files,
            dropped: BTreeSet::new(),
        })
    }

    /// Whether `path`, below the root, is a file that the build writes.
    pub fn writes(&self, path: &str) -> bool {
        let file = path.strip_prefix(&self.folder).and_then(|rest| rest.strip_prefix('/'));
        self.files.iter().any(|(own, _)| Some(own.as_str()) == file)
    }

    /// All mutants, in the order of their numbers.
    pub fn mutants(&self) -> impl Iterator<Item = &Mutant> {
        self.files.iter().flat_map(|(_, source)| &source.mutants)
    }

    /// Files with mutants, also those whose mutants are all in constant functions.
    pub fn mutated_files(&self) -> impl Iterator<Item = &str> {
        let mutated = |source: &Source| !source.mutants.is_empty() || source.constant > 0;
        self.files.iter().filter(move |(_, source)| mutated(source)).map(|(file, _)| file.as_str())
    }

    /// Whether a mutant does not compile.
    pub fn is_dropped(&self, mutant: &Mutant) -> bool {
        self.dropped.contains(&mutant.id)
    }

    /// Takes out mutants that are known not to compile.
    pub fn drop_known(&mut self, is_known: &dyn Fn(&Mutant) -> bool) {
        let known: Vec<u32> =
            self.mutants().filter(|mutant| is_known(mutant)).map(|mutant| mutant.id).collect();
        self.dropped.extend(known);
    }

    /// Writes the branches, takes out what does not compile (`dropped` is called for each), and builds the test
    /// programs of these names; all if there are none.
    ///
    /// # Errors
    /// Where the package does not compile for another reason than its mutants.
    pub fn build(&mut self, names: &[String], dropped: &dyn Fn(&Mutant)) -> Result<Built> {
        let count = self.mutants().count().max(1);
        let runtime = include_str!("runtime.in").replace("COUNT", &count.to_string());
        for round in 0..ROUNDS {
            let mut written = Vec::new();
            for (file, source) in &self.files {
                let branched = source.branched(&|id| !self.dropped.contains(&id));
                written.push((format!("{}/{file}", self.folder), branched));
            }
            for (path, branched) in &written {
                let runtime = if path.ends_with("src/lib.rs") { &runtime } else { "" };
                write_changed(&self.root.join(path), (branched.text.clone() + runtime).as_bytes())?;
            }
            let wrong = self.errors(&written)?;
            eprintln!("round {round}: {} mutants that do not compile", wrong.len());
            if wrong.is_empty() {
                return Ok(Built {
                    mutants: self
                        .mutants()
                        .filter(|mutant| !self.is_dropped(mutant))
                        .cloned()
                        .collect(),
                    constant: self
                        .files
                        .iter()
                        .map(|(file, source)| (file.clone(), source.constant))
                        .collect(),
                    programs: self.programs(names)?,
                });
            }
            self.mutants().filter(|mutant| wrong.contains(&mutant.id)).for_each(dropped);
            self.dropped.extend(wrong);
        }
        bail!("mutants that do not compile were found in each of {ROUNDS} rounds")
    }

    fn cargo(&self, arguments: &[&str]) -> Result<std::process::Output> {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command
            .args(arguments)
            .args(["--offline", "--message-format=json", "-p", &self.name])
            .current_dir(&self.root);
        command
            .env("CARGO_TARGET_DIR", self.root.join("target"))
            .env("RUSTFLAGS", "--cap-lints=allow");
        command.env("CARGO_INCREMENTAL", "0").env("CARGO_PROFILE_DEV_DEBUG", "none");
        command.stderr(std::process::Stdio::inherit()).output().context("cargo")
    }

    /// Numbers of the mutants that compiler errors name.
    fn errors(&self, written: &[(String, Branched)]) -> Result<BTreeSet<u32>> {
        let output = self.cargo(&["check", "--lib", "--quiet"])?;
        let mut wrong = BTreeSet::new();
        for message in messages(&output.stdout) {
            let error = &message["message"];
            if message["reason"] != "compiler-message" || error["level"] != "error" {
                continue;
            }
            let spans = error["spans"].as_array().map_or(&[][..], Vec::as_slice);
            let named = spans.iter().filter(|span| span["is_primary"] == true).flat_map(|span| {
                let file = written.iter().find(|(path, _)| span["file_name"] == path.as_str());
                file.map_or_else(BTreeSet::new, |(_, branched)| blamed(branched, &range(span)))
            });
            let named: BTreeSet<u32> = named.filter(|id| !self.dropped.contains(id)).collect();
            if named.is_empty() && !spans.is_empty() {
                eprintln!("{}", error["rendered"].as_str().unwrap_or_default());
            }
            wrong.extend(named);
        }
        if wrong.is_empty() && !output.status.success() {
            bail!("{} does not compile, and no mutant is the reason", self.name);
        }
        Ok(wrong)
    }

    fn programs(&self, names: &[String]) -> Result<Vec<Program>> {
        let library = self.name.replace('-', "_");
        let mut arguments = vec!["test", "--no-run", "--quiet"];
        for name in names {
            arguments.extend(if *name == library { vec!["--lib"] } else { vec!["--test", name] });
        }
        if names.is_empty() {
            arguments.extend(["--lib", "--tests"]);
        }
        let output = self.cargo(&arguments)?;
        if !output.status.success() {
            bail!("the tests of {} do not compile", self.name);
        }
        let made = messages(&output.stdout).filter_map(|message| {
            let path = message["executable"].as_str()?.into();
            let name = message["target"]["name"].as_str()?.to_owned();
            (message["profile"]["test"] == true).then_some(Program { name, path })
        });
        Ok(made.collect())
    }
}

fn messages(output: &[u8]) -> impl Iterator<Item = Value> {
    output.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok())
}

fn range(span: &Value) -> Range<usize> {
    let at = |key: &str| span[key].as_u64().unwrap_or(0) as usize;
    at("byte_start")..at("byte_end")
}

/// Writes a file unless it has these bytes: cargo builds again what is newer.
pub fn write_changed(path: &Path, bytes: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|found| found == bytes) {
        return Ok(());
    }
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    fs::write(path, bytes).with_context(|| path.display().to_string())
}

/// The mutant whose change contains the error, otherwise all mutants of the innermost place around it.
fn blamed(branched: &Branched, error: &Range<usize>) -> BTreeSet<u32> {
    let contains = |outer: &Range<usize>| outer.start <= error.start && error.end <= outer.end;
    let change = branched
        .changes
        .iter()
        .filter(|(range, _)| contains(range))
        .min_by_key(|(range, _)| range.len());
    if let Some((_, id)) = change {
        return BTreeSet::from([*id]);
    }
    let place = branched
        .places
        .iter()
        .filter(|(range, _)| contains(range))
        .min_by_key(|(range, _)| range.len());
    place.map(|(_, ids)| ids.clone().collect()).unwrap_or_default()
}
