//! Packed activations.

use std::borrow::Cow;
use std::fmt;

use super::{CHUNK, MR, PIECE, padded_k, product, word};
use crate::{Error, Result};

/// Activations quantized per row, before they are interleaved.
///
/// The value of code q in row m is (q + `negated_zero_points[m]`) · `reciprocals[m]`.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedRows {
    /// M.
    pub size_m: usize,
    /// K.
    pub size_k: usize,
    /// Codes `[M, Kp]`, Kp = [`padded_k`]\(K\); codes past K repeat the last activation.
    pub codes: Vec<i8>,
    /// −zero point, `[M]`.
    pub negated_zero_points: Vec<i32>,
    /// 1 / scale, `[M]`.
    pub reciprocals: Vec<f32>,
}

impl QuantizedRows {
    /// Codes of row `m`, `[Kp]`.
    pub fn row(&self, m: usize) -> &[i8] {
        let width = padded_k(self.size_k);
        &self.codes[m * width..][..width]
    }
}

/// The positions of an activation matrix's rows in its packed bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LhsLayout {
    size_m: usize,
    size_k: usize,
    mr: usize,
}

/// The kind of a value of packed activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LhsPart {
    /// The int8 code of this k; for k ≥ K, that of the last activation.
    Code {
        /// k, below Kp.
        k: usize,
    },
    /// The row's int32 negated zero point.
    ZeroPoint,
    /// The row's f32 reciprocal of the scale.
    Reciprocal,
}

/// The value that a byte of packed activations belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LhsPlace {
    /// Block of rows.
    pub block: usize,
    /// Row of the matrix; M and above in the last block's padding.
    pub row: usize,
    /// The value of the row.
    pub part: LhsPart,
    /// The value's first byte.
    pub start: usize,
    /// Its length in bytes.
    pub bytes: usize,
}

impl fmt::Display for LhsPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { block, row, .. } = self;
        match self.part {
            LhsPart::Code { k } => write!(f, "code of (row {row}, k {k}), block {block}"),
            LhsPart::ZeroPoint => write!(f, "negated zero point of row {row}, block {block}"),
            LhsPart::Reciprocal => write!(f, "reciprocal scale of row {row}, block {block}"),
        }
    }
}

impl LhsLayout {
    /// The layout of `[size_m, size_k]` activations in blocks of `mr` rows.
    ///
    /// # Errors
    /// [`Error::Size`] if `mr` is not in [`MR`], K is 0, or the size overflows.
    pub fn new(size_m: usize, size_k: usize, mr: usize) -> Result<Self> {
        if !MR.contains(&mr) {
            return Err(Error::size("mr of packed activations", mr, format!("one of {MR:?}")));
        }
        if size_k == 0 || size_k > usize::MAX - CHUNK {
            return Err(Error::size("size_k", size_k, "1 or more, with room for padding"));
        }
        // The longest row has its codes and eight more bytes; padding adds one row.
        let row = padded_k(size_k).saturating_add(8);
        product("packed activations", &[size_m.saturating_add(mr), row])?;
        Ok(Self { size_m, size_k, mr })
    }

    /// M.
    pub fn size_m(&self) -> usize {
        self.size_m
    }

    /// K.
    pub fn size_k(&self) -> usize {
        self.size_k
    }

    /// Rows per block.
    pub fn mr(&self) -> usize {
        self.mr
    }

    /// Blocks of rows.
    pub fn blocks(&self) -> usize {
        self.size_m.div_ceil(self.mr)
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.mr * (padded_k(self.size_k) + 8)
    }

    /// Number of bytes.
    pub fn packed_len(&self) -> usize {
        self.blocks() * self.block_bytes()
    }

    /// Byte of the code of row `m`, `k` < Kp. Panics outside.
    pub fn code_offset(&self, m: usize, k: usize) -> usize {
        assert!(k < padded_k(self.size_k), "k {k}");
        let piece = (k / PIECE * self.mr + m % self.mr) * PIECE;
        self.block_of(m) + piece + k % PIECE
    }

    /// First byte of row `m`'s negated zero point. Panics outside.
    pub fn zero_point_offset(&self, m: usize) -> usize {
        self.block_of(m) + self.mr * padded_k(self.size_k) + 4 * (m % self.mr)
    }

    /// First byte of row `m`'s reciprocal scale. Panics outside.
    pub fn reciprocal_offset(&self, m: usize) -> usize {
        self.zero_point_offset(m) + 4 * self.mr
    }

    fn block_of(&self, m: usize) -> usize {
        assert!(m < self.size_m, "row {m} of {}", self.size_m);
        m / self.mr * self.block_bytes()
    }

