//! Weight codes as bytes, row by row or in blocks of k.

use ndarray::{Array2, ArrayView2};

use super::rows::RowOrder;
use super::{Layout, Place, Slot};
use crate::num::dims::Shape;
use crate::weight::Codes;
use crate::{Error, Result};

/// Bytes of k in a block of the BlockMajorK layout (FlashInfer `WeightLayout.BlockMajorK`).
pub const BLOCK_K_BYTES: usize = 128;

/// A weight `[N, K]` as bytes, its rows in another order: 4-bit codes, two per byte with the lower
/// k in the low nibble, or 8-bit codes.
///
/// Row-major: byte (position of n) · B + c, where a row has B bytes and k is in its byte c. In
/// blocks of b bytes: byte ((c / b) · N + position of n) · b + c mod b, that is `[B / b, N, b]`
/// (FlashInfer `convert_to_block_layout`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PackedRows {
    shape: Shape,
    bits: u32,
    rows: RowOrder,
    block: Option<usize>,
}

/// Adjacent bytes of a row.
struct Run {
    /// The weight's column.
    n: usize,
    /// The first byte in the row.
    first: usize,
}

impl PackedRows {
    /// `shape` codes of `bits` (4 or 8), in the order `rows`, and in blocks of `block` bytes of k or
    /// row-major.
    ///
    /// # Errors
    /// [`Error::Size`] for another width, an order with another number of rows, K that is not a
    /// multiple of 32 / bits or does not fill whole blocks, and sizes that overflow.
    pub fn new(shape: Shape, bits: u32, rows: RowOrder, block: Option<usize>) -> Result<Self> {
        if !matches!(bits, 4 | 8) {
            return Err(Error::size("bits per code", bits, "4 or 8"));
        }
        shape.k().packed(bits)?;
        let len = shape.size_k.checked_mul(8).and_then(|bits| bits.checked_mul(shape.size_n));
        if len.is_none_or(|len| isize::try_from(len).is_err()) {
            return Err(Error::size("codes", shape, "a product that memory can hold"));
        }
        if rows.size_n() != shape.size_n {
            return Err(Error::size("rows of the order", rows.size_n(), shape.size_n));
        }
        let layout = Self { shape, bits, rows, block };
        if let Some(block) = block
            && (block == 0 || shape.size_k == 0 || !layout.row_bytes().is_multiple_of(block))
        {
            let expected = format!("a positive multiple of {}", block * 8 / bits as usize);
            return Err(Error::size("size_k", shape.size_k, expected));
        }
        Ok(layout)
    }

    /// Matrix shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The order of the rows.
    pub fn rows(&self) -> &RowOrder {
        &self.rows
    }

    /// Bytes of k in a block, where the matrix is cut.
    pub fn block(&self) -> Option<usize> {
        self.block
    }

    /// Bytes of a row.
    fn row_bytes(&self) -> usize {
        self.shape.size_k * self.bits as usize / 8
    }

    /// The index of byte `c` of the row at position `place`.
    fn byte(&self, place: usize, c: usize) -> usize {
        let block = self.block_bytes();
        (c / block * self.shape.size_n + place) * block + c % block
    }

    /// The bytes of `codes`, of [`Layout::packed_shape`].
    ///
    /// # Errors
    /// [`Error::Shape`] for codes of another shape, [`Error::Size`] of another width.
    pub fn pack(&self, codes: &Codes<'_>) -> Result<Array2<u8>> {
        let bytes = self.pack_bytes(codes)?;
        Ok(Array2::from_shape_vec(self.packed_shape(), bytes).expect("every byte of the layout"))
    }

    /// [`Self::pack`] in row-major order.
    pub(super) fn pack_bytes(&self, codes: &Codes<'_>) -> Result<Vec<u8>> {
        if codes.shape() != self.shape {
            let Shape { size_k, size_n } = codes.shape();
            return Err(Error::shape("codes", &[size_k, size_n], self.shape));
        }
        if codes.bits() != self.bits {
            return Err(Error::size("bits per code", codes.bits(), self.bits));
        }
        // One word holds four bytes of a row, the lower k in the lower bits, as in a file.
        let words = codes.words();
        let mut out = vec![0; self.packed_len()];
        for (run, bytes) in self.runs().zip(out.chunks_mut(self.block_bytes())) {
            for (c, byte) in (run.first..).zip(bytes) {
                *byte = (words[c / 4 * self.shape.size_n + run.n] >> (c % 4 * 8)) as u8;
            }
        }
        Ok(out)
    }

    /// The bytes of a row that are adjacent; 1 if rows are empty.
    fn block_bytes(&self) -> usize {
        self.block.unwrap_or(self.row_bytes()).max(1)
    }

    /// The runs of adjacent bytes of a row, in the layout's order.
    fn runs(&self) -> impl Iterator<Item = Run> {
        let firsts = (0..self.row_bytes()).step_by(self.block_bytes());
        firsts.flat_map(move |first| {
            let places = 0..self.shape.size_n;
            places.map(move |place| Run { n: self.rows.source(place), first })
        })
    }

    /// The inverse of [`Self::pack`].
    ///
    /// # Errors
    /// [`Error::Shape`] for another shape; [`Error::NotContiguous`] for other strides than row-major
    /// ones.
    pub fn unpack(&self, packed: ArrayView2<'_, u8>) -> Result<Codes<'static>> {
        let (found, expected) = (packed.shape().to_vec(), self.packed_shape());
        if found != expected {
            return Err(Error::shape("packed weight", &found, format!("{expected:?}")));
        }
        match packed.to_slice() {
            Some(bytes) => self.unpack_bytes(bytes),
            None => Err(Error::NotContiguous { tensor: "packed weight".to_owned(), found }),
        }
    }

    /// [`Self::unpack`] of bytes in row-major order.
    pub(super) fn unpack_bytes(&self, packed: &[u8]) -> Result<Codes<'static>> {
        if packed.len() != self.packed_len() {
            let expected = format!("{} bytes", self.packed_len());
            return Err(Error::shape("packed weight", &[packed.len()], expected));
        }
        let mut words = vec![0; self.packed_len() / 4];
        for (run, bytes) in self.runs().zip(packed.chunks(self.block_bytes())) {
            for (c, &byte) in (run.first..).zip(bytes) {
                words[c / 4 * self.shape.size_n + run.n] |= u32::from(byte) << (c % 4 * 8);
            }
        }
        Codes::from_words(self.bits, self.shape, words)
    }
}

impl Layout for PackedRows {
    /// `[N, bytes]`, or `[blocks · N, block]`; elements are bytes.
    fn packed_shape(&self) -> [usize; 2] {
        let block = self.block.unwrap_or(self.row_bytes());
        [self.row_bytes().checked_div(block).unwrap_or(0) * self.shape.size_n, block]
    }

    fn offset(&self, k: usize, n: usize) -> Slot {
        assert!(k < self.shape.size_k && n < self.shape.size_n);
        let bit = k * self.bits as usize;
        let element = self.byte(self.rows.target(n), bit / 8);
        Slot { element, bit: (bit % 8) as u32, width: self.bits }
    }

    fn locate(&self, element: usize, bit: u32) -> Place {
        assert!(element < self.packed_len() && bit < 8);
        let [_, block] = self.packed_shape();
        let (line, in_block) = (element / block, element % block);
        let (block_k, place) = (line / self.shape.size_n, line % self.shape.size_n);
        let bits = (block_k * block + in_block) * 8 + bit as usize;
        let row = bits / self.bits as usize;
        Place { row, col: self.rows.source(place), fragment: None }
    }
}
