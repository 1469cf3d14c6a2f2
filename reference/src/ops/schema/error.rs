//! Errors of case files, one variant per failure. [`crate::Error`] covers tensors of a wrong shape,
//! type or value.

/// A malformed case file.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CaseError {
    /// A metadata key is absent.
    #[error("metadata key `{key}` is missing")]
    MissingMetadata {
        /// The key.
        key: String,
    },
    /// `format` is not `marlinspike-case`.
    #[error("metadata key `format`: found {found:?}, expected \"marlinspike-case\"")]
    Format {
        /// Value found.
        found: String,
    },
    /// A version of the format that this reader does not support.
    #[error("metadata key `version`: found {found:?}, expected \"1\"")]
    Version {
        /// Value found.
        found: String,
    },
    /// An operation that this reader does not know.
    #[error("metadata key `op`: found {found:?}, expected one of {expected}")]
    UnknownOp {
        /// Value found.
        found: String,
        /// Known operations.
        expected: String,
    },
    /// `config` is not a JSON object.
    #[error("metadata key `config` is not a JSON object: {problem}")]
    ConfigJson {
        /// The parser's message.
        problem: String,
    },
    /// `config` repeats a key.
    #[error("config key `{key}` appears twice")]
    DuplicateConfigKey {
        /// The key.
        key: String,
    },
    /// A required config key is missing.
    #[error("config key `{key}` is missing: operation `{op}` needs it")]
    MissingConfigKey {
        /// The key.
        key: String,
        /// The operation.
        op: &'static str,
    },
    /// A config key that the operation does not read.
    #[error("unknown config key `{key}`; {hint}")]
    UnknownConfigKey {
        /// The key, with dots for nested objects.
        key: String,
        /// The nearest known key, the operations that read it, or all known keys.
        hint: String,
    },
    /// A config value has another type, is out of its domain, or is not a known name.
    #[error("config key `{key}`: found {found}, expected {expected}")]
    ConfigValue {
        /// The key, with dots for nested objects.
        key: String,
        /// Value found, as JSON.
        found: String,
        /// Values expected.
        expected: String,
    },
    /// Two config values, or a config value and a tensor, contradict each other.
    #[error("config key `{key}`: {found} contradicts {with}")]
    Contradiction {
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What it contradicts.
        with: String,
    },
    /// A declared schedule is malformed.
    #[error("config key `{key}`: {error}")]
    Schedule {
        /// The key.
        key: String,
        /// What is wrong with it.
        error: Box<crate::products::schedule::ScheduleError>,
    },
    /// The config asks for more memory or time than a check may take.
    #[error("config asks for too much: {what} takes {needed}; the limit is {limit}")]
    TooLarge {
        /// The demanding part, with the config keys that determine it.
        what: String,
        /// The memory or time that it needs.
        needed: String,
        /// The limit.
        limit: String,
    },
    /// The case could not be written as a container.
    #[error("case cannot be written: {problem}")]
    Write {
        /// The writer's message.
        problem: String,
    },
}

impl From<CaseError> for crate::Error {
    fn from(error: CaseError) -> Self {
        Self::module(error)
    }
}
