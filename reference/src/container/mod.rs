//! safetensors containers: read defensively, written deterministically.
//!
//! Source: the safetensors format (8-byte little-endian header length, a JSON object, the data).
//! Reading is stricter than in the `safetensors` crate: repeated keys, unknown keys and metadata
//! that is not a string are errors, each with its own variant. "Decisions" in ARCHITECTURE.md lists what
//! that crate does not check; the tests compare both readers and both writers.

mod error;
mod header;
mod index;
mod json;
mod kind;
mod writer;

use std::collections::BTreeMap;

pub use error::ContainerError;
pub use header::{Entry, HEADER_LIMIT, Header};
pub use index::{IndexError, ShardIndex};
pub use json::{MAX_METADATA, MAX_RANK, MAX_TENSORS};
pub use kind::FileKind;
pub use writer::{ContainerWriter, TensorSpec, WriteError, write_container};

use crate::num::tensor::Tensor;
use crate::{Error, Result};

/// A whole container, in memory or mapped: header and data.
#[derive(Debug, Clone, PartialEq)]
pub struct Container<'a> {
    header: Header,
    bytes: &'a [u8],
}

impl<'a> Container<'a> {
    /// Checks the header of `bytes`, a whole file. No tensor is copied.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ContainerError> {
        Ok(Self { header: Header::parse(bytes, bytes.len() as u64)?, bytes })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Tensor names, in file order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.header.entries().iter().map(Entry::name)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.header.entries().len()
    }

    /// Whether the container has no tensors.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The entry of a tensor.
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.header.get(name)
    }

    /// `__metadata__`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        self.header.metadata()
    }

    /// A tensor, borrowing the container's bytes. Fails with [`ContainerError::NoSuchTensor`].
    pub fn tensor(&self, name: &str) -> Result<Tensor<'a>> {
        match self.get(name) {
            Some(entry) => self.read(entry),
            None => Err(Error::from(ContainerError::NoSuchTensor { tensor: name.to_owned() })),
        }
    }

    /// Every tensor, in the order of the file.
    pub fn tensors(&self) -> impl Iterator<Item = Result<Tensor<'a>>> {
        self.header.entries().iter().map(|e| self.read(e))
    }

    fn read(&self, entry: &Entry) -> Result<Tensor<'a>> {
        let range = entry.file_range();
        // `check_cover` has shown that the range is inside the file, so both ends fit a usize.
        let data = &self.bytes[range.start as usize..range.end as usize];
        Tensor::new(entry.name(), entry.dtype(), entry.shape().to_vec(), data)
    }
}
