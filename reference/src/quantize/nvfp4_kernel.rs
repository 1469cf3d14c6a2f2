//! What a GPU's NVFP4 quantizer may give.
//!
//! The kernels (FlashInfer 0.6.8.post1 `cvt_warp_fp16_to_fp4`, vLLM's `scaled_fp4_quant`) compute what
//! [`super::nvfp4`] does, with r(x) the instruction `rcp.approx.ftz.f32` in the place of 1 / x:
//!
//! scale = e4m3(global · (max · r(6))), factor = r(scale · r(global)), code = e2m1(x · factor).
//!
//! Measured on an H200 for every mantissa: r(x) is at most one unit in the last place from the correctly
//! rounded 1 / x, depends on the mantissa of x alone, and is correctly rounded where x is a multiple of
//! an eighth of a power of two. So r(6) and thus every block scale is defined; a tensor has one r(global)
//! among three, and the blocks whose scales share a mantissa have one factor among three.

use std::collections::BTreeMap;
use std::fmt;

use super::{absmax, expect_rows};
use crate::num::scalar::{ScalarType, e4m3fn_to_f32, f32_to_e4m3fn_rne_saturating};
use crate::{Error, Result};

const E2M1: ScalarType = ScalarType::FLOAT4_E2M1F;
/// Mantissa bits below an eighth.
const BELOW_EIGHTHS: u32 = (1 << 20) - 1;
const MANTISSA: u32 = (1 << 23) - 1;

/// A scale or code that no such kernel gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nvfp4Difference {
    /// Row.
    pub row: usize,
    /// First column of the block where its scale is wrong, else the code's.
    pub col: usize,
    /// Whether it is the scale.
    pub is_scale: bool,
    /// e4m3 or e2m1 bits found.
    pub found: u8,
    /// The least and the greatest bits that a kernel gives, by magnitude.
    pub possible: [u8; 2],
}

impl fmt::Display for Nvfp4Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.is_scale { "scale" } else { "code" };
        let [least, greatest] = self.possible;
        let (row, col, found) = (self.row, self.col, self.found);
        write!(
            f,
            "{what} at [{row}, {col}]: found {found:#x}, possible {least:#x} to {greatest:#x}"
        )
    }
}

/// What the instruction may give for 1 / x: the correctly rounded value first.
fn reciprocals(x: f32) -> Vec<f32> {
    let exact = 1.0 / x;
    if x.to_bits() & BELOW_EIGHTHS == 0 || !exact.is_normal() {
        return vec![if exact.is_subnormal() { 0.0 } else { exact }];
    }
    vec![exact, exact.next_down(), exact.next_up()]
}

/// Codes of a block whose scale rounds to zero though its values are not all zero.
#[derive(Clone, Copy)]
enum ZeroScale {
    /// Zeros: kernels that test the scale.
    Zeros,
    /// The largest magnitude, r(0) being infinite: kernels that test the largest value.
    Infinite,
}

impl ZeroScale {
    fn code(self, v: f32, max: f32) -> u8 {
        let sign = if v.is_sign_negative() { 8 } else { 0 };
        match self {
            Self::Infinite if max > 0.0 && v == 0.0 => 7,
            Self::Infinite if max > 0.0 => 7 | sign,
            _ => sign,
        }
    }
}

/// Quantized rows of one tensor.
struct QuantizedRows<'a> {
    x: &'a [f32],
    cols: usize,
    codes: &'a [u8],
    scales: &'a [u8],
}

impl QuantizedRows<'_> {
    fn blocks(&self) -> impl Iterator<Item = (usize, &[f32], &[u8], u8)> {
        let blocks = self.x.chunks_exact(16).zip(self.codes.chunks_exact(16)).zip(self.scales);
        blocks.enumerate().map(|(i, ((x, codes), &scale))| (i, x, codes, scale))
    }

    fn difference(&self, element: usize, is_scale: bool, possible: [u8; 2]) -> Nvfp4Difference {
        let (row, col) = (element / self.cols, element % self.cols);
        let found = if is_scale { self.scales[element / 16] } else { self.codes[element] };
        Nvfp4Difference { row, col, is_scale, found, possible }
    }

    /// The first scale that is not the one that every kernel gives.
    fn wrong_scale(&self, global_scale: f32) -> Option<Nvfp4Difference> {
        self.blocks().find_map(|(i, x, _, found)| {
            let scale = global_scale * (absmax(x) * (1.0 / 6.0));
            let right = f32_to_e4m3fn_rne_saturating(scale);
            (right != found).then(|| self.difference(i * 16, true, [right, right]))
        })
    }

    /// The first code that no kernel with this r(global) gives.
    fn wrong_code(&self, global: f32, zero: ZeroScale) -> Option<Nvfp4Difference> {
        // For each mantissa of scale · r(global): which of the three factors are left.
        let mut left: BTreeMap<u32, [bool; 3]> = BTreeMap::new();
        for (i, x, codes, scale) in self.blocks() {
            if scale == 0 {
                let max = absmax(x);
                let right = |j: usize| zero.code(x[j], max);
                let Some(j) = (0..16).find(|&j| right(j) != codes[j]) else { continue };
                return Some(self.difference(i * 16 + j, false, [right(j); 2]));
            }
            let argument = e4m3fn_to_f32(scale) * global;
            let factors = reciprocals(argument);
            let left = left.entry(argument.to_bits() & MANTISSA).or_insert([true; 3]);
            for (j, &v) in x.iter().enumerate() {
                let code = |factor: &f32| {
                    // Zero stays zero under an infinite factor.
                    let scaled = if v == 0.0 { v } else { v * factor };
                    E2M1.encode_rne_saturating(scaled.into()) as u8
                };
                let made: Vec<u8> = factors.iter().map(code).collect();
                for (step, left) in left.iter_mut().enumerate() {
                    *left &= made.get(step) == Some(&codes[j]);
                }
                if *left == [false; 3] {
                    let magnitude = |c: &u8| c & 7;
                    let least = made.iter().copied().min_by_key(magnitude).unwrap_or(0);
                    let greatest = made.iter().copied().max_by_key(magnitude).unwrap_or(0);
                    return Some(self.difference(i * 16 + j, false, [least, greatest]));
                }
            }
        }
        None
    }
}

