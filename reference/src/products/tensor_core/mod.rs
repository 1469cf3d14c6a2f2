//! The arithmetic of matrix units, bit for bit.
//!
//! All units share one operation, the fused sum: products and accumulator are aligned to the largest
//! exponent among them, truncated, added exactly, and the sum is rounded once. Units differ in the
//! bits that they keep, in how they cut k into such sums, and in how the accumulator enters. A
//! [`Unit`] is a row of [`UNITS`] with its evidence.
//!
//! The method, and the constants of other architectures, come from MMA-Sim (arXiv 2511.10909). The
//! rows of Hopper were measured on an H200 with the probe in `scripts/probe`. It also showed how
//! `mma.sync` computes with 8-bit floats: two sums over interleaved pairs of k, then the accumulator.

mod block_scaled;
mod fused;
mod operand;
mod panel;
mod simd;
mod terms;
mod units;

pub use block_scaled::{BLOCK_SCALED_UNITS, BlockScaledUnit, find_block_scaled};
pub use operand::Operand;
pub use panel::{Panel, Row};
pub use terms::{LANES, Lanes};
pub use units::{Accumulator, Architecture, Instruction, KSplit, UNITS, Unit, find};

use crate::num::scalar::{self, ScalarType};

/// Rows of `a` or `b`, decoded once for all products of a unit that they enter.
#[derive(Debug, Clone)]
pub struct Decoded {
    operands: Vec<Operand>,
    size_k: usize,
}

impl Decoded {
    /// Decodes `[rows, size_k]` codes of type `ty` for `unit`.
    ///
    /// # Panics
    /// If the codes do not fill whole rows: a programming error.
    pub fn new(unit: &Unit, ty: ScalarType, codes: &[u32], size_k: usize) -> Self {
        assert!(size_k > 0 && codes.len().is_multiple_of(size_k), "rows of {size_k} codes");
        let operands = codes.iter().map(|&c| Operand::decode(ty, c, unit.through_f16)).collect();
        Self { operands, size_k }
    }

    /// Row `i`.
    pub fn row(&self, i: usize) -> &[Operand] {
        &self.operands[i * self.size_k..][..self.size_k]
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.operands.len() / self.size_k
    }
}

impl Unit {
    /// One instruction's result for one output: `c + Σ a[k]·b[k]` over the unit's k, from and to
    /// the accumulator's bits (f32 or int32; f16 in the low 16 bits).
    ///
    /// # Panics
    /// If `a` or `b` does not hold the instruction's k: a programming error.
    pub fn accumulate(&self, a: &[Operand], b: &[Operand], c: u32) -> u32 {
        assert_eq!((a.len(), b.len()), (self.size_k, self.size_k), "k of {self:?}");
        match self.accumulator {
            Accumulator::S32 => fused::integer(a, b, c),
            Accumulator::F32 { .. } | Accumulator::F16 => self.accumulate_float(a, b, c),
        }
    }

    fn accumulate_float(&self, a: &[Operand], b: &[Operand], c: u32) -> u32 {
        if self.adds_accumulator_last {
            let sum = self.steps(a, b, 0);
            return match self.accumulator {
                Accumulator::F16 => add_f16(c as u16, sum as u16).into(),
                _ => add_f32(c, sum),
            };
        }
        self.steps(a, b, c)
    }

    /// The fused sums of one instruction, chained.
    fn steps(&self, a: &[Operand], b: &[Operand], c: u32) -> u32 {
        let size_k = self.size_k;
        let (accumulator, f) = (self.accumulator, self.fraction_bits);
        match self.split {
            KSplit::Whole => fused::sum(a, b, 0..size_k, c, accumulator, f),
            KSplit::Blocks(len) => (0..size_k / len).fold(c, |c, block| {
                fused::sum(a, b, block * len..(block + 1) * len, c, accumulator, f)
            }),
            KSplit::Pairs => [0, 2].into_iter().fold(c, |c, pair| {
                let order = (0..size_k / 2).map(|i| i / 2 * 4 + pair + i % 2);
                fused::sum(a, b, order, c, accumulator, f)
            }),
        }
    }

    /// A whole product along K: one instruction per `size_k` of the rows, in ascending order, each
    /// accumulating into the previous result. Rows are padded with zeros to a multiple of the
    /// instruction's k.
    pub fn dot(&self, a: &[Operand], b: &[Operand], mut c: u32) -> u32 {
        assert_eq!(a.len(), b.len(), "rows of one length");
        let mut chunks = a.chunks_exact(self.size_k).zip(b.chunks_exact(self.size_k));
        for (a, b) in chunks.by_ref() {
            c = self.accumulate(a, b, c);
        }
        let rest = a.len() % self.size_k;
        if rest > 0 {
            let pad = |row: &[Operand]| {
                let mut padded = vec![Operand::ZERO; self.size_k];
                padded[..rest].copy_from_slice(&row[row.len() - rest..]);
                padded
            };
            c = self.accumulate(&pad(a), &pad(b), c);
        }
        c
    }
}

/// The NaN that a unit returns.
pub(crate) const NAN_F32: u32 = 0x7fff_ffff;
/// Its f16 form.
pub(crate) const NAN_F16: u16 = 0x7fff;

/// IEEE addition to nearest even, with the units' NaN.
pub(crate) fn add_f32(x: u32, y: u32) -> u32 {
    let sum = f32::from_bits(x) + f32::from_bits(y);
    if sum.is_nan() { NAN_F32 } else { sum.to_bits() }
}

/// IEEE addition of f16 to nearest even, with the units' NaN.
fn add_f16(x: u16, y: u16) -> u16 {
    // The sum of two f16 may need more than 24 bits. It is exact in f64, so it is rounded once.
    let sum = scalar::f16_to_f64(x) + scalar::f16_to_f64(y);
    if sum.is_nan() { NAN_F16 } else { scalar::f64_to_f16_rne(sum) }
}
