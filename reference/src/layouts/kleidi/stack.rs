//! Packed weights of many matrices of one layout, such as the experts of a layer.

use std::borrow::Cow;

use super::{PackedRhs, RhsLayout};
use crate::{Error, Result};

/// `[count][RhsLayout::packed_len]` bytes, owned or borrowed (of a mapped file).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedStack<'a> {
    layout: RhsLayout,
    bytes: Cow<'a, [u8]>,
}

impl<'a> PackedStack<'a> {
    /// Wraps bytes that were packed in `layout`; errors contain `name`.
    ///
    /// # Errors
    /// [`Error::Shape`] unless they are one or more whole matrices; [`Error::Value`] for an order of
    /// rows that is no permutation.
    pub fn new(name: &str, layout: RhsLayout, bytes: impl Into<Cow<'a, [u8]>>) -> Result<Self> {
        let bytes = bytes.into();
        if bytes.is_empty() || !bytes.len().is_multiple_of(layout.packed_len()) {
            let expected = format!("[experts, {}]", layout.packed_len());
            return Err(Error::shape(name, &[bytes.len()], expected));
        }
        for matrix in bytes.chunks_exact(layout.packed_len()) {
            layout.check_order(name, matrix)?;
        }
        Ok(Self { layout, bytes })
    }

    /// The layout of each matrix.
    pub fn layout(&self) -> RhsLayout {
        self.layout
    }

    /// Matrices.
    pub fn count(&self) -> usize {
        self.bytes.len() / self.layout.packed_len()
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes of matrix `i`. Panics outside.
    pub fn matrix(&self, i: usize) -> &[u8] {
        let len = self.layout.packed_len();
        &self.bytes[i * len..][..len]
    }

    /// Matrix `i`, borrowed. Panics outside.
    pub fn get(&self, i: usize) -> PackedRhs<'_> {
        PackedRhs::of(self.layout, self.matrix(i))
    }

    /// Every matrix, borrowed.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = PackedRhs<'_>> {
        (0..self.count()).map(|i| self.get(i))
    }
}
