//! Int8 weights in blocks of 16 columns, for CPU kernels with int8 activations.
//!
//! A block holds codes `[Kp / 4][16][4]`, where Kp is K rounded up to a multiple of 64 with zeros, then
//! −128·Σw of each column (i32), f32 scales and f32 biases, `[16]` each. A vector of 64 bytes is
//! therefore four k of sixteen columns, the operand of byte dot products, and 1024 bytes are a tile of
//! AMX. Kernels whose products take one unsigned factor multiply by q + 128, and begin with −128·Σw.
//! Columns past N are zero bytes.

use std::borrow::Cow;

use super::cpu::{CpuFormat, CpuSizes, CpuTables};
use super::positions::{Named, Part, Positions, Request, Value};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::weight::Weight;
use crate::{Error, Result};

/// Columns of a block.
pub const NR: usize = 16;
/// K is padded to a multiple of this.
pub const K_UNIT: usize = 64;
/// The largest K: a sum of this many products of −128 and −128 is below 2^31.
pub const MAX_K: usize = (1 << 17) - 1;
/// k of a column that are adjacent.
pub const PIECE: usize = 4;
/// Bytes of a column after its codes: −128·Σw, scale and bias.
const TAIL: usize = 12;

/// The layout's name for viewers.
const VIEW: &str = "CPU: int8 weight for int8 activations";
/// The format's name in files.
const NAME: &str = "int8";

/// The descriptor for files, conversion and kernels.
pub(super) const FORMAT: CpuFormat = CpuFormat {
    name: NAME,
    title: "W8A8-int8",
    element: ScalarType::INT8,
    activations: "quantized per token",
    nr: &[NR],
    sizes: |shape, group_size, nr, tables| {
        CpuFormat::check_nr(nr, &[NR])?;
        if tables != CpuTables::NONE {
            return Err(Error::unsupported(
                format!("int8 weights with {tables:?}"),
                "they have none",
            ));
        }
        if group_size != GroupSize::Channel {
            return Err(Error::size("group_size", group_size, GroupSize::Channel));
        }
        let layout = Int8Layout::new(shape)?;
        Ok(CpuSizes {
            groups: 1,
            block_bytes: layout.block_bytes(),
            packed_len: layout.packed_len(),
        })
    },
    pack: |weight, nr| {
        CpuFormat::check_nr(nr, &[NR])?;
        Ok(Int8Layout::new(weight.shape())?.pack_weight(weight)?.into_bytes())
    },
};

pub(super) const ALL: &[Named] =
    &[Named { name: NAME, title: VIEW, options: &[], one: all_positions }];

/// The positions of a weight `[K, N]`, its scales and biases in packed bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Int8Layout {
    shape: Shape,
}

/// The value of a column that follows its codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Int8Tail {
    /// −128·Σw, an i32.
    Correction,
    /// The f32 scale.
    Scale,
    /// The f32 bias.
    Bias,
}

impl Int8Tail {
    const ALL: [Self; 3] = [Self::Correction, Self::Scale, Self::Bias];
}

/// The value that a byte of a packed weight belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Int8Place {
    /// The code at (k, n); in the padding, k is K and above or n is N and above.
    Code {
        /// k.
        k: usize,
        /// n.
        n: usize,
    },
    /// A value after the codes.
    Tail {
        /// Which.
        what: Int8Tail,
        /// n.
        n: usize,
        /// The byte of its value, from the lowest.
        byte: usize,
    },
}

