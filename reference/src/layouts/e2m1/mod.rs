//! MXFP4 weights in blocks of 16 columns, for CPU kernels with int8 activations.
//!
//! A block holds, for each group of 32 k, codes `[4][16][4]` and UE8M0 scales `[16]`; then f32 biases
//! `[16]`. Byte (piece p, column n, j) of a group's codes holds k = 4p + j in its low nibble and
//! k + 16 in its high one, as e2m1 bits. A vector of 64 bytes is therefore four k of sixteen columns,
//! the operand of byte dot products, without rearrangement. Columns past N are zero bytes.

pub(super) mod positions;
mod stack;
mod weight;

use std::borrow::Cow;
use std::fmt;

use super::cpu::{CpuFormat, CpuSizes, CpuTables};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::{Error, Result};

pub use stack::E2m1Stack;

/// k that share a scale.
pub const GROUP: usize = 32;
/// Columns of a block.
pub const NR: usize = 16;
/// Bytes of a group's codes in a block.
pub const CODE_BYTES: usize = GROUP / 2 * NR;
/// Bytes of a group in a block: codes, then scales.
pub const GROUP_BYTES: usize = CODE_BYTES + NR;
/// The format's name in files, with an ending: operations of cases are named after it.
macro_rules! name {
    ($($end:literal)?) => {
        concat!("mxfp4_int8" $(, $end)?)
    };
}
pub(crate) use name;

/// The layout's name for viewers.
const VIEW: &str = "CPU: MXFP4 weight for int8 activations";

/// The descriptor for files, conversion and kernels.
pub(super) const FORMAT: CpuFormat = CpuFormat {
    name: name!(),
    title: "MXFP4",
    element: ScalarType::FLOAT4_E2M1F,
    activations: "quantized per group of 32",
    nr: &[NR],
    sizes: |shape, group_size, nr, tables| {
        CpuFormat::check_nr(nr, &[NR])?;
        if tables != CpuTables::NONE {
            return Err(Error::unsupported(
                format!("e2m1 weights with {tables:?}"),
                "they have none",
            ));
        }
        if group_size != GroupSize::Of(GROUP) {
            return Err(Error::size("group_size", group_size, GROUP));
        }
        let layout = E2m1Layout::new(shape)?;
        Ok(CpuSizes {
            groups: layout.groups(),
            block_bytes: layout.block_bytes(),
            packed_len: layout.packed_len(),
        })
    },
    pack: |weight, nr| {
        CpuFormat::check_nr(nr, &[NR])?;
        Ok(E2m1Layout::new(weight.shape())?.pack_weight(weight)?.into_bytes())
    },
};

/// k of a column that are adjacent.
const PIECE: usize = 4;

/// The positions of a weight `[K, N]` and its biases in packed bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct E2m1Layout {
    shape: Shape,
}

/// The kind of a value of a packed weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum E2m1Part {
    /// The e2m1 code of this k.
    Code {
        /// k.
        k: usize,
    },
    /// The UE8M0 scale of this group.
    Scale {
        /// Group of 32 k.
        group: usize,
    },
    /// The f32 bias.
    Bias,
}

/// The value that a bit of a packed weight belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct E2m1Place {
    /// n; N and above in the last block's padding.
    pub column: usize,
    /// What it is.
    pub part: E2m1Part,
    /// The value's first byte.
    pub start: usize,
    /// Its lowest bit in that byte.
    pub bit: u32,
    /// Its bits.
    pub bits: u32,
}

impl fmt::Display for E2m1Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.column;
        match self.part {
            E2m1Part::Code { k } => write!(f, "code of (k {k}, n {n})"),
            E2m1Part::Scale { group } => write!(f, "scale of (group {group}, n {n})"),
            E2m1Part::Bias => write!(f, "bias of n {n}"),
        }
    }
}

/// A weight as checkpoints store it, row by output feature.
#[derive(Debug, Clone, Copy)]
pub struct E2m1Rows<'a> {
    /// e2m1 codes `[N, K / 2]`; the even k is in the low nibble.
    pub blocks: &'a [u8],
    /// UE8M0 `[N, K / 32]`.
    pub scales: &'a [u8],
    /// `[N]`; absent: zeros.
    pub bias: Option<&'a [f32]>,
}

