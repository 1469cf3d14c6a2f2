//! safetensors containers, read defensively.

/// A malformed container.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ContainerError {
    /// The file ends before the header does.
    #[error("file ends after {found} bytes, expected at least {expected}")]
    Truncated {
        /// Bytes there.
        found: u64,
        /// Bytes needed.
        expected: u64,
    },
}
