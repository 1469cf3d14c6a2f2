//! The integer formats: codes of 4 or 8 bits with real scales, and zero points or none.
//!
//! An [`IntFormat`] describes how one of them stores a matrix, so configs, selection, cases and
//! loaders name no format. A new format is a file with a `FORMAT` and, if cases hold it, an entry in
//! [`ALL`](super::ALL).

use std::fmt;
use std::hash::{Hash, Hasher};

use rayon::prelude::*;

use super::mistake::MistakeName;
use super::words::{pack_rows, transpose_fields, unpack_rows};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::num::tensor::Tensor;
use crate::weight::{Codes, Table, TableData, Weight};
use crate::{Error, Result};

/// How the integers of one matrix are to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IntStorage {
    /// 4 or 8.
    pub bits: u32,
    /// k per scale; [`GroupSize::Channel`]: one for a column.
    pub group_size: GroupSize,
    /// Whether all zero points are the middle of the range.
    pub symmetric: bool,
    /// Whether rows belong to groups by `g_idx`.
    pub act_order: bool,
}

impl IntStorage {
    /// Type of a code.
    pub fn ty(&self) -> ScalarType {
        match (self.bits, self.symmetric) {
            (4, true) => ScalarType::UINT4B8,
            (4, false) => ScalarType::UINT4,
            (_, true) => ScalarType::UINT8B128,
            (_, false) => ScalarType::UINT8,
        }
    }

    /// With channel-wise scales there is only one group and no order.
    pub(super) fn has_act_order(&self) -> bool {
        self.act_order && self.group_size != GroupSize::Channel
    }
}

/// Names of a matrix's tensors.
#[derive(Debug)]
pub struct IntNames {
    /// Codes.
    pub weight: &'static str,
    /// Scales.
    pub scales: &'static str,
    /// Zero points.
    pub zeros: &'static str,
    /// The group of each row.
    pub g_idx: &'static str,
}

/// The tensors of one matrix in a file.
#[derive(Debug, Clone)]
pub struct IntTensors<'a> {
    /// Codes.
    pub weight: Tensor<'a>,
    /// Scales.
    pub scales: Tensor<'a>,
    /// Zero points.
    pub zeros: Option<Tensor<'a>>,
    /// `[size_k]`.
    pub g_idx: Option<Tensor<'a>>,
    /// `[size_n]`.
    pub bias: Option<Tensor<'a>>,
}

/// An order of columns in a word, and the mistakes that its readers make.
pub struct Interleave {
    /// The column of a group of eight (four at 8 bits) that each field of a word holds.
    pub order: fn(u32) -> &'static [usize],
    /// In packed weights: the words still hold the order.
    pub words_kept: MistakeName,
    /// In packed weights and zero points: the permutation was applied instead of its inverse.
    pub forward: MistakeName,
    /// In packed weights: the order was not undone.
    pub kept: MistakeName,
    /// In products: the permutation was applied instead of its inverse.
    pub product_inverted: MistakeName,
    /// In products: the order was not undone.
    pub product_not_undone: MistakeName,
}

impl Interleave {
    /// Ways to undo the order wrongly, as products show them: column c of a group of eight comes
    /// out as column `map[c]`.
    pub fn product_mistakes(&self) -> [(MistakeName, [usize; 8]); 2] {
        let order = std::array::from_fn(|field| (self.order)(4)[field]);
        [(self.product_inverted, order.map(|c| order[c])), (self.product_not_undone, order)]
    }
}

/// Where codes that share a word are neighbours.
#[derive(Clone, Copy)]
pub enum Packing {
    /// Along K, the first row in the lowest bits.
    AlongK,
    /// Along N, in an order of columns.
    AlongN(&'static Interleave),
    /// Nowhere: a byte for each code.
    Bytes,
}

/// The configs of a format whose checkpoints have one scheme for all modules: codes of 4 bits with
/// stored zero points.
#[derive(Debug)]
pub struct IntConfig {
    /// Values of `quant_method`. The first one names the method.
    pub methods: &'static [&'static str],
    /// Names of the key with the bits per weight, upstream's first.
    pub bits: &'static [&'static str],
    /// Names of the key with the group size, upstream's first.
    pub group_size: &'static [&'static str],
    /// The key that states zero points. Configs without a `quant_method` are recognized by it.
    pub zero_point: &'static str,
    /// Values of `version` whose tensors are stored alike. The first one is the default.
    pub versions: &'static [&'static str],
}

/// Reads a matrix.
pub type UnpackInt = for<'a> fn(IntTensors<'a>, &str, &IntStorage) -> Result<Weight<'a>>;

/// One integer format.
pub struct IntFormat {
    /// Name in case files and reports.
    pub name: &'static str,
    /// Types of the codes that cases may hold.
    pub case_types: &'static [ScalarType],
    /// Names of the tensors in files and cases.
    pub names: &'static IntNames,
    /// Names of the tensors in the kernel's format, as upstream's layer registers them.
    pub kernel_names: &'static IntNames,
    /// Whether the tensors are stored with their columns first, `[size_n, size_k]`.
    pub columns_first: bool,
    /// Where codes share a word.
    pub packing: Packing,
    /// Whether rows may belong to groups by `g_idx`.
    pub act_order: bool,
    /// The stored zero point of symmetric codes of 4 or 8 bits, for files that have zero points all
    /// the same.
    pub symmetric_zero: fn(u32) -> u8,
    /// Whether upstream's own Marlin MoE method takes matrices with zero points.
    pub moe_zero_points: bool,
    /// Whether upstream's method of experts asks its integer oracle for a kernel.
    pub moe_oracle: bool,
    /// How configs name the format, unless rules for single modules need a parser of their own.
    pub config: Option<&'static IntConfig>,
    /// Builds the weight of one matrix.
    pub unpack: UnpackInt,
}