/// The first scale or code of quantized rows that no such kernel gives; `None` where there is none.
/// Where each code alone is possible, the difference is the first code that no one reciprocal explains
/// together with the codes before it.
///
/// `codes` hold one value a byte, `scales` one e4m3 per 16 values, both row by row as `x`. Under a scale of
/// zero, codes are zeros with the sign of x; or, for all such blocks that are not all zero, ±6 (r(0) is
/// infinite, and a NaN converts to 6).
///
/// # Errors
/// As [`super::nvfp4`]; [`Error::Shape`] for codes or scales of another number.
pub fn nvfp4_kernel_difference(
    x: &[f32],
    cols: usize,
    global_scale: f32,
    codes: &[u8],
    scales: &[u8],
) -> Result<Option<Nvfp4Difference>> {
    expect_rows(x, cols, 16)?;
    if !global_scale.is_normal() || global_scale < 0.0 {
        return Err(Error::size("global scale", global_scale, "a positive normal number"));
    }
    if (codes.len(), scales.len()) != (x.len(), x.len() / 16) {
        let expected = format!("{} codes and {} scales", x.len(), x.len() / 16);
        return Err(Error::shape("quantized rows", &[codes.len(), scales.len()], expected));
    }
    let rows = QuantizedRows { x, cols, codes, scales };
    if let Some(difference) = rows.wrong_scale(global_scale) {
        return Ok(Some(difference));
    }
    let mut furthest: Option<Nvfp4Difference> = None;
    for global in reciprocals(global_scale) {
        for zero in [ZeroScale::Zeros, ZeroScale::Infinite] {
            let Some(difference) = rows.wrong_code(global, zero) else { return Ok(None) };
            let place = |d: &Nvfp4Difference| (d.row, d.col);
            if furthest.as_ref().is_none_or(|f| place(&difference) > place(f)) {
                furthest = Some(difference);
            }
        }
    }
    Ok(furthest)
}

/// Where v · factor lies exactly between two codes: the lower one, if it is the even one. Where the
/// upper one is even, both rules for ties take it.
fn even_below(v: f32, factor: f32) -> Option<u8> {
    const TIES: [(f32, u8); 4] = [(0.25, 0), (1.25, 2), (2.5, 4), (5.0, 6)];
    let scaled = v.abs() * factor;
    TIES.iter().find(|(tie, _)| *tie == scaled).map(|(_, below)| *below)
}

/// Whether every value that lies exactly between two codes, by the correctly rounded reciprocals of
/// [`super::nvfp4`], went to the larger one where the definition takes the smaller, even one.
///
/// Reciprocals that are all too large do the same to ties, so that this alone is no proof of a mistake.
pub fn nvfp4_ties_away(x: &[f32], global_scale: f32, codes: &[u8], scales: &[u8]) -> bool {
    let rows = QuantizedRows { x, cols: x.len(), codes, scales };
    let (mut even, mut away) = (0usize, 0usize);
    for (_, x, codes, scale) in rows.blocks().filter(|(.., scale)| *scale != 0) {
        let factor = 1.0 / (e4m3fn_to_f32(scale) * (1.0 / global_scale));
        for (v, code) in x.iter().zip(codes) {
            if let Some(below) = even_below(*v, factor) {
                even += usize::from(code & 7 == below);
                away += usize::from(code & 7 == below + 1);
            }
        }
    }
    away > 0 && even == 0
}

/// The definition's `codes` with ties away from zero in the place of ties to even.
pub(crate) fn with_ties_away(x: &[f32], global_scale: f32, codes: &[u8], scales: &[u8]) -> Vec<u8> {
    let rows = QuantizedRows { x, cols: x.len(), codes, scales };
    let block = |(_, x, codes, scale): (usize, &[f32], &[u8], u8)| -> Vec<u8> {
        let factor = 1.0 / (e4m3fn_to_f32(scale) * (1.0 / global_scale));
        let tie = |v: f32| scale != 0 && even_below(v, factor).is_some();
        x.iter().zip(codes).map(|(v, code)| code + u8::from(tie(*v))).collect()
    };
    rows.blocks().flat_map(block).collect()
}
