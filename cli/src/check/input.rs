//! Finds the case files of the command line, reads them and judges them.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::io::{self, IsTerminal as _, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use marlinspike::Error;
use marlinspike::case::{Case, CaseConfig, CaseError, Limits, Op};
use marlinspike::check::{CaseReport, Declared, check_case_within};
use marlinspike::container::{Container, ContainerError};
use marlinspike::panics;
use marlinspike_golden::{CaseEntry, GoldenError, Manifest};
use marlinspike_model::map::{MapError, MappedFile};
use walkdir::WalkDir;

use crate::hint;

use super::device::{self, BackendError, Counts, Device, DeviceError};

/// A file that could not be read as a case.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(super) enum InputError {
    /// The file could not be opened or mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A folder could not be listed.
    #[error("{}: cannot be listed: {source}", path.display())]
    List {
        /// The folder or an entry of it.
        path: PathBuf,
        /// The system's reason.
        source: walkdir::Error,
    },
    /// A folder contains no case.
    #[error("{}: found no file named *.safetensors, expected at least one", path.display())]
    EmptyFolder {
        /// The folder.
        path: PathBuf,
    },
    /// Standard input could not be read as one case.
    #[error("standard input: {reason}")]
    Stdin {
        /// What is wrong.
        reason: String,
    },
    /// A golden case differs from the manifest's entry.
    #[error(transparent)]
    Golden(#[from] GoldenError),
    /// The file is not a case, or its inputs are invalid.
    #[error("{}: {source}", path.display())]
    Case {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<Error>,
        /// The command that lists the tensors of the case's operation, if the file states one.
        schema: Option<String>,
    },
    /// The device failed, or a library that it needs is missing.
    #[error("{}: {source}", path.display())]
    Device {
        /// The file.
        path: PathBuf,
        /// What failed.
        source: DeviceError,
    },
}

impl InputError {
    /// The device's error, if the device failed.
    #[cfg(feature = "cuda")]
    pub(super) fn of_device(&self) -> Option<&DeviceError> {
        if let Self::Device { source, .. } = self { Some(source) } else { None }
    }

    /// The help line of this error.
    pub(super) fn help(&self) -> Cow<'static, str> {
        let help = match self {
            Self::Map(_) => "name a case file that can be read, or a folder of case files",
            Self::List { .. } => "make the folder readable, or name its files one by one",
            Self::EmptyFolder { .. } => {
                "name a folder of case files; `marlinspike vectors` writes examples"
            }
            Self::Stdin { .. } => "pipe one case into `marlinspike check -`, or name its file",
            Self::Golden(_) => "restore the golden data from the repository: `git checkout golden`",
            Self::Case { path, source, schema } => {
                return help_with_case(path, source, schema.as_deref());
            }
            Self::Device { .. } => "check the case without --backend, then the device",
        };
        help.into()
    }
}

/// The help line of a file whose contents are invalid.
fn help_with_case(path: &Path, error: &Error, schema: Option<&str>) -> Cow<'static, str> {
    let container = error.downcast_ref::<ContainerError>();
    if matches!(error, Error::Internal { .. }) {
        "report the error together with the case file".into()
    } else if matches!(error.downcast_ref(), Some(CaseError::TooLarge { .. })) {
        "check a smaller case; --max-work raises the limit of multiply-adds".into()
    } else if let Some(command) = schema {
        command.to_owned().into()
    } else if let Some(help) = hint::instead_of_case(path, container) {
        help.into()
    } else if container.is_some() {
        "the file is damaged or not a safetensors file: write it again".into()
    } else {
        "`marlinspike schema` lists the operations; `marlinspike vectors --op OP` writes cases"
            .into()
    }
}

