//! Why a conversion stops.

use std::io;
use std::path::{Path, PathBuf};

use marlinspike::container;
use marlinspike::dims::Shape;

use super::plan::Refused;
use crate::model::ModelError;

/// A conversion that was not finished.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The model folder is malformed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A tensor of a module is refused by its format or by the layout.
    #[error("{module}: {source}")]
    Weight {
        /// The module.
        module: String,
        /// Why.
        source: Box<marlinspike::Error>,
    },
    /// There is nothing to convert.
    #[error("{}: no quantization config, so nothing to convert", dir.display())]
    NotQuantized {
        /// The model folder.
        dir: PathBuf,
    },
    /// Modules that the kernel format cannot take.
    #[error("{target} cannot take {} of the modules: {}", refused.len(), list(refused))]
    Refused {
        /// The kernel format, as people call it.
        target: &'static str,
        /// Each with its reasons.
        refused: Vec<Refused>,
    },
    /// Experts are there, and no module can be converted.
    #[error("{target} takes none of the modules, though there are experts{}", none(refused))]
    NothingConverted {
        /// The kernel format, as people call it.
        target: &'static str,
        /// Each with its reasons; empty where nothing is quantized.
        refused: Vec<Refused>,
    },
    /// The model's 16-bit type is not known.
    #[error("the model's type is {found}, expected float16 or bfloat16")]
    Dtype {
        /// What the config says.
        found: String,
    },
    /// The output folder holds something else.
    #[error("{}: {reason}", dir.display())]
    Occupied {
        /// The output folder.
        dir: PathBuf,
        /// What is there.
        reason: String,
    },
    /// The smallest piece of work on a matrix takes more memory than conversion may use.
    #[error(
        "{module}: a part of its {shape} matrix takes {needed} bytes of memory, expected at most {limit}"
    )]
    Memory {
        /// The module.
        module: String,
        /// The matrix on this rank.
        shape: Shape,
        /// Bytes of its smallest part.
        needed: u64,
        /// Bytes that all jobs may take together.
        limit: u64,
    },
    /// A file cannot be written.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A header cannot be written.
    #[error("{}: {source}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Why.
        source: container::WriteError,
    },
    /// Stopped between files, as the caller wanted.
    #[error("stopped after {files} files, as asked; the same command continues")]
    Stopped {
        /// Files finished.
        files: usize,
    },
}

/// Why nothing was converted.
fn none(refused: &[Refused]) -> String {
    match refused {
        [] => ": no module is quantized".to_owned(),
        refused => format!(": {}", list(refused)),
    }
}

/// The modules by their reasons, on one line.
fn list(refused: &[Refused]) -> String {
    const SHOWN: usize = 8;
    let mut groups: Vec<(&[String], Vec<&str>)> = Vec::new();
    for r in refused {
        match groups.iter_mut().find(|(reasons, _)| *reasons == r.reasons) {
            Some((_, modules)) => modules.push(&r.module),
            None => groups.push((&r.reasons, vec![&r.module])),
        }
    }
    let group = |(reasons, modules): &(&[String], Vec<&str>)| {
        let names: Vec<_> = modules.iter().take(SHOWN).map(|m| format!("`{m}`")).collect();
        let more = modules.len() - names.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{more}: {}", names.join(", "), reasons.join("; "))
    };
    groups.iter().map(group).collect::<Vec<_>>().join(" | ")
}

impl ConvertError {
    pub(super) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        |source| Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn weight(module: &str) -> impl FnOnce(marlinspike::Error) -> Self + '_ {
        |source| Self::Weight { module: module.to_owned(), source: Box::new(source) }
    }
}
