//! The contents of a packed weight before it is interleaved.

use super::CHUNK;
use super::parts::{Parts, Scales};
use crate::num::dims::{GroupSize, LogicalK, Shape};
use crate::num::scalar::bf16_to_f32;
use crate::weight::{Table, Weight};
use crate::{Error, Result};

/// The scales and sums of a weight's columns.
#[derive(Debug, Clone, PartialEq)]
pub enum Factors {
    /// One scale per column.
    Channel {
        /// Scale / 16, `[N]`: the kernels multiply codes that are shifted into the high nibble.
        scales: Vec<f32>,
        /// 16 · Σw, `[N]`.
        sums: Vec<i32>,
    },
    /// One scale per group and column.
    Group {
        /// Groups' length in k.
        group_size: usize,
        /// bf16 bits, `[N, K / group_size]`.
        scales: Vec<u16>,
        /// Σ over groups of scale · Σw, `[N]`, in f32 (see [`Columns::group_wise`]).
        sums: Vec<f32>,
    },
}

/// A weight matrix `[K, N]` of the int4 path in columns, with the sums that packing adds.
#[derive(Debug, Clone, PartialEq)]
pub struct Columns {
    shape: Shape,
    codes: Vec<i8>,
    factors: Factors,
    bias: Vec<f32>,
}

impl Columns {
    /// A channel-wise weight: `codes` `[N, K]` from −8 to 7, f32 `scales` `[N]`, `bias` `[N]`
    /// (zeros without a bias).
    ///
    /// # Errors
    /// [`Error::Size`] for an empty matrix; [`Error::Shape`] and [`Error::Value`] naming the part.
    pub fn channel_wise(
        shape: Shape,
        codes: Vec<i8>,
        scales: &[f32],
        bias: Option<&[f32]>,
    ) -> Result<Self> {
        check_codes(shape, &codes)?;
        check_len("weight_scale", scales.len(), &[shape.size_n, 1])?;
        // int32 as in the kernels: it wraps beyond 2^24 values of one sign.
        let sum =
            |column: &[i8]| column.iter().fold(0i32, |sum, &w| sum.wrapping_add(16 * i32::from(w)));
        let factors = Factors::Channel {
            scales: scales.iter().map(|s| s * 0.0625).collect(),
            sums: codes.chunks_exact(shape.size_k).map(sum).collect(),
        };
        Ok(Self { bias: checked_bias(shape, bias)?, shape, codes, factors })
    }

    /// A group-wise weight: `codes` `[N, K]` from −8 to 7, bf16 `scales` `[N, K / group_size]`,
    /// `bias` `[N]`.
    ///
    /// A column's sum starts from 0 and adds, for each chunk of 32 k and each of its segments (8 k
    /// and the 8 k that follow 16 later), Σw of the segment times its group's scale. The product is
    /// exact, the addition rounds once.
    ///
    /// # Errors
    /// As [`Columns::channel_wise`]; [`Error::Size`] unless groups are multiples of 32 that divide
    /// K.
    pub fn group_wise(
        shape: Shape,
        group_size: usize,
        codes: Vec<i8>,
        scales: Vec<u16>,
        bias: Option<&[f32]>,
    ) -> Result<Self> {
        check_codes(shape, &codes)?;
        let groups = groups(shape, group_size)?;
        check_len("weight_scale", scales.len(), &[shape.size_n, groups])?;
        let sums = codes
            .chunks_exact(shape.size_k)
            .zip(scales.chunks_exact(groups))
            .map(|(column, scales)| {
                segment_sums(column).enumerate().fold(0.0, |sum, (i, w)| {
                    sum + w as f32 * bf16_to_f32(scales[i * CHUNK / 2 / group_size])
                })
            })
            .collect();
        let factors = Factors::Group { group_size, scales, sums };
        Ok(Self { bias: checked_bias(shape, bias)?, shape, codes, factors })
    }

    /// Converts a [`Weight`] with `uint4b8` codes, f32 scales channel-wise or bf16 scales
    /// group-wise, and a bias of any float type.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for another type of codes or scales, act-order, zero points and a
    /// global scale, which the operator does not support; otherwise as the other constructors.
    pub fn from_weight(weight: &Weight<'_>) -> Result<Self> {
        let Parts { group_size, scales, bias } = Parts::of(weight)?;
        let shape = weight.shape();
        let mut codes = Vec::with_capacity(shape.len());
        for n in 0..shape.size_n {
            codes.extend((0..shape.size_k).map(|k| weight.codes.get(k, n) as i8 - 8));
        }
        match scales {
            Scales::Group(bits) => {
                let bits = transposed(&weight.scales, bits);
                Self::group_wise(shape, group_size, codes, bits, Some(&bias))
            }
            Scales::Channel(bits) => {
                let scales: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
                Self::channel_wise(shape, codes, &scales, Some(&bias))
            }
        }
    }