    /// The value that byte `byte` belongs to. Panics outside.
    pub fn locate(&self, byte: usize) -> LhsPlace {
        assert!(byte < self.packed_len(), "byte {byte} of {}", self.packed_len());
        let (block, inside) = (byte / self.block_bytes(), byte % self.block_bytes());
        let codes = self.mr * padded_k(self.size_k);
        let at = |slot, part, start, bytes| LhsPlace {
            block,
            row: block * self.mr + slot,
            part,
            start: block * self.block_bytes() + start,
            bytes,
        };
        if inside < codes {
            let piece = inside / PIECE;
            let k = piece / self.mr * PIECE + inside % PIECE;
            return at(piece % self.mr, LhsPart::Code { k }, inside, 1);
        }
        let index = (inside - codes) / 4;
        let part = if index < self.mr { LhsPart::ZeroPoint } else { LhsPart::Reciprocal };
        at(index % self.mr, part, codes + 4 * index, 4)
    }

    /// Interleaves quantized rows.
    ///
    /// # Errors
    /// [`Error::Shape`] if `rows` has other sizes than the layout, or its vectors have other
    /// lengths.
    pub fn pack(&self, rows: &QuantizedRows) -> Result<PackedLhs<'static>> {
        let width = padded_k(self.size_k);
        if [rows.size_m, rows.size_k] != [self.size_m, self.size_k] {
            let expected = format!("[{}, {}]", self.size_m, self.size_k);
            return Err(Error::shape("activations", &[rows.size_m, rows.size_k], expected));
        }
        let parts = [
            ("codes", rows.codes.len(), self.size_m * width),
            ("negated_zero_points", rows.negated_zero_points.len(), self.size_m),
            ("reciprocals", rows.reciprocals.len(), self.size_m),
        ];
        if let Some((name, found, expected)) = parts.into_iter().find(|p| p.1 != p.2) {
            return Err(Error::shape(name, &[found], format!("[{expected}]")));
        }
        let mut bytes = vec![0u8; self.packed_len()];
        for m in 0..self.size_m {
            for (piece, codes) in rows.row(m).chunks_exact(PIECE).enumerate() {
                let at = self.code_offset(m, piece * PIECE);
                for (byte, &code) in bytes[at..][..PIECE].iter_mut().zip(codes) {
                    *byte = code as u8;
                }
            }
            let (zero, reciprocal) = (self.zero_point_offset(m), self.reciprocal_offset(m));
            bytes[zero..][..4].copy_from_slice(&rows.negated_zero_points[m].to_le_bytes());
            bytes[reciprocal..][..4].copy_from_slice(&rows.reciprocals[m].to_le_bytes());
        }
        Ok(PackedLhs { layout: *self, bytes: Cow::Owned(bytes) })
    }
}

/// Packed activations with their layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedLhs<'a> {
    layout: LhsLayout,
    bytes: Cow<'a, [u8]>,
}

impl<'a> PackedLhs<'a> {
    /// Wraps bytes that were packed in `layout`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the number of bytes differs from that of the layout.
    pub fn new(layout: LhsLayout, bytes: impl Into<Cow<'a, [u8]>>) -> Result<Self> {
        let bytes = bytes.into();
        if bytes.len() != layout.packed_len() {
            let expected = format!("[{}]", layout.packed_len());
            return Err(Error::shape("lhs_packed", &[bytes.len()], expected));
        }
        Ok(Self { layout, bytes })
    }

    /// The layout.
    pub fn layout(&self) -> LhsLayout {
        self.layout
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The first value, in storage order, in which `found` differs; `None` if every bit is equal.
    ///
    /// # Errors
    /// [`Error::Size`] when `found` was packed under another layout.
    pub fn compare(&self, found: &PackedLhs<'_>) -> Result<Option<LhsPlace>> {
        if found.layout != self.layout {
            let (found, expected) = (format!("{:?}", found.layout), format!("{:?}", self.layout));
            return Err(Error::size("layout of packed activations", found, expected));
        }
        let differing = (0..self.bytes.len()).find(|&i| self.bytes[i] != found.bytes[i]);
        Ok(differing.map(|byte| self.layout.locate(byte)))
    }

    /// The bytes of block `i`. Panics outside.
    pub fn block(&self, i: usize) -> &[u8] {
        let len = self.layout.block_bytes();
        &self.bytes[i * len..][..len]
    }

    /// The quantized rows.
    pub fn unpack(&self) -> QuantizedRows {
        let LhsLayout { size_m, size_k, .. } = self.layout;
        let width = padded_k(size_k);
        let mut codes = Vec::with_capacity(size_m * width);
        for m in 0..size_m {
            for k in (0..width).step_by(PIECE) {
                let piece = &self.bytes[self.layout.code_offset(m, k)..][..PIECE];
                codes.extend(piece.iter().map(|&b| b as i8));
            }
        }
        let at = |offset| word(&self.bytes, offset);
        QuantizedRows {
            size_m,
            size_k,
            codes,
            negated_zero_points: (0..size_m)
                .map(|m| i32::from_le_bytes(at(self.layout.zero_point_offset(m))))
                .collect(),
            reciprocals: (0..size_m)
                .map(|m| f32::from_le_bytes(at(self.layout.reciprocal_offset(m))))
                .collect(),
        }
    }
}
