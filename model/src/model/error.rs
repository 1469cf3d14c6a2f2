//! Errors of model folders.

use std::io;
use std::path::PathBuf;

use marlinspike::Error;
use marlinspike::container::IndexError;

/// An invalid model folder. Every variant names the file, tensor or module.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file or folder cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A required file is missing.
    #[error("{}: no {what}", dir.display())]
    NoFile {
        /// The model folder.
        dir: PathBuf,
        /// The expected file or files.
        what: &'static str,
    },
    /// A symbolic link points outside the model folder.
    #[error(
        "{}: a symbolic link to {}, expected a file inside the model folder or the blobs of its Hugging Face cache",
        path.display(), target.display()
    )]
    Link {
        /// The link.
        path: PathBuf,
        /// Its target.
        target: PathBuf,
    },
    /// A JSON file is larger than any real one.
    #[error("{}: {found} bytes, expected at most {limit}", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        found: u64,
        /// Largest size that is accepted.
        limit: u64,
    },
    /// A file is not valid JSON or not of the expected form.
    #[error("{}: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's message.
        reason: String,
    },
    /// The index is malformed or names a file outside the folder.
    #[error("{}: {source}", path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// Why.
        source: IndexError,
    },
    /// A shard that the index names does not exist.
    #[error("{}: tensor `{tensor}` is in {file:?}, which does not exist", index.display())]
    NoShard {
        /// The index file.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The missing shard.
        file: String,
    },
    /// A shard lacks a tensor that the index puts there.
    #[error("{}: tensor `{tensor}` is not in {file:?}", index.display())]
    NotInShard {
        /// The index file.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard.
        file: String,
    },
    /// Two shards contain tensors of the same name.
    #[error("tensor `{tensor}` is in {first:?} and in {second:?}")]
    InTwoShards {
        /// The tensor.
        tensor: String,
        /// One shard.
        first: String,
        /// The other.
        second: String,
    },
    /// A shard cannot be mapped.
    #[error(transparent)]
    Map(#[from] crate::map::MapError),
    /// A tensor, header or config is invalid in its format.
    #[error("{}: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<Error>,
    },
    /// The tensors of a module are inconsistent.
    #[error("module `{module}`: {reason}")]
    Module {
        /// The module.
        module: String,
        /// What was found and expected.
        reason: String,
    },
}

impl ModelError {
    /// [`ModelError::Module`].
    pub fn module(module: impl Into<String>, reason: impl std::fmt::Display) -> Self {
        Self::Module { module: module.into(), reason: reason.to_string() }
    }
}
