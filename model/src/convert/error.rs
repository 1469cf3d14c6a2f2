//! Why a conversion stops.

use std::io;
use std::path::{Path, PathBuf};

use marlinspike::container;
use marlinspike::num::dims::Shape;

use super::io::FinishError;
use super::paths::MANIFEST;
use crate::model::ModelError;

/// A module that the kernel format cannot take, with every reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The module, with `w13` or `w2` for experts.
    pub module: String,
    /// Why.
    pub reasons: Vec<String>,
}

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
    /// The model has experts, but no module can be converted.
    #[error("{target} takes none of the modules, though the model has experts{}", none(refused))]
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
    /// A rank outside its group.
    #[error("{name}: found {rank}, expected a rank below {size}, the size of its group")]
    Rank {
        /// `tp_rank` or `ep_rank`.
        name: &'static str,
        /// The rank.
        rank: usize,
        /// Ranks in the group.
        size: usize,
    },
    /// Quantized activations for a format with a fixed type of activations.
    #[error("input_dtype: {format} has a fixed type of activations, expected --to marlin")]
    Activations {
        /// The format's name.
        format: &'static str,
    },
    /// The output folder holds something else.
    #[error("{}: {reason}", dir.display())]
    Occupied {
        /// The output folder.
        dir: PathBuf,
        /// What is there.
        reason: String,
    },
    /// Another process converts into the folder.
    #[error("{}: another conversion writes here: {holder}", dir.display())]
    Locked {
        /// The output folder.
        dir: PathBuf,
        /// Who.
        holder: String,
    },
    /// An input file was changed while it was converted.
    #[error("{}: {what} changed during the conversion", path.display())]
    InputChanged {
        /// The file.
        path: PathBuf,
        /// What differs.
        what: &'static str,
    },
    /// An output file does not hold what was written to it.
    #[error("{}: {reason}", path.display())]
    ReadBack {
        /// The file.
        path: PathBuf,
        /// What was found.
        reason: &'static str,
    },
    /// There is nothing to verify.
    #[error("{}: no {MANIFEST}, which a finished conversion has", dir.display())]
    NoManifest {
        /// The folder.
        dir: PathBuf,
    },
    /// A manifest cannot be used.
    #[error("{}: not a manifest of this version: {reason}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The smallest job on a matrix takes more memory than the conversion may use.
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
    /// Stopped between files, at the caller's request.
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

    pub(super) fn finish(path: &Path) -> impl FnOnce(FinishError) -> Self + '_ {
        |error| match error {
            FinishError::Io(source) => Self::Io { path: path.to_owned(), source },
            FinishError::ReadBack(reason) => Self::ReadBack { path: path.to_owned(), reason },
        }
    }

    pub(super) fn weight(module: &str) -> impl FnOnce(marlinspike::Error) -> Self + '_ {
        |source| Self::Weight { module: module.to_owned(), source: Box::new(source) }
    }
}
