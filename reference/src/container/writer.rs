//! Writing containers: at once, or the header first and the data as it is produced.

use std::collections::{BTreeMap, HashSet};
use std::io::{self, Write};

use super::HEADER_LIMIT;
use crate::num::tensor::{DType, Tensor};

/// Why a container could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The sink failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Two tensors have the same name.
    #[error("tensor `{tensor}` is announced twice")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// A tensor is named `__metadata__`.
    #[error("`__metadata__` is reserved, expected another tensor name")]
    ReservedName,
    /// The announced tensors would make a file of 2^63 bytes or more.
    #[error("tensor `{tensor}`: shape {shape:?} overflows")]
    ShapeOverflow {
        /// Tensor name.
        tensor: String,
        /// The shape.
        shape: Vec<usize>,
    },
    /// The header is too large for readers.
    #[error("header of {found} bytes, expected at most {limit}")]
    HeaderTooLarge {
        /// Bytes of the header.
        found: u64,
        /// Largest size that readers accept.
        limit: u64,
    },
    /// The data belongs to a tensor that is not next.
    #[error("data of tensor `{found}`, expected {expected}")]
    WrongTensor {
        /// Tensor whose data was written.
        found: String,
        /// Next tensor, quoted, or the end of the file.
        expected: String,
    },
    /// The length of a tensor's data differs from the announced one.
    #[error("tensor `{tensor}`: {found} bytes, expected {expected}")]
    WrongLength {
        /// Tensor name.
        tensor: String,
        /// Bytes written.
        found: u64,
        /// Bytes announced (or remaining, for a part).
        expected: u64,
    },
    /// The file was finished before all announced data was written.
    #[error("file finished before the data of tensor `{tensor}`")]
    Unfinished {
        /// The next tensor.
        tensor: String,
    },
}

/// A tensor as announced in a header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Tensor name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Row-major shape.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Number of bytes; `None` when 2^63 or more.
    pub fn byte_len(&self) -> Option<u64> {
        let start = self.dtype.bytes() as u64;
        self.shape
            .iter()
            .try_fold(start, |a, &d| a.checked_mul(d as u64))
            .filter(|&bytes| bytes < 1 << 63)
    }
}

impl From<&Tensor<'_>> for TensorSpec {
    fn from(t: &Tensor<'_>) -> Self {
        Self { name: t.name().to_owned(), dtype: t.dtype(), shape: t.shape().to_vec() }
    }
}

/// Writes a container whose tensors are produced one after the other: first the header, then the data
/// in the announced order.
///
/// Announce wider types first, so that every tensor is aligned in a mapped file.
#[derive(Debug)]
pub struct ContainerWriter<W> {
    sink: W,
    /// Name and length of each tensor, in order.
    due: Vec<(String, u64)>,
    /// Index of the next tensor, and the number of its bytes already written.
    next: usize,
    written: u64,
}

