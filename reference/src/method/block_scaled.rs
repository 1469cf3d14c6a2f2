//! Products of MXFP8 operands on a block-scaled instruction (`kind::mxf8f6f4.block_scale`).
//!
//! An instruction has 32 k and so one scale of each operand, a power of two: its exponent is added to
//! those of the products, which enter one fused sum with the accumulator.
//!
//! Source: MMA-Sim (arXiv 2511.10909); not measured here.

use rayon::prelude::*;

use super::activations::Scales;
use super::product::Product;
use crate::Result;
use crate::moe::narrow;
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;
use crate::products::schedule::{AccumulatorType, UnitName};
use crate::products::tensor_core::{Architecture, Instruction, Operand};
use crate::weight::{Groups, Weight};

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;

/// k per scale, and of an instruction.
pub(super) const BLOCK: usize = 32;

/// The unit without scales.
pub(super) const UNIT: UnitName = UnitName {
    architecture: Architecture::Blackwell,
    instruction: Instruction::Tcgen05,
    a: E4M3,
    b: E4M3,
    accumulator: AccumulatorType::Float32,
    size_k: BLOCK,
};

/// Whether rows and a weight are e4m3 with a power of two for each 32 k.
pub(super) fn takes(product: &Product<'_>, weight: &Weight<'_>) -> bool {
    let of_rows = match &product.rows.scales {
        Scales::Group { size: BLOCK, values } => {
            values.iter().all(|s| s.is_nan() || s.to_bits() & 0x007f_ffff == 0 || s.is_subnormal())
        }
        _ => false,
    };
    of_rows
        && (product.rows.ty, weight.ty) == (E4M3, E4M3)
        && weight.scales.ty() == ScalarType::FLOAT8_E8M0FNU
        && weight.groups == Groups::Uniform(GroupSize::Of(BLOCK))
}

/// The exponent of a power of two; `None` for NaN.
fn exponent(scale: f64) -> Option<i16> {
    (!scale.is_nan()).then(|| scale.log2().round() as i16)
}

/// Operands of one row or column, and whether all scales are numbers.
fn operands(
    size_k: usize,
    code: impl Fn(usize) -> u32,
    scale: impl Fn(usize) -> f64,
) -> (Vec<Operand>, bool) {
    let exponents: Vec<Option<i16>> =
        (0..size_k).step_by(BLOCK).map(|k| exponent(scale(k))).collect();
    let one = |k: usize| {
        Operand::decode(E4M3, code(k), false).times_power(exponents[k / BLOCK].unwrap_or(0))
    };
    ((0..size_k).map(one).collect(), exponents.iter().all(Option::is_some))
}

/// The sum of (m, n) with its bias and router weight.
fn finish(product: &Product<'_>, sum: f32, [m, e, n]: [usize; 3]) -> u16 {
    let bias = product.weights[e].bias.as_ref().map_or(0.0, |b| b.value(0, n) as f32);
    let router = product.router_weights.map_or(1.0, |r| r[m]);
    narrow(product.dtype, (sum + bias) * router)
}

/// The outputs; rows without an expert are zero.
pub(super) fn compute(product: &Product<'_>) -> Result<Vec<u16>> {
    let unit = UNIT.find()?;
    let (rows, size_n) = (product.rows, product.size_n());
    let size_k = rows.size_k;
    let mut out = vec![0u16; product.expert_of.len() * size_n];
    for (e, weight) in product.weights.iter().enumerate() {
        let mine: Vec<usize> =
            (0..product.expert_of.len()).filter(|&m| product.expert_of[m] == Some(e)).collect();
        let row = |&m: &usize| operands(size_k, |k| rows.row(m)[k], |k| rows.scale(m, k).into());
        let decoded: Vec<_> = mine.par_iter().map(row).collect();
        let column = |n: usize| -> Vec<u16> {
            let code = |k| weight.codes.get(k, n).into();
            let (b, numbers) = operands(size_k, code, |k| weight.scales.value(k / BLOCK, n));
            let one = |(&m, (a, own)): (&usize, &(Vec<Operand>, bool))| {
                let sum = match numbers && *own {
                    true => f32::from_bits(unit.dot(a, &b, 0)),
                    false => f32::NAN,
                };
                finish(product, sum, [m, e, n])
            };
            mine.iter().zip(&decoded).map(one).collect()
        };
        let columns: Vec<Vec<u16>> = (0..size_n).into_par_iter().map(column).collect();
        for (i, &m) in mine.iter().enumerate() {
            for (n, column) in columns.iter().enumerate() {
                out[m * size_n + n] = column[i];
            }
        }
    }
    Ok(out)
}