impl Int8Layout {
    /// The layout of a weight `[K, N]`.
    ///
    /// # Errors
    /// [`Error::Size`] unless K is from 1 to [`MAX_K`] and N is positive, and for a size that memory
    /// cannot hold.
    pub fn new(shape: Shape) -> Result<Self> {
        let Shape { size_k, size_n } = shape;
        if !(1..=MAX_K).contains(&size_k) {
            let expected = format!("1 to {MAX_K}, so that sums of int8 products fit 32 bits");
            return Err(Error::size("size_k", size_k, expected));
        }
        if size_n == 0 {
            return Err(Error::size("size_n", size_n, "1 or more"));
        }
        let layout = Self { shape };
        let bytes = size_n.div_ceil(NR).checked_mul(layout.block_bytes());
        match bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok()) {
            true => Ok(layout),
            false => Err(Error::size("packed weight", shape, "a size that memory can hold")),
        }
    }

    /// `[K, N]`.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Kp.
    pub fn padded_k(&self) -> usize {
        self.shape.size_k.next_multiple_of(K_UNIT)
    }

    /// Blocks of 16 columns.
    pub fn blocks(&self) -> usize {
        self.shape.size_n.div_ceil(NR)
    }

    /// Bytes of a block's codes.
    pub fn code_bytes(&self) -> usize {
        self.padded_k() * NR
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.code_bytes() + TAIL * NR
    }

    /// Number of bytes.
    pub fn packed_len(&self) -> usize {
        self.blocks() * self.block_bytes()
    }

    /// Byte of the code at (k, n). Panics outside.
    pub fn code_offset(&self, k: usize, n: usize) -> usize {
        assert!(k < self.shape.size_k, "k {k}");
        self.block_start(n) + (k / PIECE * NR + n % NR) * PIECE + k % PIECE
    }

    /// First byte of a value of column `n` that follows its codes. Panics outside.
    pub fn tail_offset(&self, what: Int8Tail, n: usize) -> usize {
        self.block_start(n) + self.code_bytes() + (what as usize * NR + n % NR) * 4
    }

    fn block_start(&self, n: usize) -> usize {
        assert!(n < self.shape.size_n, "column {n}");
        n / NR * self.block_bytes()
    }

    /// The value that byte `byte` belongs to. Panics outside.
    pub fn locate(&self, byte: usize) -> Int8Place {
        assert!(byte < self.packed_len(), "byte {byte}");
        let (block, at) = (byte / self.block_bytes(), byte % self.block_bytes());
        match at.checked_sub(self.code_bytes()) {
            None => {
                let (piece, n, j) = (at / (PIECE * NR), at / PIECE % NR, at % PIECE);
                Int8Place::Code { k: piece * PIECE + j, n: block * NR + n }
            }
            Some(at) => {
                let (what, n) = (Int8Tail::ALL[at / (4 * NR)], at / 4 % NR);
                Int8Place::Tail { what, n: block * NR + n, byte: at % 4 }
            }
        }
    }

    /// Packs `weight`: int8 codes with one scale for each column, and a bias of any float type.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for another type of codes, zero points, a global scale and groups;
    /// [`Error::Shape`] for another shape; [`Error::Value`] for a scale that is not finite; the errors of
    /// [`Weight::validate`].
    pub fn pack_weight(&self, weight: &Weight<'_>) -> Result<PackedInt8<'static>> {
        self.check(weight)?;
        let size_n = self.shape.size_n;
        let words = weight.codes.words();
        let mut bytes = vec![0u8; self.packed_len()];
        for (b, block) in bytes.chunks_exact_mut(self.block_bytes()).enumerate() {
            let columns = b * NR..size_n.min((b + 1) * NR);
            let (codes, tail) = block.split_at_mut(self.code_bytes());
            let mut sums = [0i32; NR];
            for (row, piece) in words.chunks_exact(size_n).zip(codes.chunks_exact_mut(PIECE * NR)) {
                let of_columns = row[columns.clone()].iter().zip(piece.chunks_exact_mut(PIECE));
                for ((word, out), sum) in of_columns.zip(&mut sums) {
                    out.copy_from_slice(&word.to_le_bytes());
                    *sum += out.iter().map(|&w| i32::from(w as i8)).sum::<i32>();
                }
            }
            for (i, n) in columns.enumerate() {
                let bias = weight.bias.as_ref().map_or(0.0, |bias| bias.value(0, n) as f32);
                // Floats of 16 and 32 bits are exact in f32.
                let scale = weight.scales.value(0, n) as f32;
                let correction = sums[i].wrapping_mul(-128).to_le_bytes();
                for (what, value) in
                    [correction, scale.to_le_bytes(), bias.to_le_bytes()].iter().enumerate()
                {
                    tail[(what * NR + i) * 4..][..4].copy_from_slice(value);
                }
            }
        }
        PackedInt8::new("packed weight", *self, bytes)
    }

    /// Checks that the layout can hold `weight`.
    fn check(&self, weight: &Weight<'_>) -> Result<()> {
        weight.validate()?;
        let refuse = |found: String| {
            let reason = "expected int8 codes with a scale for each column";
            Err(Error::unsupported(format!("{}: {found}", weight.name), reason))
        };
        if weight.ty != ScalarType::INT8 {
            return refuse(format!("{} codes", weight.ty));
        }
        if weight.scales.rows() != 1 || !weight.scales.ty().is_floating_point() {
            let (ty, rows) = (weight.scales.ty(), weight.scales.rows());
            return refuse(format!("{rows} rows of {ty} scales"));
        }
        if weight.zeros.is_some() || weight.global_scale.is_some() {
            return refuse("zero points or a global scale".to_owned());
        }
        if weight.shape() != self.shape {
            let found = [weight.shape().size_k, weight.shape().size_n];
            return Err(Error::shape(&weight.name, &found, self.shape));
        }
        let infinite = |n: &usize| !weight.scales.value(0, *n).is_finite();
        match (0..self.shape.size_n).find(infinite) {
            Some(n) => {
                let found = weight.scales.value(0, n);
                Err(Error::value(format!("{} scales [n]", weight.name), &[n], found, "finite"))
            }
            None => Ok(()),
        }
    }
}

