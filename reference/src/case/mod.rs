//! Case files: the inputs, the configuration and the outputs of one operation.

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
}
