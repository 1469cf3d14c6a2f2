//! What a GPU's NVFP4 quantizer may give.
//!
//! The kernels (FlashInfer 0.6.8.post1 `cvt_warp_fp16_to_fp4`, vLLM's `scaled_fp4_quant`) compute what
//! [`super::nvfp4`] does, with r(x) the instruction `rcp.approx.ftz.f32` in the place of 1 / x, which is
//! within 2^-23 of it (PTX ISA):
//!
//! scale = e4m3(global · (max · r(6))), factor = r(scale · r(global)), code = e2m1(x · factor).
//!
//! Their bits are thus not defined by IEEE 754, but all that they may be is an interval of scales, and
//! for the scale found an interval of codes for each value.

use std::fmt;

use super::{absmax, expect_rows};
use crate::scalar::{ScalarType, e4m3fn_to_f32, f32_to_e4m3fn_rne_saturating};
use crate::{Error, Result};

const E2M1: ScalarType = ScalarType::FLOAT4_E2M1F;
/// Relative error of `rcp.approx.ftz.f32`.
const RECIPROCAL_ERROR: f64 = 1.0 / (1 << 23) as f64;

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

/// The f32 that the instruction may give for a reciprocal in `[lo, hi]`, tiny ones flushed.
fn reciprocals(lo: f64, hi: f64) -> [f32; 2] {
    let ends = [(1.0 / hi) * (1.0 - RECIPROCAL_ERROR), (1.0 / lo) * (1.0 + RECIPROCAL_ERROR)];
    let [least, greatest] = ends.map(|x| x as f32);
    [if least < f32::MIN_POSITIVE { 0.0 } else { least }, greatest]
}

/// The first scale or code of quantized rows that no such kernel gives; `None` where there is none.
///
/// `codes` hold one value a byte, `scales` one e4m3 per 16 values, both row by row as `x`. Codes under a
/// scale of zero stand for zero whatever they are, and are not looked at (kernels differ there).
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
    let sixth = reciprocals(6.0, 6.0);
    let [global_lo, global_hi] = reciprocals(global_scale.into(), global_scale.into());
    for (i, (block, codes)) in x.chunks_exact(16).zip(codes.chunks_exact(16)).enumerate() {
        let (row, col) = (i * 16 / cols, i * 16 % cols);
        let max = absmax(block);
        let possible =
            sixth.map(|sixth| f32_to_e4m3fn_rne_saturating(global_scale * (max * sixth)));
        let found = scales[i];
        if !(possible[0]..=possible[1]).contains(&found) {
            return Ok(Some(Nvfp4Difference { row, col, is_scale: true, found, possible }));
        }
        if found == 0 {
            continue;
        }
        let scale = e4m3fn_to_f32(found);
        let factor = reciprocals((scale * global_lo).into(), (scale * global_hi).into());
        for (j, (v, &found)) in block.iter().zip(codes).enumerate() {
            let magnitude = factor.map(|f| E2M1.encode_rne_saturating((v.abs() * f).into()) as u8);
            let sign = if v.is_sign_negative() { 8 } else { 0 };
            let possible = magnitude.map(|m| m | sign);
            if !(possible[0]..=possible[1]).contains(&found) {
                let col = col + j;
                return Ok(Some(Nvfp4Difference { row, col, is_scale: false, found, possible }));
            }
        }
    }
    Ok(None)
}