/// A term of a fused sum: significand · 2^exponent, the exponent as the unit aligns it.
struct Term {
    significand: i128,
    /// Exponent of the significand's unit.
    low: i32,
    /// Exponent that the unit compares.
    high: i32,
}

/// One output by the definition: terms in 128 bits, one after the other.
pub(super) fn define(product: &Product<'_>, at @ [m, e, n]: [usize; 3]) -> u16 {
    let (rows, weight) = (product.rows, &product.weights[e]);
    // e4m3: sign, four bits of exponent with bias 7, three of mantissa; subnormals have exponent −6.
    let parts = |code: u32| {
        let (field, mantissa) = ((code >> 3 & 15) as i32, i128::from(code & 7));
        let magnitude = if field == 0 { mantissa } else { mantissa + 8 };
        (if code & 0x80 == 0 { magnitude } else { -magnitude }, field.max(1) - 7)
    };
    let mut sum = 0f32;
    for start in (0..rows.size_k).step_by(BLOCK) {
        let scales = [rows.scale(m, start).into(), weight.scales.value(start / BLOCK, n)];
        let [Some(x), Some(y)] = scales.map(exponent) else { return finish(product, f32::NAN, at) };
        let mut terms = Vec::new();
        for k in start..start + BLOCK {
            let (a, b) = (rows.row(m)[k], u32::from(weight.codes.get(k, n)));
            if [a, b].iter().any(|code| code & 0x7f == 0x7f) {
                return finish(product, f32::NAN, at);
            }
            let ((a, i), (b, j)) = (parts(a), parts(b));
            let high = i + j + i32::from(x) + i32::from(y);
            terms.push(Term { significand: a * b, low: high - 6, high });
        }
        if sum.is_infinite() {
            continue;
        }
        let bits = sum.to_bits();
        let (field, mantissa) = ((bits >> 23 & 0xff) as i32, i128::from(bits & 0x7f_ffff));
        let magnitude = if field == 0 { mantissa } else { mantissa + (1 << 23) };
        let significand = if sum < 0.0 { -magnitude } else { magnitude };
        let high = field.max(1) - 127;
        terms.push(Term { significand, low: high - 23, high });
        sum = fused(&terms);
    }
    finish(product, sum, at)
}

/// Terms truncated to 25 bits below the largest exponent, at least −133; the sum truncated to f32.
fn fused(terms: &[Term]) -> f32 {
    let largest = terms.iter().filter(|t| t.significand != 0).map(|t| t.high).max();
    let unit = largest.unwrap_or(-133).max(-133) - 25;
    let aligned = |t: &Term| match t.low - unit {
        up @ 0.. => t.significand << up,
        down => t.significand / (1i128 << (-down).min(100)),
    };
    let total: i128 = terms.iter().filter(|t| t.significand != 0).map(aligned).sum();
    // At most 33 bits, so f64 is exact; dropping bits toward zero leaves what f32 holds.
    let value = total as f64 * f64::from(unit).exp2();
    if value.abs() >= f64::from(f32::MAX) {
        let overflows = value.abs() >= 2f64.powi(128);
        let end = if overflows { f32::INFINITY } else { f32::MAX };
        return end.copysign(value as f32);
    }
    let nearest = value as f32;
    match f64::from(nearest).abs() > value.abs() {
        true => f32::from_bits(nearest.to_bits() - 1),
        false if nearest == 0.0 => 0.0,
        false => nearest,
    }
}