impl<W: Write> ContainerWriter<W> {
    /// Writes the header of `specs` in their order, padded with spaces to a multiple of 8 bytes.
    pub fn new(
        mut sink: W,
        specs: &[TensorSpec],
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, WriteError> {
        let (header, due) = encode_header(specs, metadata)?;
        sink.write_all(&(header.len() as u64).to_le_bytes())?;
        sink.write_all(&header)?;
        let mut writer = Self { sink, due, next: 0, written: 0 };
        writer.skip_empty();
        Ok(writer)
    }

    /// Writes the whole data of the next tensor.
    ///
    /// An empty tensor needs no call, and accepts none.
    pub fn write_tensor(&mut self, name: &str, bytes: &[u8]) -> Result<(), WriteError> {
        let left = self.expect(name)?;
        if bytes.len() as u64 != left {
            return Err(self.wrong_length(name, bytes.len()));
        }
        self.write_part(name, bytes)
    }

    /// Writes a part of the next tensor's data (one expert of a stack).
    pub fn write_part(&mut self, name: &str, bytes: &[u8]) -> Result<(), WriteError> {
        let left = self.expect(name)?;
        if bytes.len() as u64 > left {
            return Err(self.wrong_length(name, bytes.len()));
        }
        self.sink.write_all(bytes)?;
        self.written += bytes.len() as u64;
        if bytes.len() as u64 == left {
            self.next += 1;
            self.written = 0;
            self.skip_empty();
        }
        Ok(())
    }

    /// Flushes and returns the sink. Fails with [`WriteError::Unfinished`] if data is missing.
    pub fn finish(mut self) -> Result<W, WriteError> {
        if let Some((tensor, _)) = self.due.get(self.next) {
            return Err(WriteError::Unfinished { tensor: tensor.clone() });
        }
        self.sink.flush()?;
        Ok(self.sink)
    }

    fn skip_empty(&mut self) {
        while matches!(self.due.get(self.next), Some((_, 0))) {
            self.next += 1;
        }
    }

    /// Remaining bytes of tensor `name`, which must be the next one.
    fn expect(&self, name: &str) -> Result<u64, WriteError> {
        match self.due.get(self.next) {
            Some((due, len)) if due == name => Ok(len - self.written),
            other => Err(WriteError::WrongTensor {
                found: name.to_owned(),
                expected: other.map_or("the end".to_owned(), |(due, _)| format!("`{due}`")),
            }),
        }
    }

    fn wrong_length(&self, name: &str, found: usize) -> WriteError {
        let expected = self.due[self.next].1 - self.written;
        WriteError::WrongLength { tensor: name.to_owned(), found: found as u64, expected }
    }
}

/// Writes all `tensors` and the metadata. The order is that of the `safetensors` crate, wider types
/// first and then by name, so the bytes depend only on the content and every tensor is aligned.
pub fn write_container<W: Write>(
    tensors: &[Tensor<'_>],
    metadata: &BTreeMap<String, String>,
    sink: W,
) -> Result<W, WriteError> {
    let mut order: Vec<&Tensor<'_>> = tensors.iter().collect();
    order.sort_by(|a, b| {
        b.dtype().bits().cmp(&a.dtype().bits()).then_with(|| a.name().cmp(b.name()))
    });
    let specs: Vec<TensorSpec> = order.iter().map(|&t| t.into()).collect();
    let mut writer = ContainerWriter::new(sink, &specs, metadata)?;
    for t in order.iter().filter(|t| !t.is_empty()) {
        writer.write_tensor(t.name(), t.bytes())?;
    }
    writer.finish()
}

/// A header's bytes, and each tensor's name and length.
type Encoded = (Vec<u8>, Vec<(String, u64)>);

fn encode_header(
    specs: &[TensorSpec],
    metadata: &BTreeMap<String, String>,
) -> Result<Encoded, WriteError> {
    let mut header = serde_json::Map::new();
    if !metadata.is_empty() {
        header.insert("__metadata__".to_owned(), serde_json::json!(metadata));
    }
    let mut names = HashSet::new();
    let mut due = Vec::with_capacity(specs.len());
    let mut offset = 0u64;
    for spec in specs {
        if spec.name == "__metadata__" {
            return Err(WriteError::ReservedName);
        }
        if !names.insert(spec.name.as_str()) {
            return Err(WriteError::DuplicateTensor { tensor: spec.name.clone() });
        }
        let end = spec.byte_len().and_then(|len| offset.checked_add(len));
        let Some(end) = end.filter(|&end| end < 1 << 63) else {
            let (tensor, shape) = (spec.name.clone(), spec.shape.clone());
            return Err(WriteError::ShapeOverflow { tensor, shape });
        };
        due.push((spec.name.clone(), end - offset));
        let entry = serde_json::json!({
            "dtype": spec.dtype.name(), "shape": spec.shape, "data_offsets": [offset, end],
        });
        header.insert(spec.name.clone(), entry);
        offset = end;
    }
    let mut bytes = serde_json::Value::Object(header).to_string().into_bytes();
    bytes.resize(bytes.len().next_multiple_of(8), b' ');
    if bytes.len() as u64 > HEADER_LIMIT {
        let found = bytes.len() as u64;
        return Err(WriteError::HeaderTooLarge { found, limit: HEADER_LIMIT });
    }
    Ok((bytes, due))
}