impl E2m1Layout {
    /// The layout of a weight `[K, N]`.
    ///
    /// # Errors
    /// [`Error::Size`] unless K is a positive multiple of 32 and N is positive, and for a size that
    /// memory cannot hold.
    pub fn new(shape: Shape) -> Result<Self> {
        let Shape { size_k, size_n } = shape;
        if size_k == 0 || !size_k.is_multiple_of(GROUP) {
            return Err(Error::size("size_k", size_k, format!("a positive multiple of {GROUP}")));
        }
        if size_n == 0 {
            return Err(Error::size("size_n", size_n, "1 or more"));
        }
        let bytes = (size_k / GROUP)
            .checked_mul(GROUP_BYTES)
            .and_then(|b| b.checked_add(4 * NR)?.checked_mul(size_n.div_ceil(NR)));
        match bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok()) {
            true => Ok(Self { shape }),
            false => Err(Error::size("packed weight", shape, "a size that memory can hold")),
        }
    }

    /// `[K, N]`.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Groups of 32 k.
    pub fn groups(&self) -> usize {
        self.shape.size_k / GROUP
    }

    /// Blocks of 16 columns.
    pub fn blocks(&self) -> usize {
        self.shape.size_n.div_ceil(NR)
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.groups() * GROUP_BYTES + 4 * NR
    }

    /// Number of bytes.
    pub fn packed_len(&self) -> usize {
        self.blocks() * self.block_bytes()
    }

    /// Byte and lowest bit of the code at (k, n). Panics outside.
    pub fn code_offset(&self, k: usize, n: usize) -> (usize, u32) {
        assert!(k < self.shape.size_k, "k {k}");
        let inside = k % GROUP;
        let (low, high) = (inside % (GROUP / 2), inside / (GROUP / 2));
        let byte = low / PIECE * PIECE * NR + n % NR * PIECE + low % PIECE;
        (self.group_start(k / GROUP, n) + byte, 4 * high as u32)
    }

    /// Byte of the scale at (group, n). Panics outside.
    pub fn scale_offset(&self, group: usize, n: usize) -> usize {
        assert!(group < self.groups(), "group {group}");
        self.group_start(group, n) + CODE_BYTES + n % NR
    }

    /// First byte of the bias of column `n`. Panics outside.
    pub fn bias_offset(&self, n: usize) -> usize {
        self.group_start(self.groups(), n) + 4 * (n % NR)
    }

    fn group_start(&self, group: usize, n: usize) -> usize {
        assert!(n < self.shape.size_n, "column {n}");
        n / NR * self.block_bytes() + group * GROUP_BYTES
    }

    /// The value that bit `bit` of byte `byte` belongs to. Panics outside.
    pub fn locate(&self, byte: usize, bit: u32) -> E2m1Place {
        assert!(byte < self.packed_len() && bit < 8, "byte {byte}, bit {bit}");
        let (block, inside) = (byte / self.block_bytes(), byte % self.block_bytes());
        let (group, at) = (inside / GROUP_BYTES, inside % GROUP_BYTES);
        let place = |column, part, start, bit, bits| E2m1Place {
            column: block * NR + column,
            part,
            start: byte - inside + start,
            bit,
            bits,
        };
        if group == self.groups() || inside >= self.groups() * GROUP_BYTES {
            let word = (inside - self.groups() * GROUP_BYTES) / 4;
            let start = self.groups() * GROUP_BYTES + 4 * word;
            return place(word, E2m1Part::Bias, start, 0, 32);
        }
        if at >= CODE_BYTES {
            return place(at - CODE_BYTES, E2m1Part::Scale { group }, inside, 0, 8);
        }
        let (piece, column, j) = (at / (PIECE * NR), at / PIECE % NR, at % PIECE);
        let k = group * GROUP + piece * PIECE + j + (bit / 4) as usize * (GROUP / 2);
        place(column, E2m1Part::Code { k }, inside, bit / 4 * 4, 4)
    }

    /// Packs a weight. Row `n` of the result is row `source(n)` of `rows`, so that checkpoints with
    /// interleaved gate and up rows need no copy.
    ///
    /// # Errors
    /// [`Error::Shape`] for parts of other lengths; [`Error::Value`] for a NaN scale (0xff).
    ///
    /// Panics if `source` returns N or more.
    pub fn pack(
        &self,
        rows: E2m1Rows<'_>,
        source: impl Fn(usize) -> usize,
    ) -> Result<PackedE2m1<'static>> {
        self.check(rows)?;
        let mut bytes = vec![0; self.packed_len()];
        self.fill(rows, source, &mut bytes);
        PackedE2m1::new(*self, bytes)
    }

    /// Checks the lengths of parts, and scales.
    fn check(&self, rows: E2m1Rows<'_>) -> Result<()> {
        let Shape { size_k, size_n } = self.shape;
        let lengths = [
            ("blocks", rows.blocks.len(), [size_n, size_k / 2]),
            ("scales", rows.scales.len(), [size_n, self.groups()]),
            ("bias", rows.bias.map_or(size_n, <[f32]>::len), [size_n, 1]),
        ];
        if let Some((name, found, shape)) = lengths.iter().find(|l| l.1 != l.2[0] * l.2[1]) {
            return Err(Error::shape(*name, &[*found], format!("{shape:?}")));
        }
        if let Some(i) = rows.scales.iter().position(|&s| s == 0xff) {
            let at = [i / self.groups(), i % self.groups()];
            return Err(Error::value("scales [n, group]", &at, "NaN (0xff)", "a power of two"));
        }
        Ok(())
    }

    /// Writes checked rows to zeros of [`E2m1Layout::packed_len`].
    fn fill(&self, rows: E2m1Rows<'_>, source: impl Fn(usize) -> usize, bytes: &mut [u8]) {
        let Shape { size_k, size_n } = self.shape;
        for n in 0..size_n {
            let from = source(n);
            let codes = &rows.blocks[from * size_k / 2..][..size_k / 2];
            let scales = &rows.scales[from * self.groups()..][..self.groups()];
            for (g, (codes, &scale)) in codes.chunks_exact(GROUP / 2).zip(scales).enumerate() {
                let group = &mut bytes[self.group_start(g, n)..][..GROUP_BYTES];
                interleave(codes, &mut group[n % NR * PIECE..CODE_BYTES]);
                group[CODE_BYTES + n % NR] = scale;
            }
            let bias = rows.bias.map_or(0.0, |bias| bias[from]);
            bytes[self.bias_offset(n)..][..4].copy_from_slice(&bias.to_le_bytes());
        }
    }
}