/// Packed weights of one layout, owned or borrowed (of a mapped file): one matrix, or several, such as
/// the experts of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedInt8<'a> {
    layout: Int8Layout,
    bytes: Cow<'a, [u8]>,
}

impl<'a> PackedInt8<'a> {
    /// Wraps `[count][Int8Layout::packed_len]` bytes; errors contain `name`.
    ///
    /// # Errors
    /// [`Error::Shape`] unless they are one or more whole matrices.
    pub fn new(name: &str, layout: Int8Layout, bytes: impl Into<Cow<'a, [u8]>>) -> Result<Self> {
        let bytes = bytes.into();
        if bytes.is_empty() || !bytes.len().is_multiple_of(layout.packed_len()) {
            let expected = format!("[1 or more, {}]", layout.packed_len());
            return Err(Error::shape(name, &[bytes.len()], expected));
        }
        Ok(Self { layout, bytes })
    }

    /// The layout of each matrix.
    pub fn layout(&self) -> Int8Layout {
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

    /// The bytes, owned.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes.into_owned()
    }

    /// The codes of matrix `i`, `[N][K]`. Panics outside.
    pub fn codes(&self, i: usize) -> Vec<i8> {
        let (matrix, Shape { size_k, size_n }) = (self.matrix(i), self.layout.shape);
        let column = |n| (0..size_k).map(move |k| matrix[self.layout.code_offset(k, n)] as i8);
        (0..size_n).flat_map(column).collect()
    }

    /// Scales or biases of matrix `i`, `[N]`. Panics outside.
    pub fn floats(&self, i: usize, what: Int8Tail) -> Vec<f32> {
        let matrix = self.matrix(i);
        let word = |n| {
            let at = self.layout.tail_offset(what, n);
            f32::from_le_bytes([0, 1, 2, 3].map(|j| matrix[at + j]))
        };
        (0..self.layout.shape.size_n).map(word).collect()
    }

    fn matrix(&self, i: usize) -> &[u8] {
        &self.bytes[i * self.layout.packed_len()..][..self.layout.packed_len()]
    }
}

fn all_positions(r: &Request) -> Result<Positions> {
    let layout = Int8Layout::new(Shape::new(r.size_k, r.size_n))?;
    let mut values = Vec::new();
    let mut byte = 0;
    while byte < layout.packed_len() {
        let (part, row, col, bytes) = match layout.locate(byte) {
            Int8Place::Code { k, n } if k < r.size_k => (Part::Code, k, n, 1),
            Int8Place::Code { k, n } => (Part::Padding, k, n, 1),
            Int8Place::Tail { what, n, .. } => match what {
                Int8Tail::Correction => (Part::Sum, 0, n, 4),
                Int8Tail::Scale => (Part::Scale, 0, n, 4),
                Int8Tail::Bias => (Part::Bias, 0, n, 4),
            },
        };
        values.push(Value {
            element: byte,
            bit: 0,
            width: 8 * bytes as u32,
            part: if col < r.size_n { part } else { Part::Padding },
            expert: 0,
            row,
            col,
            fragment: None,
        });
        byte += bytes;
    }
    let packed_shape = [layout.blocks(), layout.block_bytes()];
    Ok(Positions { packed_shape, element_bits: 8, shape: [r.size_k, r.size_n], values })
}
