//! Instructions that multiply e2m1 codes under block scales: `kind::mxf4nvf4` of Blackwell.
//!
//! The products of 16 consecutive k are added exactly. Their sum, a multiple of 1/4, is multiplied
//! exactly by the significands of the two scales; its exponent is that of the scales alone, regardless
//! of the sum's size. These terms and the accumulator enter one fused sum with F = 35, truncated to
//! f32. A scale's sign bit is not read. A NaN scale makes the result NaN.
//!
//! Source: MMA-Sim (arXiv 2511.10909 and its repository). Its published versions differ in whether a
//! group whose sum is zero counts for the largest exponent. Here it does not, because no zero does in
//! the measured units.

use super::units::REPORTED;
use super::{Architecture, Instruction, NAN_F32, fused};
use crate::num::scalar::{ScalarType, e2m1_to_f32};

/// Consecutive k whose products are added exactly.
const SUM: usize = 16;
/// Fraction bits of a term: 2 of the codes' products, 3 of each scale's significand.
const TERM_FRACTION: i32 = 8;
/// Exponent of a zero accumulator, and the smallest exponent that a sum is aligned to.
const LEAST_EXPONENT: i32 = -126;

/// One row: an instruction with e2m1 factors, block scales and an f32 accumulator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockScaledUnit {
    /// Generation.
    pub architecture: Architecture,
    /// Instruction family.
    pub instruction: Instruction,
    /// Type of the scales: e4m3 (its sign bit is not read) or e8m0.
    pub scales: ScalarType,
    /// k of the instruction.
    pub size_k: usize,
    /// k per scale.
    pub block: usize,
    /// F: fraction bits kept below the largest exponent.
    pub fraction_bits: i32,
    /// Evidence for the row.
    pub evidence: &'static str,
}

/// A row that was not measured here.
const fn unmeasured(
    architecture: Architecture,
    instruction: Instruction,
    scales: ScalarType,
    block: usize,
) -> BlockScaledUnit {
    let (size_k, fraction_bits, evidence) = (64, 35, REPORTED);
    BlockScaledUnit { architecture, instruction, scales, size_k, block, fraction_bits, evidence }
}

use Architecture::{Blackwell, RtxBlackwell};
use Instruction::{Mma, Tcgen05};

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;
const E8M0: ScalarType = ScalarType::FLOAT8_E8M0FNU;

/// Every such unit whose arithmetic is known. NVFP4 is e4m3 per 16 k, MXFP4 e8m0 per 32.
pub const BLOCK_SCALED_UNITS: &[BlockScaledUnit] = &[
    unmeasured(Blackwell, Tcgen05, E4M3, 16),
    unmeasured(Blackwell, Tcgen05, E8M0, 16),
    unmeasured(Blackwell, Tcgen05, E8M0, 32),
    unmeasured(RtxBlackwell, Mma, E4M3, 16),
    unmeasured(RtxBlackwell, Mma, E4M3, 32),
    unmeasured(RtxBlackwell, Mma, E8M0, 16),
    unmeasured(RtxBlackwell, Mma, E8M0, 32),
];

/// The row of a generation's instruction with these scales.
pub fn find_block_scaled(
    architecture: Architecture,
    scales: ScalarType,
    block: usize,
) -> Option<&'static BlockScaledUnit> {
    BLOCK_SCALED_UNITS
        .iter()
        .find(|u| (u.architecture, u.scales, u.block) == (architecture, scales, block))
}

/// Significand in units of 2^-3 and exponent of a scale; `None` for NaN. A subnormal has e4m3's
/// smallest exponent.
fn scale(ty: ScalarType, code: u8) -> Option<(i64, i32)> {
    if ty == E8M0 {
        return (code != 0xff).then_some((8, i32::from(code) - 127));
    }
    let (field, mantissa) = (i32::from(code >> 3 & 15), i64::from(code & 7));
    let hidden = if field == 0 { 0 } else { 8 };
    (code & 0x7f != 0x7f).then_some((hidden + mantissa, field.max(1) - 7))
}

impl BlockScaledUnit {
    /// The exponent that a scale adds to its terms; `None` for zero and NaN.
    pub fn scale_exponent(&self, code: u8) -> Option<i32> {
        scale(self.scales, code).filter(|s| s.0 != 0).map(|s| s.1)
    }

    /// One instruction's result for one output: `c + Σ sa·sb·Σ a[k]·b[k]`, from and to f32 bits.
    ///
    /// `a` and `b` are e2m1 codes, one per byte, with a scale for each [`Self::block`] of them. An
    /// infinite `c` is returned unchanged; every NaN is 0x7fffffff.
    ///
    /// # Panics
    /// If the number of codes or scales is not the instruction's: a programming error.
    pub fn accumulate(&self, [a, b]: [&[u8]; 2], [sa, sb]: [&[u8]; 2], c: u32) -> u32 {
        assert_eq!((a.len(), b.len()), (self.size_k, self.size_k), "k of {self:?}");
        let blocks = self.size_k / self.block;
        assert_eq!((sa.len(), sb.len()), (blocks, blocks), "scales of {self:?}");
        let c_value = f32::from_bits(c);
        if c_value.is_nan() {
            return NAN_F32;
        }
        let mut terms = [(0i64, LEAST_EXPONENT); 5];
        for (i, term) in terms[..self.size_k / SUM].iter_mut().enumerate() {
            let at = i * SUM / self.block;
            let (Some(x), Some(y)) = (scale(self.scales, sa[at]), scale(self.scales, sb[at]))
            else {
                return NAN_F32;
            };
            let group = i * SUM..(i + 1) * SUM;
            // Halves: a code's value times 2 is an integer.
            let half = |code: u8| (e2m1_to_f32(code) * 2.0) as i64;
            let sum: i64 =
                a[group.clone()].iter().zip(&b[group]).map(|(a, b)| half(*a) * half(*b)).sum();
            let significand = sum * x.0 * y.0;
            if significand != 0 {
                *term = (significand, x.1 + y.1);
            }
        }
        if c_value.is_infinite() {
            return c;
        }
        let field = (c >> 23 & 0xff) as i32;
        let mantissa = i64::from(c & 0x7f_ffff) | if field == 0 { 0 } else { 1 << 23 };
        let c_exponent = if mantissa == 0 { LEAST_EXPONENT } else { field.max(1) - 127 };

        let largest = terms.iter().fold(c_exponent, |e, term| e.max(term.1));
        let unit = largest - self.fraction_bits;
        // At most 2^20 · 2^27 and 2^24 · 2^12: a sum of five fits 64 bits.
        let aligned = |significand: i64, by: i32| match by {
            0.. => significand << by,
            _ => significand / (1i64 << (-by).min(62)),
        };
        let of_c = aligned(mantissa, c_exponent - 23 - unit);
        let mut total = if c >> 31 == 1 { -of_c } else { of_c };
        for (significand, exponent) in terms {
            total += aligned(significand, exponent - TERM_FRACTION - unit);
        }
        fused::truncate_f32(total, unit, 24)
    }
}