/// Stores the 32 codes of one column; `out` begins with the column's first byte.
fn interleave(codes: &[u8], out: &mut [u8]) {
    let (first, second) = codes.split_at(GROUP / 4);
    for (i, (&a, &b)) in first.iter().zip(second).enumerate() {
        let at = 2 * i / PIECE * PIECE * NR + 2 * i % PIECE;
        out[at] = a & 15 | b << 4;
        out[at + 1] = a >> 4 | b & 0xf0;
    }
}

/// A packed weight, owned or borrowed (of a mapped file).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedE2m1<'a> {
    layout: E2m1Layout,
    bytes: Cow<'a, [u8]>,
}

/// A weight taken out of its packed bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct UnpackedE2m1 {
    /// e2m1 codes `[N, K / 2]`; the even k is in the low nibble.
    pub blocks: Vec<u8>,
    /// UE8M0 `[N, K / 32]`.
    pub scales: Vec<u8>,
    /// `[N]`.
    pub bias: Vec<f32>,
}

impl<'a> PackedE2m1<'a> {
    /// Wraps bytes that were packed in `layout`.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of bytes.
    pub fn new(layout: E2m1Layout, bytes: impl Into<Cow<'a, [u8]>>) -> Result<Self> {
        let bytes = bytes.into();
        match bytes.len() == layout.packed_len() {
            true => Ok(Self { layout, bytes }),
            false => {
                let expected = format!("[{}]", layout.packed_len());
                Err(Error::shape("packed weight", &[bytes.len()], expected))
            }
        }
    }

    /// The layout.
    pub fn layout(&self) -> E2m1Layout {
        self.layout
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes, owned.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes.into_owned()
    }

    /// The weight as checkpoints store it.
    pub fn unpack(&self) -> UnpackedE2m1 {
        let (layout, Shape { size_k, size_n }) = (self.layout, self.layout.shape);
        let code = |k, n| {
            let (byte, bit) = layout.code_offset(k, n);
            self.bytes[byte] >> bit & 15
        };
        let columns = 0..size_n;
        let word = |n| {
            let at = layout.bias_offset(n);
            [0, 1, 2, 3].map(|i| self.bytes[at + i])
        };
        UnpackedE2m1 {
            blocks: columns
                .clone()
                .flat_map(|n| {
                    (0..size_k / 2).map(move |i| code(2 * i, n) | code(2 * i + 1, n) << 4)
                })
                .collect(),
            scales: columns
                .clone()
                .flat_map(|n| (0..layout.groups()).map(move |g| layout.scale_offset(g, n)))
                .map(|at| self.bytes[at])
                .collect(),
            bias: columns.map(|n| f32::from_le_bytes(word(n))).collect(),
        }
    }
}
