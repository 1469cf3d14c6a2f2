//! Errors of safetensors containers, one variant per failure.

/// A malformed container.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ContainerError {
    /// The file ends before the header does.
    #[error("file ends after {found} bytes, expected at least {expected}")]
    Truncated {
        /// Bytes found.
        found: u64,
        /// Bytes needed.
        expected: u64,
    },
    /// The declared header exceeds the limit.
    #[error("header of {found} bytes, expected at most {limit}")]
    HeaderTooLarge {
        /// Bytes declared.
        found: u64,
        /// Largest size that is read.
        limit: u64,
    },
    /// The file is of another kind.
    #[error("found {}, expected a safetensors file", kind.name())]
    OtherKind {
        /// The kind, by its first bytes.
        kind: super::FileKind,
    },
    /// The declared header does not fit into the file.
    #[error("header of {header} bytes in a file of {file} bytes")]
    HeaderPastEnd {
        /// Bytes declared.
        header: u64,
        /// Bytes of the file.
        file: u64,
    },
    /// The header lists too many entries.
    #[error("header with more than {limit} {what}")]
    TooMany {
        /// Tensors, or metadata keys.
        what: &'static str,
        /// Largest number that is read.
        limit: usize,
    },
    /// The header is not UTF-8.
    #[error("header is not UTF-8 from its byte {offset} on")]
    NotUtf8 {
        /// First bad byte of the header.
        offset: usize,
    },
    /// The header does not begin with `{`.
    #[error("header begins with {found}, expected `{{`")]
    NotAnObject {
        /// First character, quoted, or `nothing`.
        found: String,
    },
    /// The header is not JSON.
    #[error("header is not JSON: {problem}")]
    Json {
        /// The parser's message, with line and column.
        problem: String,
    },
    /// Two tensors have the same name.
    #[error("tensor `{tensor}` appears twice in the header")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// A tensor's entry repeats a key.
    #[error("tensor `{tensor}`: key `{key}` appears twice")]
    DuplicateKey {
        /// Tensor name.
        tensor: String,
        /// The key.
        key: String,
    },
    /// `__metadata__` repeats a key, or is itself repeated (`key` is then `__metadata__`).
    #[error("metadata key `{key}` appears twice")]
    DuplicateMetadata {
        /// The key.
        key: String,
    },
    /// A metadata value is not a string, or `__metadata__` is not an object.
    #[error("metadata `{key}`: {problem}")]
    Metadata {
        /// The key.
        key: String,
        /// Found and expected.
        problem: String,
    },
    /// A key of a tensor's entry is absent.
    #[error("tensor `{tensor}`: key `{key}` is missing")]
    MissingKey {
        /// Tensor name.
        tensor: String,
        /// The key.
        key: &'static str,
    },
    /// A tensor's entry has an unknown key.
    #[error("tensor `{tensor}`: unknown key `{key}`, expected dtype, shape or data_offsets")]
    UnknownKey {
        /// Tensor name.
        tensor: String,
        /// The key.
        key: String,
    },
    /// An entry, or the value of one of its keys, has the wrong JSON type (empty key: the entry).
    #[error("tensor `{tensor}`{}: {problem}", if .key.is_empty() { String::new() } else { format!(", key `{}`", .key) })]
    BadEntry {
        /// Tensor name.
        tensor: String,
        /// The key; empty when the entry is not an object.
        key: &'static str,
        /// Found and expected.
        problem: String,
    },
    /// A dimension or offset is negative, not an integer, or too large.
    #[error("tensor `{tensor}`, key `{key}`: found {found}, expected an integer from 0 below 2^64")]
    BadInteger {
        /// Tensor name.
        tensor: String,
        /// `shape` or `data_offsets`.
        key: &'static str,
        /// The number found.
        found: String,
    },
    /// An unknown element type.
    #[error("tensor `{tensor}`: unknown dtype {found:?}")]
    UnknownDtype {
        /// Tensor name.
        tensor: String,
        /// The dtype found.
        found: String,
    },
    /// An element type of less than a byte.
    #[error(
        "tensor `{tensor}`: dtype {found}: sub-byte types are not supported, expected whole bytes"
    )]
    SubByteDtype {
        /// Tensor name.
        tensor: String,
        /// The dtype found.
        found: String,
    },
    /// A tensor's range ends before it begins.
    #[error("tensor `{tensor}`: data_offsets [{begin}, {end}] end before they begin")]
    ReversedOffsets {
        /// Tensor name.
        tensor: String,
        /// First byte.
        begin: u64,
        /// Byte past the last.
        end: u64,
    },
    /// A shape of 2^63 bytes or more.
    #[error("tensor `{tensor}`: shape {shape:?} overflows, expected fewer than 2^63 bytes")]
    ShapeOverflow {
        /// Tensor name.
        tensor: String,
        /// The shape.
        shape: Vec<u64>,
    },
    /// The length of a tensor's range does not match its shape and type.
    #[error(
        "tensor `{tensor}`: data_offsets hold {found} bytes, expected {expected} for its shape and dtype"
    )]
    SizeMismatch {
        /// Tensor name.
        tensor: String,
        /// Bytes in the range.
        found: u64,
        /// Bytes that shape and dtype need.
        expected: u64,
    },
    /// A tensor's range begins inside another's.
    #[error("tensor `{tensor}` begins at byte {begin}, inside `{other}`, expected {expected}")]
    Overlap {
        /// Tensor name.
        tensor: String,
        /// The tensor before it.
        other: String,
        /// Its first byte.
        begin: u64,
        /// End of the other tensor.
        expected: u64,
    },
    /// Bytes before a tensor belong to no tensor.
    #[error("tensor `{tensor}` begins at byte {begin}, expected {expected}: a gap lies before it")]
    Gap {
        /// Tensor name.
        tensor: String,
        /// Its first byte.
        begin: u64,
        /// End of the previous tensor.
        expected: u64,
    },
    /// A tensor's range ends after the file.
    #[error("tensor `{tensor}` ends at byte {end} of the data, expected at most {data_len}")]
    OutOfBounds {
        /// Tensor name.
        tensor: String,
        /// Byte past the last.
        end: u64,
        /// Bytes of data in the file.
        data_len: u64,
    },
    /// Bytes after the last tensor belong to no tensor.
    #[error("{found} bytes of data, expected {expected}: no tensor covers the rest")]
    TrailingBytes {
        /// Bytes of data in the file.
        found: u64,
        /// Bytes that the tensors cover.
        expected: u64,
    },
    /// A requested tensor is missing.
    #[error("tensor `{tensor}` is not in the file")]
    NoSuchTensor {
        /// Tensor name.
        tensor: String,
    },
}

impl From<ContainerError> for crate::Error {
    fn from(error: ContainerError) -> Self {
        Self::module(error)
    }
}
