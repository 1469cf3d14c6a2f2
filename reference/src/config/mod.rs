//! Quantization configs as found in model folders.

/// A malformed configuration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A key is absent.
    #[error("config key `{key}` is missing")]
    MissingKey {
        /// The key.
        key: String,
    },
}