/// The command that lists what the operation of a case takes; `None` for a file that names none.
fn schema_command(bytes: &[u8]) -> Option<String> {
    /// A longer config is not repeated.
    const CONFIG: usize = 400;
    let container = Container::parse(bytes).ok()?;
    let op = Op::from_any_name(container.metadata().get("op")?)?;
    let keys = format!("`marlinspike schema --op {op}` lists the keys and tensors");
    let config = container.metadata().get("config").filter(|text| text.len() <= CONFIG);
    let Some(config) = config else { return Some(keys) };
    let map = serde_json::from_str(config).ok()?;
    Some(match CaseConfig::from_json(op, &map) {
        Ok(_) => {
            let config = shlex::try_quote(config).ok()?;
            format!("`marlinspike schema --op {op} --config {config}` lists the tensors")
        }
        Err(_) => keys,
    })
}

/// The path that names standard input.
const STDIN: &str = "-";

/// Bytes of a case from standard input, which is held in memory; files are mapped.
const STDIN_BYTES: u64 = 1 << 30;

/// Everything from standard input.
fn stdin() -> Result<Vec<u8>, InputError> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        let reason = "found a terminal, expected the bytes of a case file".to_owned();
        return Err(InputError::Stdin { reason });
    }
    read_bounded(stdin.lock(), STDIN_BYTES)
}

fn read_bounded(from: impl Read, limit: u64) -> Result<Vec<u8>, InputError> {
    let mut bytes = Vec::new();
    match from.take(limit + 1).read_to_end(&mut bytes) {
        Err(e) => Err(InputError::Stdin { reason: format!("cannot be read: {e}") }),
        Ok(read) if read as u64 > limit => {
            let reason = format!("found more than {limit} bytes, expected a case of at most that");
            Err(InputError::Stdin { reason })
        }
        Ok(_) => Ok(bytes),
    }
}

/// A file to check, or the error that occurred while looking for it.
pub(super) struct Source {
    pub(super) path: PathBuf,
    kind: Kind,
}

enum Kind {
    File,
    Stdin,
    /// A golden case; its length and hash are verified before it is judged.
    Golden(Arc<Manifest>, CaseEntry),
    Error(InputError),
}

impl Source {
    fn file(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), kind: Kind::File }
    }

    fn error(path: impl Into<PathBuf>, error: InputError) -> Self {
        Self { path: path.into(), kind: Kind::Error(error) }
    }

    /// The diagnosis that the manifest records for the outputs of a case that fails.
    pub(super) fn known_fault(&self) -> Option<String> {
        match &self.kind {
            Kind::Golden(_, entry) => entry.known_fault.clone(),
            _ => None,
        }
    }
}

/// The repository's golden cases, in the manifest's order.
pub(super) fn golden() -> Result<Vec<Source>, GoldenError> {
    let manifest = Arc::new(Manifest::load()?);
    let source = |entry: &CaseEntry| Source {
        path: manifest.path(&entry.path),
        kind: Kind::Golden(Arc::clone(&manifest), entry.clone()),
    };
    Ok(manifest.cases().iter().map(source).collect())
}

/// The named files and every case file below the named folders, sorted within each folder.
pub(super) fn find(paths: &[PathBuf]) -> Vec<Source> {
    let mut sources = Vec::new();
    for (at, path) in paths.iter().enumerate() {
        if path.as_os_str() == STDIN {
            sources.push(if paths[..at].contains(path) {
                let reason = "named twice, expected once: it is read only once".to_owned();
                Source::error(path, InputError::Stdin { reason })
            } else {
                Source { path: path.clone(), kind: Kind::Stdin }
            });
        } else if path.is_dir() {
            walk(path, &mut sources);
        } else {
            sources.push(Source::file(path));
        }
    }
    sources
}

fn walk(folder: &Path, sources: &mut Vec<Source>) {
    let before = sources.len();
    // Links are followed, since a folder of cases may consist of links; WalkDir detects loops.
    for entry in WalkDir::new(folder).follow_links(true).sort_by_file_name() {
        match entry {
            Ok(e) if e.file_type().is_dir() => {}
            Ok(e) => {
                if e.path().extension() == Some(OsStr::new("safetensors")) {
                    sources.push(Source::file(e.into_path()));
                }
            }
            Err(source) => {
                let path = source.path().unwrap_or(folder).to_owned();
                sources.push(Source::error(path.clone(), InputError::List { path, source }));
            }
        }
    }
    if sources.len() == before {
        let error = InputError::EmptyFolder { path: folder.to_owned() };
        sources.push(Source::error(folder, error));
    }
}

