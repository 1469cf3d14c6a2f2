//! What can be wrong with a model folder.

use std::io;
use std::path::PathBuf;

use marlinspike::Error;
use marlinspike::container::IndexError;

/// A refused model folder. Every variant names the file, tensor or module.
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
    /// A file that a model needs is absent.
    #[error("{}: no {what}", dir.display())]
    NoFile {
        /// The model folder.
        dir: PathBuf,
        /// The file or files looked for.
        what: &'static str,
    },
    /// A symbolic link leads out of the model folder.
    #[error(
        "{}: a symbolic link to {}, expected a file inside the model folder or the blobs of its Hugging Face cache",
        path.display(), target.display()
    )]
    Link {
        /// The link.
        path: PathBuf,
        /// Where it leads.
        target: PathBuf,
    },
    /// A JSON file is larger than any real one.
    #[error("{}: {found} bytes, expected at most {limit}", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        found: u64,
        /// Most that is read.
        limit: u64,
    },
    /// A file is not the JSON that it should be.
    #[error("{}: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser says.
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
    /// Two shards hold a tensor of one name.
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
    /// A tensor, header or config is refused by its format.
    #[error("{}: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<Error>,
    },
    /// A module's tensors do not belong together.
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
