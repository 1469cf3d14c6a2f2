//! Packed weights.

use std::borrow::Cow;
use std::fmt;

use super::columns::{Columns, Factors, groups};
use super::{CHUNK, MatrixBytes, NR, PIECE, padded_k, product, word};
use crate::layouts::Slot;
use crate::layouts::cpu::CpuTables;
use crate::num::dims::{GroupSize, Shape};
use crate::{Error, Result};

/// The positions of a weight matrix's columns in its packed bytes.
///
/// As in upstream's operator, a group that covers all of K is channel-wise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RhsLayout {
    pub(super) shape: Shape,
    /// K when channel-wise.
    pub(super) group_rows: usize,
    pub(super) nr: usize,
    pub(super) tables: CpuTables,
}

/// The kind of a value of packed weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RhsPart {
    /// The 4-bit code of this k; 0 for k ≥ K.
    Code {
        /// k, below Kp.
        k: usize,
    },
    /// The bf16 scale of a group; channel-wise (group 0) f32, the scale / 16.
    Scale {
        /// Group.
        group: usize,
    },
    /// Channel-wise int32, 16·Σw; group-wise f32, Σ scale·Σw.
    Sum,
    /// f32.
    Bias,
}

/// The value that a bit of packed weights belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RhsPlace {
    /// Block of columns.
    pub block: usize,
    /// Column of the matrix; N and above in the last block's padding, which repeats column N − 1.
    pub column: usize,
    /// The value of the column.
    pub part: RhsPart,
    /// The value's first byte.
    pub start: usize,
    /// Its lowest bit in that byte.
    pub bit: u32,
    /// Its length in bits.
    pub bits: u32,
}

impl fmt::Display for RhsPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { block, column, .. } = self;
        match self.part {
            RhsPart::Code { k } => write!(f, "code of (k {k}, n {column}), block {block}"),
            RhsPart::Scale { group } => {
                write!(f, "scale of (group {group}, n {column}), block {block}")
            }
            RhsPart::Sum => write!(f, "sum of n {column}, block {block}"),
            RhsPart::Bias => write!(f, "bias of n {column}, block {block}"),
        }
    }
}

impl RhsLayout {
    /// The layout of a `[size_k, size_n]` weight in blocks of `nr` columns.
    ///
    /// # Errors
    /// [`Error::Size`] if `nr` is not in [`NR`], the matrix is empty, the groups are neither all of
    /// K nor multiples of 32 that divide K, or the size overflows.
    pub fn new(shape: Shape, group_size: GroupSize, nr: usize) -> Result<Self> {
        if !NR.contains(&nr) {
            return Err(Error::size("nr of packed weights", nr, format!("one of {NR:?}")));
        }
        if shape.size_k == 0 || shape.size_n == 0 || shape.size_k > usize::MAX - CHUNK {
            return Err(Error::size("weight", shape, "1 or more of each, with room for padding"));
        }
        let group_rows = group_size.rows(shape.k());
        if group_rows != shape.size_k {
            groups(shape, group_rows)?;
        }
        // Upper bound per column on codes, scales and 12 more bytes.
        let column = padded_k(shape.size_k).saturating_add(12);
        product("packed weights", &[shape.size_n.saturating_add(nr), column])?;
        Ok(Self { shape, group_rows, nr, tables: CpuTables::NONE })
    }

    /// Matrix shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Columns per block.
    pub fn nr(&self) -> usize {
        self.nr
    }

    /// Whether there is one scale per column.
    pub fn is_channel_wise(&self) -> bool {
        self.group_rows == self.shape.size_k
    }

    /// Padded number of k that share a scale, which a kernel sums in integers.
    pub fn padded_group(&self) -> usize {
        padded_k(self.group_rows)
    }

    /// Scales per column.
    pub fn groups(&self) -> usize {
        self.shape.size_k / self.group_rows
    }

    /// Blocks of columns.
    pub fn blocks(&self) -> usize {
        self.shape.size_n.div_ceil(self.nr)
    }

    /// Bytes of a group's codes and, group-wise, its scales.
    pub fn group_bytes(&self) -> usize {
        let scales = if self.is_channel_wise() { 0 } else { 2 };
        self.nr * (self.padded_group() / 2 + scales)
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        let tail = if self.is_channel_wise() { 12 } else { 8 };
        self.groups() * self.group_bytes() + self.nr * tail
    }

    /// Number of bytes of the blocks, which come first.
    pub fn blocks_len(&self) -> usize {
        self.blocks() * self.block_bytes()
    }

    /// Number of bytes, with the tables.
    pub fn packed_len(&self) -> usize {
        self.blocks_len() + self.zero_points_len() + self.order_len()
    }

    fn column_of(&self, n: usize) -> (usize, usize) {
        assert!(n < self.shape.size_n, "n {n} of {}", self.shape.size_n);
        (n / self.nr * self.block_bytes(), n % self.nr)
    }

    /// Where the code of (`k`, `n`) is stored; the storage element is a byte. Panics outside.
    pub fn offset(&self, k: usize, n: usize) -> Slot {
        assert!(k < self.shape.size_k, "k {k} of {}", self.shape.size_k);
        let (block, column) = self.column_of(n);
        self.code_slot(block, column, k)
    }

