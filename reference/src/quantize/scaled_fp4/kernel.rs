//! The possible results of a GPU's NVFP4 quantizer.
//!
//! The kernels (FlashInfer 0.6.8.post1 `cvt_warp_fp16_to_fp4`, vLLM's `scaled_fp4_quant`) compute
//! [`super::quantize()`] with the instruction r(x) = `rcp.approx.ftz.f32` instead of 1 / x:
//!
//! scale = e4m3(global · (max · r(6))), factor = r(scale · r(global)), code = e2m1(x · factor).
//!
//! Measured on an H200 for every mantissa: r(x) is at most one unit in the last place from the
//! correctly rounded 1 / x, depends only on the mantissa of x, and is correctly rounded if x is a
//! multiple of an eighth of a power of two. Therefore r(6) and every block scale are determined;
//! r(global) has three possible values, and blocks whose scales share a mantissa share one of three
//! factors.

use std::collections::BTreeMap;
use std::fmt;

use ndarray::ArrayView2;

use crate::num::array::{FloatView2, row_major};
use crate::num::element::{E2m1, E4m3fn};
use crate::num::scalar::{ScalarType, e4m3fn_to_f32, f32_to_e4m3fn_rne_saturating};
use crate::quantize::{absmax, finite_rows};
use crate::{Error, Result};

const E2M1: ScalarType = ScalarType::FLOAT4_E2M1F;
/// Mantissa bits below an eighth.
const BELOW_EIGHTHS: u32 = (1 << 20) - 1;
const MANTISSA: u32 = (1 << 23) - 1;

/// A scale or code that no such kernel produces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelDifference {
    /// Row.
    pub row: usize,
    /// First column of the block if its scale is wrong, otherwise the column of the code.
    pub col: usize,
    /// Whether it is the scale.
    pub is_scale: bool,
    /// e4m3 or e2m1 bits found.
    pub found: u8,
    /// The smallest and the largest possible bits, by magnitude.
    pub possible: [u8; 2],
}

impl fmt::Display for KernelDifference {
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

/// The possible results of the instruction for 1 / x; the correctly rounded value first.
fn reciprocals(x: f32) -> Vec<f32> {
    let exact = 1.0 / x;
    if x.to_bits() & BELOW_EIGHTHS == 0 || !exact.is_normal() {
        return vec![if exact.is_subnormal() { 0.0 } else { exact }];
    }
    vec![exact, exact.next_down(), exact.next_up()]
}

/// Codes of a block whose scale rounds to zero although it has nonzero values.
#[derive(Clone, Copy)]
enum ZeroScale {
    /// Zeros: kernels that test the scale.
    Zeros,
    /// The largest magnitude, since r(0) is infinite: kernels that test the largest value.
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

    fn difference(&self, element: usize, is_scale: bool, possible: [u8; 2]) -> KernelDifference {
        let (row, col) = (element / self.cols, element % self.cols);
        let found = if is_scale { self.scales[element / 16] } else { self.codes[element] };
        KernelDifference { row, col, is_scale, found, possible }
    }

    /// The first scale that differs from that of every kernel.
    fn wrong_scale(&self, global_scale: f32) -> Option<KernelDifference> {
        self.blocks().find_map(|(i, x, _, found)| {
            let scale = global_scale * (absmax(x) * (1.0 / 6.0));
            let right = f32_to_e4m3fn_rne_saturating(scale);
            (right != found).then(|| self.difference(i * 16, true, [right, right]))
        })
    }

    /// The first code that no kernel with this r(global) gives.
    fn wrong_code(&self, global: f32, zero: ZeroScale) -> Option<KernelDifference> {
        // For each mantissa of scale · r(global): the factors that remain possible.
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

/// The first scale or code of quantized rows that no such kernel produces; `None` if all are
/// possible. If each code is possible on its own, the difference is the first code that no single
/// reciprocal explains together with the previous codes.
///
/// `codes` have the shape of `x`, `scales` one value for each 16 of a row. Under a scale of zero, codes
/// are zeros with the sign of x; or, in every such block with a nonzero value, ±6 (r(0) is infinite, and
/// NaN converts to 6).
///
/// # Errors
/// As [`super::quantize()`]; [`Error::Shape`] for codes or scales of another shape.
pub fn kernel_difference<'a>(
    x: impl Into<FloatView2<'a>>,
    global_scale: f32,
    codes: ArrayView2<'_, E2m1>,
    scales: ArrayView2<'_, E4m3fn>,
) -> Result<Option<KernelDifference>> {
    let x = x.into();
    let (rows, (values, cols)) = (x.shape()[0], finite_rows(&x, 16)?);
    if !global_scale.is_normal() || global_scale < 0.0 {
        return Err(Error::size("global scale", global_scale, "a positive normal number"));
    }
    let shapes = [("codes", codes.shape(), cols), ("scales", scales.shape(), cols / 16)];
    for (name, found, cols) in shapes {
        if found != [rows, cols] {
            return Err(Error::shape(name, found, format!("[{rows}, {cols}]")));
        }
    }
    let (codes, scales) = (row_major(codes), row_major(scales));
    let (codes, scales) = (bytemuck::cast_slice(&codes), bytemuck::cast_slice(&scales));
    let rows = QuantizedRows { x: &values, cols, codes, scales };
    if let Some(difference) = rows.wrong_scale(global_scale) {
        return Ok(Some(difference));
    }
    let mut furthest: Option<KernelDifference> = None;
    for global in reciprocals(global_scale) {
        for zero in [ZeroScale::Zeros, ZeroScale::Infinite] {
            let Some(difference) = rows.wrong_code(global, zero) else { return Ok(None) };
            let place = |d: &KernelDifference| (d.row, d.col);
            if furthest.as_ref().is_none_or(|f| place(&difference) > place(f)) {
                furthest = Some(difference);
            }
        }
    }
    Ok(furthest)
}

/// The lower code if v · factor lies exactly between two codes and the lower one is even. If the
/// upper one is even, both tie rules select it.
fn even_below(v: f32, factor: f32) -> Option<u8> {
    const TIES: [(f32, u8); 4] = [(0.25, 0), (1.25, 2), (2.5, 4), (5.0, 6)];
    let scaled = v.abs() * factor;
    TIES.iter().find(|(tie, _)| *tie == scaled).map(|(_, below)| *below)
}

/// Whether every value exactly between two codes (with the correctly rounded reciprocals of
/// [`super::quantize()`]) was rounded to the larger code where the definition selects the smaller, even
/// one.
///
/// Reciprocals that are too large have the same effect on ties, so this alone does not prove a
/// mistake.
pub(crate) fn ties_away(x: &[f32], global_scale: f32, codes: &[u8], scales: &[u8]) -> bool {
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

/// The definition's `codes` with ties away from zero instead of ties to even.
pub(crate) fn with_ties_away(x: &[f32], global_scale: f32, codes: &[u8], scales: &[u8]) -> Vec<u8> {
    let rows = QuantizedRows { x, cols: x.len(), codes, scales };
    let block = |(_, x, codes, scale): (usize, &[f32], &[u8], u8)| -> Vec<u8> {
        let factor = 1.0 / (e4m3fn_to_f32(scale) * (1.0 / global_scale));
        let tie = |v: f32| scale != 0 && even_below(v, factor).is_some();
        x.iter().zip(codes).map(|(v, code)| code + u8::from(tie(*v))).collect()
    };
    rows.blocks().flat_map(block).collect()
}