/// The verdict on a case, and the comparisons made on a device.
pub(super) type Judged = Result<(CaseReport, Counts), BackendError>;

/// Judges the recorded outputs of a case, or those that a device computes from its inputs.
pub(super) fn judge(
    case: &Case<'_>,
    declared: &Declared,
    limits: &Limits,
    device: Option<&Device>,
) -> Judged {
    match device {
        None => Ok((check_case_within(case, declared, limits)?, Counts::new())),
        Some(device) => {
            let checked = device::check(device, case, declared)?;
            Ok((checked.report, checked.counts))
        }
    }
}

/// Reads and judges one file. A panic becomes an error of this file.
pub(super) fn check(
    source: Source,
    judge: impl Fn(&Case<'_>) -> Judged,
) -> Result<(CaseReport, Counts), InputError> {
    let path = source.path;
    match source.kind {
        Kind::Error(error) => return Err(error),
        Kind::Stdin => return check_bytes(path, &stdin()?, judge),
        Kind::Golden(manifest, entry) => manifest.verify_file(&entry.file())?,
        Kind::File => {}
    }
    let bytes = MappedFile::open(&path)?;
    check_bytes(path, &bytes, judge)
}

fn check_bytes(
    path: PathBuf,
    bytes: &[u8],
    judge: impl Fn(&Case<'_>) -> Judged,
) -> Result<(CaseReport, Counts), InputError> {
    let checked = panics::catch(|| judge(&Case::parse(bytes)?));
    checked.map_err(|error| match error {
        BackendError::Accel(source) => InputError::Device { path, source },
        BackendError::Case(source) => {
            InputError::Case { path, source: source.into(), schema: schema_command(bytes) }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn unread(_: &Case<'_>) -> Judged {
        unreachable!("there is no case")
    }

    #[test]
    fn finds_files_below_folders_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("b")).unwrap();
        for name in ["c.safetensors", "b/z.safetensors", "b/a.safetensors", "notes.txt"] {
            fs::write(at(name), b"").unwrap();
        }
        let found = find(&[at("c.safetensors"), folder.path().to_owned()]);
        let found: Vec<_> = found.into_iter().map(|s| s.path).collect();
        let names = ["c.safetensors", "b/a.safetensors", "b/z.safetensors", "c.safetensors"];
        assert_eq!(found, names.map(at));
    }

    #[test]
    fn an_empty_folder_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let [source] = find(&[folder.path().to_owned()]).try_into().ok().unwrap();
        assert!(matches!(check(source, unread), Err(InputError::EmptyFolder { .. })));
    }

    #[test]
    fn standard_input_is_bounded_and_read_once() {
        assert_eq!(read_bounded(&[7; 8][..], 8).unwrap(), [7; 8]);
        let error = read_bounded(&[7; 9][..], 8).unwrap_err().to_string();
        assert_eq!(
            error,
            "standard input: found more than 8 bytes, expected a case of at most that"
        );
        // An endless pipe ends at the limit.
        assert!(matches!(read_bounded(io::repeat(7), 8), Err(InputError::Stdin { .. })));
        let found = find(&["-", "./-", "-"].map(PathBuf::from));
        let kinds: Vec<_> = found.iter().map(|s| &s.kind).collect();
        assert!(matches!(
            kinds[..],
            [Kind::Stdin, Kind::File, Kind::Error(InputError::Stdin { .. })]
        ));
    }

    #[cfg(unix)]
    #[test]
    fn a_loop_of_links_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(folder.path(), folder.path().join("loop")).unwrap();
        let [source] = find(&[folder.path().to_owned()]).try_into().ok().unwrap();
        assert!(matches!(check(source, unread), Err(InputError::List { .. })));
    }
}