impl IntFormat {
    /// Shape of the codes' tensor of a matrix with rows first; `pack` codes to a word.
    pub fn words_shape(&self, size_k: usize, size_n: usize, pack: usize) -> [usize; 2] {
        match self.packing {
            Packing::AlongK => [size_k / pack, size_n],
            Packing::AlongN(_) => [size_k, size_n / pack],
            Packing::Bytes => [size_k, size_n],
        }
    }

    /// Whether words are packed along N.
    pub const fn is_packed_along_n(&self) -> bool {
        matches!(self.packing, Packing::AlongN(_))
    }

    /// The codes of stored words.
    ///
    /// # Errors
    /// [`Error::Size`], [`Error::Shape`] where the words are not those of `shape`.
    pub fn codes(&self, bits: u32, shape: Shape, words: Vec<u32>) -> Result<Codes<'static>> {
        match self.packing {
            Packing::AlongN(interleave) => along_k(bits, shape, &words, (interleave.order)(bits)),
            _ => Codes::from_words(bits, shape, words),
        }
    }

    /// The inverse of [`Self::codes`].
    pub(crate) fn words(&self, codes: &Codes<'_>) -> Vec<u32> {
        match self.packing {
            Packing::AlongN(interleave) => along_n(codes, (interleave.order)(codes.bits())),
            _ => codes.words().to_vec(),
        }
    }

    /// The words of zero points `[groups, size_n]`, whose columns fill whole words.
    pub(crate) fn zero_words(&self, zeros: &Table) -> Vec<u32> {
        let TableData::B8(codes) = zeros.data() else { return Vec::new() };
        let bits = zeros.ty().size_bits();
        pack_rows(codes, zeros.cols(), bits, self.columns(bits))
    }

    /// Zero points `[groups, size_n]` of stored words.
    pub(crate) fn zeros(
        &self,
        ty: ScalarType,
        groups: usize,
        size_n: usize,
        words: &[u32],
    ) -> Result<Table> {
        let bits = ty.size_bits();
        let codes = unpack_rows(words, size_n, bits, self.columns(bits));
        Table::new(ty, groups, size_n, TableData::B8(codes))
    }

    fn columns(&self, bits: u32) -> &'static [usize] {
        match self.packing {
            Packing::AlongN(interleave) => (interleave.order)(bits),
            _ => super::words::plain_order(bits),
        }
    }
}

/// Words `[size_k, size_n / pack]` packed along N to codes packed along K.
pub(super) fn along_k(
    bits: u32,
    shape: Shape,
    words: &[u32],
    order: &[usize],
) -> Result<Codes<'static>> {
    let rows = shape.k().packed(bits)?.0;
    if rows.checked_mul(shape.size_n) != Some(words.len()) {
        return Err(Error::shape("codes", &[words.len()], format!("{rows} x {}", shape.size_n)));
    }
    let mut out = vec![0u32; words.len()];
    match bits {
        4 => turn::<8>(words, &mut out, shape.size_n, order),
        _ => turn::<4>(words, &mut out, shape.size_n, order),
    }
    Codes::from_words(bits, shape, out)
}

/// The inverse of [`along_k`].
pub(super) fn along_n(codes: &Codes<'_>, order: &[usize]) -> Vec<u32> {
    let size_n = codes.shape().size_n;
    match codes.bits() {
        4 => turn_back::<8>(codes.words(), size_n, order),
        _ => turn_back::<4>(codes.words(), size_n, order),
    }
}

/// For each `P` rows and each word column, the square of fields is transposed.
fn turn<const P: usize>(words: &[u32], out: &mut [u32], size_n: usize, order: &[usize]) {
    let per_row = size_n / P;
    out.par_chunks_mut(size_n).zip(words.par_chunks(size_n)).for_each(|(line, square)| {
        for (w, group) in line.chunks_exact_mut(P).enumerate() {
            let mut fields = std::array::from_fn(|k| square[k * per_row + w]);
            transpose_fields::<P>(&mut fields);
            for (&column, field) in order.iter().zip(fields) {
                group[column] = field;
            }
        }
    });
}

/// The inverse of [`turn`].
fn turn_back<const P: usize>(words: &[u32], size_n: usize, order: &[usize]) -> Vec<u32> {
    let per_row = size_n / P;
    let mut out = vec![0u32; words.len()];
    out.par_chunks_mut(size_n).zip(words.par_chunks(size_n)).for_each(|(square, line)| {
        for (w, group) in line.chunks_exact(P).enumerate() {
            let mut fields = std::array::from_fn(|i| group[order[i]]);
            transpose_fields::<P>(&mut fields);
            for (k, field) in fields.into_iter().enumerate() {
                square[k * per_row + w] = field;
            }
        }
    });
    out
}

impl PartialEq for IntFormat {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for IntFormat {}

impl Hash for IntFormat {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl fmt::Debug for IntFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl fmt::Display for IntFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