    /// `block` is the block's first byte; k below Kp.
    fn code_slot(&self, block: usize, column: usize, k: usize) -> Slot {
        let (group, inside) = match self.is_channel_wise() {
            true => (0, k),
            false => (k / self.group_rows, k % self.group_rows),
        };
        let (chunk, rest) = (inside / CHUNK, inside % CHUNK);
        let (high, rest) = (rest / 16, rest % 16);
        let segment = chunk * 2 + rest / PIECE;
        let byte = (segment * self.nr + column) * PIECE + rest % PIECE;
        Slot { element: block + group * self.group_bytes() + byte, bit: 4 * high as u32, width: 4 }
    }

    /// First byte of the scale of (`group`, `n`): bf16 group-wise, f32 channel-wise. Panics
    /// outside.
    pub fn scale_offset(&self, group: usize, n: usize) -> usize {
        assert!(group < self.groups(), "group {group} of {}", self.groups());
        let (block, column) = self.column_of(n);
        if self.is_channel_wise() {
            return block + self.group_bytes() + 4 * (self.nr + column);
        }
        block + (group + 1) * self.group_bytes() - 2 * (self.nr - column)
    }

    /// First byte of column `n`'s sum. Panics outside.
    pub fn sum_offset(&self, n: usize) -> usize {
        let (block, column) = self.column_of(n);
        block + self.groups() * self.group_bytes() + 4 * column
    }

    /// First byte of column `n`'s bias. Panics outside.
    pub fn bias_offset(&self, n: usize) -> usize {
        let (block, column) = self.column_of(n);
        block + self.block_bytes() - 4 * (self.nr - column)
    }

    /// The value that bit `bit` (0 to 7) of byte `byte` belongs to. Panics outside the blocks.
    pub fn locate(&self, byte: usize, bit: u32) -> RhsPlace {
        assert!(byte < self.blocks_len() && bit < 8, "bit {bit} of byte {byte}");
        let (block, inside) = (byte / self.block_bytes(), byte % self.block_bytes());
        let at = |column, part, start, bit, bits| RhsPlace {
            block,
            column: block * self.nr + column,
            part,
            start: block * self.block_bytes() + start,
            bit,
            bits,
        };
        let tail = self.groups() * self.group_bytes();
        if inside >= tail {
            let index = (inside - tail) / 4;
            let part = match (index / self.nr, self.is_channel_wise()) {
                (0, _) => RhsPart::Sum,
                (1, true) => RhsPart::Scale { group: 0 },
                _ => RhsPart::Bias,
            };
            return at(index % self.nr, part, tail + 4 * index, 0, 32);
        }
        let (group, rest) = (inside / self.group_bytes(), inside % self.group_bytes());
        let codes = self.nr * self.padded_group() / 2;
        if rest >= codes {
            let index = (rest - codes) / 2;
            let start = group * self.group_bytes() + codes + 2 * index;
            return at(index, RhsPart::Scale { group }, start, 0, 16);
        }
        let (piece, j) = (rest / PIECE, rest % PIECE);
        let (segment, column) = (piece / self.nr, piece % self.nr);
        let (chunk, high) = (segment / 2, bit / 4);
        let k = chunk * CHUNK + 16 * high as usize + segment % 2 * PIECE + j;
        let k = group * self.padded_group() + k;
        at(column, RhsPart::Code { k }, inside, 4 * high, 4)
    }

    /// Interleaves columns.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Size`] if `columns` has another shape or group size than the
    /// layout; [`Error::Unsupported`] for a layout with tables, which [`RhsLayout::pack_weight`] fills.
    pub fn pack(&self, columns: &Columns) -> Result<PackedRhs<'static>> {
        self.expect_no_tables()?;
        if columns.shape() != self.shape {
            let found = [columns.shape().size_k, columns.shape().size_n];
            return Err(Error::shape("weight", &found, self.shape));
        }
        let channel_wise = columns.group_size() == GroupSize::Channel;
        let group_rows = columns.group_size().rows(self.shape.k());
        if (channel_wise, group_rows) != (self.is_channel_wise(), self.group_rows) {
            let expected = match self.is_channel_wise() {
                true => GroupSize::Channel,
                false => GroupSize::Of(self.group_rows),
            };
            return Err(Error::size("group_size", columns.group_size(), expected));
        }
        let mut bytes = vec![0u8; self.blocks_len()];
        for (b, block) in bytes.chunks_exact_mut(self.block_bytes()).enumerate() {
            for column in 0..self.nr {
                let n = (b * self.nr + column).min(self.shape.size_n - 1);
                self.write(columns, n, column, block);
            }
        }
        Ok(PackedRhs { layout: *self, bytes: Cow::Owned(bytes) })
    }

    /// Writes column `n` of the matrix to position `column` of a block.
    fn write(&self, columns: &Columns, n: usize, column: usize, block: &mut [u8]) {
        for (k, &code) in columns.column(n).iter().enumerate() {
            let slot = self.code_slot(0, column, k);
            block[slot.element] |= (code as u8 & 15) << slot.bit;
        }
        // Offsets of the first block's columns, all of which exist in a block.
        let tail = self.groups() * self.group_bytes() + 4 * column;
        let mut put = |at: usize, value: &[u8]| block[at..][..value.len()].copy_from_slice(value);
        match columns.factors() {
            Factors::Channel { scales, sums } => {
                put(tail, &sums[n].to_le_bytes());
                put(tail + 4 * self.nr, &scales[n].to_le_bytes());
                put(tail + 8 * self.nr, &columns.bias()[n].to_le_bytes());
            }
            Factors::Group { scales, sums, .. } => {
                for group in 0..self.groups() {
                    let at = (group + 1) * self.group_bytes() - 2 * (self.nr - column);
                    put(at, &scales[n * self.groups() + group].to_le_bytes());
                }
                put(tail, &sums[n].to_le_bytes());
                put(tail + 4 * self.nr, &columns.bias()[n].to_le_bytes());
            }
        }
    }
}

