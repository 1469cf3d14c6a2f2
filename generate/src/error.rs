//! Errors, one variant per failure.

use std::path::PathBuf;

use marlinspike_model::model::ModelError;
use marlinspike_model::run::error::RunError;

/// A model that cannot be loaded, or a prompt that cannot be continued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The folder cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A quantized layer that the int4 path does not take.
    #[error(transparent)]
    Layer(#[from] RunError),
    /// A tensor or a value that does not fit.
    #[error(transparent)]
    Value(#[from] marlinspike::Error),
    /// A decoder that this crate does not compute.
    #[error("config.json: model_type: found {found}, expected one of {}", supported.join(", "))]
    Architecture {
        /// What the config states.
        found: String,
        /// The model types that run.
        supported: Vec<&'static str>,
    },
    /// A key of `config.json` that is absent, or whose value is not supported.
    #[error("config.json: {key}: found {found}, expected {expected}")]
    Config {
        /// The key.
        key: &'static str,
        /// What it holds.
        found: String,
        /// What is read.
        expected: String,
    },
    /// A tensor that the architecture needs.
    #[error("tensor `{name}`: found none in {}", dir.display())]
    MissingTensor {
        /// Its name.
        name: String,
        /// The folder.
        dir: PathBuf,
    },
    /// Tensors that the architecture does not use. Ignoring them would compute another model.
    #[error("tensor `{first}` and {more} more: found tensors that {model_type} does not use")]
    UnusedTensor {
        /// The first, by name.
        first: String,
        /// How many others.
        more: usize,
        /// The architecture.
        model_type: String,
    },
    /// A folder of one rank.
    #[error("module `{module}`: found one rank's part, expected a folder converted without ranks")]
    Rank {
        /// The module.
        module: String,
    },
    /// A folder converted for other hardware.
    #[error("{}: found a folder converted to {found}, expected a checkpoint or one converted to {expected}", dir.display())]
    Converted {
        /// The folder.
        dir: PathBuf,
        /// Its format.
        found: String,
        /// The format that runs here.
        expected: &'static str,
    },
    /// A prompt without tokens.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// More positions than the model has.
    #[error(
        "the prompt has {prompt} tokens and {new} more are wanted: found {} positions, expected at \
         most max_position_embeddings, {limit}", prompt + new
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// New tokens wanted.
        new: usize,
        /// The model's limit.
        limit: usize,
    },
    /// More tokens than a cache was made for.
    #[error("the KV cache: found room for {capacity} tokens, expected {needed}")]
    CacheFull {
        /// Its capacity.
        capacity: usize,
        /// Tokens wanted.
        needed: usize,
    },
    /// A token outside the vocabulary.
    #[error("token {found}: expected an id below vocab_size, {vocab}")]
    Token {
        /// The id.
        found: u32,
        /// The vocabulary's size.
        vocab: usize,
    },
    /// More memory than the limit allows.
    #[error(
        "memory: {what} needs {:.1} MB, found a limit of {:.1} MB",
        *needed as f64 / 1e6, *limit as f64 / 1e6
    )]
    Memory {
        /// What would be allocated.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// A number of the sampling that is out of range.
    #[error("{name}: found {found}, expected {expected}")]
    Sampling {
        /// Which.
        name: &'static str,
        /// The number.
        found: f64,
        /// Its range.
        expected: &'static str,
    },
    /// Logits that are NaN or infinite.
    #[error("logits of token {position}: found {found}, expected finite numbers")]
    NotFinite {
        /// The token's position.
        position: usize,
        /// The first such logit.
        found: f32,
    },
}

impl GenerateError {
    pub(crate) fn config(key: &'static str, found: impl ToString, expected: impl ToString) -> Self {
        let found: String = found.to_string().chars().take(60).collect();
        Self::Config { key, found, expected: expected.to_string() }
    }
}

/// Result of this crate's functions.
pub type Result<T, E = GenerateError> = std::result::Result<T, E>;