    /// Builds columns from unpacked parts; the sums are those of the bytes.
    pub(super) fn from_parts(
        shape: Shape,
        codes: Vec<i8>,
        factors: Factors,
        bias: Vec<f32>,
    ) -> Self {
        Self { shape, codes, factors, bias }
    }

    /// Matrix shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Codes of column `n`, `[K]`, from −8 to 7.
    pub fn column(&self, n: usize) -> &[i8] {
        &self.codes[n * self.shape.size_k..][..self.shape.size_k]
    }

    /// Scales and sums.
    pub fn factors(&self) -> &Factors {
        &self.factors
    }

    /// `[N]`.
    pub fn bias(&self) -> &[f32] {
        &self.bias
    }

    /// The same columns with changed scales, sums or bias, for known mistakes.
    pub(crate) fn with(&self, change: impl FnOnce(&mut Factors, &mut Vec<f32>)) -> Self {
        let mut other = self.clone();
        change(&mut other.factors, &mut other.bias);
        other
    }

    /// The same columns with the codes of `code` and unchanged sums.
    pub(crate) fn with_codes(&self, code: impl Fn(usize, usize) -> i8) -> Self {
        let Shape { size_k, size_n } = self.shape;
        let codes = (0..size_n).flat_map(|n| (0..size_k).map(move |k| (k, n)));
        Self { codes: codes.map(|(k, n)| code(k, n)).collect(), ..self.clone() }
    }

    /// [`GroupSize::Channel`] or the group-wise one.
    pub fn group_size(&self) -> GroupSize {
        match self.factors {
            Factors::Channel { .. } => GroupSize::Channel,
            Factors::Group { group_size, .. } => GroupSize::Of(group_size),
        }
    }
}

/// Σw of each segment of a column: the k of 8 low nibbles and of the high nibbles of the same
/// bytes.
pub(crate) fn segment_sums(column: &[i8]) -> impl Iterator<Item = i32> + '_ {
    column.chunks_exact(CHUNK).flat_map(|chunk| {
        [0, 8].map(|s| {
            let ks = (s..s + 8).chain(s + 16..s + 24);
            ks.map(|k| i32::from(chunk[k])).sum()
        })
    })
}

/// Number of groups of a group-wise weight.
pub(super) fn groups(shape: Shape, group_size: usize) -> Result<usize> {
    if group_size == 0 || !group_size.is_multiple_of(CHUNK) {
        return Err(Error::size("group_size", group_size, format!("a multiple of {CHUNK}")));
    }
    GroupSize::Of(group_size).groups(LogicalK(shape.size_k))
}

fn check_codes(shape: Shape, codes: &[i8]) -> Result<()> {
    if shape.size_k == 0 || shape.size_n == 0 {
        return Err(Error::size("weight", shape, "1 or more of each"));
    }
    check_len("weight codes", codes.len(), &[shape.size_n, shape.size_k])?;
    match codes.iter().position(|c| !(-8..8).contains(c)) {
        None => Ok(()),
        Some(i) => {
            let at = [i / shape.size_k, i % shape.size_k];
            Err(Error::value("weight codes", &at, codes[i], "4 bits: -8 to 7"))
        }
    }
}

fn check_len(name: &str, found: usize, shape: &[usize]) -> Result<()> {
    if Some(found) == shape.iter().try_fold(1usize, |a, &b| a.checked_mul(b)) {
        return Ok(());
    }
    Err(Error::shape(name, &[found], format!("{shape:?}")))
}

fn checked_bias(shape: Shape, bias: Option<&[f32]>) -> Result<Vec<f32>> {
    let Some(bias) = bias else { return Ok(vec![0.0; shape.size_n]) };
    check_len("bias", bias.len(), &[shape.size_n])?;
    Ok(bias.to_vec())
}

/// `[groups, N]` as `[N, groups]`.
fn transposed(table: &Table, bits: &[u16]) -> Vec<u16> {
    let (rows, cols) = (table.rows(), table.cols());
    (0..cols).flat_map(|n| (0..rows).map(move |g| bits[g * cols + n])).collect()
}