/// Packed weights with their layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedRhs<'a> {
    pub(super) layout: RhsLayout,
    pub(super) bytes: Cow<'a, [u8]>,
}

impl<'a> PackedRhs<'a> {
    /// Wraps bytes that were packed in `layout`.
    ///
    /// # Errors
    /// [`Error::Shape`] if the number of bytes differs from that of the layout; [`Error::Value`] for an
    /// order of rows that is no permutation.
    pub fn new(layout: RhsLayout, bytes: impl Into<Cow<'a, [u8]>>) -> Result<Self> {
        let bytes = bytes.into();
        if bytes.len() != layout.packed_len() {
            let expected = format!("[{}]", layout.packed_len());
            return Err(Error::shape("rhs_packed", &[bytes.len()], expected));
        }
        layout.check_order("rhs_packed", &bytes)?;
        Ok(Self { layout, bytes })
    }

    /// Wraps bytes whose number is that of `layout`.
    pub(super) fn of(layout: RhsLayout, bytes: &'a [u8]) -> Self {
        Self { layout, bytes: Cow::Borrowed(bytes) }
    }

    /// The layout.
    pub fn layout(&self) -> RhsLayout {
        self.layout
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The blocks and the tables.
    pub fn parts(&self) -> MatrixBytes<'_> {
        self.layout.parts(&self.bytes)
    }

    /// All bytes, owned.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes.into_owned()
    }

    /// The first value, in storage order, in which `found` differs; `None` if every bit is equal.
    ///
    /// # Errors
    /// [`Error::Size`] when `found` was packed under another layout; [`Error::Unsupported`] for tables.
    pub fn compare(&self, found: &PackedRhs<'_>) -> Result<Option<RhsPlace>> {
        self.layout.expect_no_tables()?;
        if found.layout != self.layout {
            let (found, expected) = (format!("{:?}", found.layout), format!("{:?}", self.layout));
            return Err(Error::size("layout of packed weights", found, expected));
        }
        let differing = (0..self.bytes.len()).find(|&i| self.bytes[i] != found.bytes[i]);
        Ok(differing.map(|byte| {
            self.layout.locate(byte, (self.bytes[byte] ^ found.bytes[byte]).trailing_zeros())
        }))
    }

    /// The bytes of block `i`. Panics outside.
    pub fn block(&self, i: usize) -> &[u8] {
        let len = self.layout.block_bytes();
        &self.bytes[i * len..][..len]
    }

    /// The columns, with the scales, sums and biases in the blocks. The tables are not applied: rows
    /// are in the order of the blocks, and codes have no zero points.
    pub fn unpack(&self) -> Columns {
        let layout = self.layout;
        let Shape { size_k, size_n } = layout.shape;
        let mut codes = Vec::with_capacity(layout.shape.len());
        for n in 0..size_n {
            codes.extend((0..size_k).map(|k| {
                let slot = layout.offset(k, n);
                // Shifted to the top and back, the nibble's sign bit fills the byte.
                ((self.bytes[slot.element] >> slot.bit << 4) as i8) >> 4
            }));
        }
        let float = |at| f32::from_le_bytes(word(&self.bytes, at));
        let columns = 0..size_n;
        let factors = match layout.is_channel_wise() {
            true => Factors::Channel {
                scales: columns.clone().map(|n| float(layout.scale_offset(0, n))).collect(),
                sums: columns
                    .clone()
                    .map(|n| i32::from_le_bytes(word(&self.bytes, layout.sum_offset(n))))
                    .collect(),
            },
            false => Factors::Group {
                group_size: layout.group_rows,
                scales: columns
                    .clone()
                    .flat_map(|n| (0..layout.groups()).map(move |g| layout.scale_offset(g, n)))
                    .map(|at| u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]))
                    .collect(),
                sums: columns.clone().map(|n| float(layout.sum_offset(n))).collect(),
            },
        };
        let bias = columns.map(|n| float(layout.bias_offset(n))).collect();
        Columns::from_parts(layout.shape, codes, factors, bias)
    }
}
