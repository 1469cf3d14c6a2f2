//! The product in plain loops: the definition, from packed and from unpacked data.

use super::QuantizedTokens;
use super::kernel::{Int8Run, Kernel};
use crate::layouts::int8::{Int8Tail, NR, PIECE, PackedInt8};
use crate::num::scalar::ScalarType;
use crate::w4a8::packed::PIECE as OCTET;
use crate::w4a8::{Panel, Values};
use crate::{Error, Result};

/// `y` `[M, N]` of type `ty` from data that is not interleaved: the same bits as any kernel's. `matrix`
/// is the index of the matrix.
///
/// # Errors
/// [`Error::Shape`] for rows of another K; [`Error::Unsupported`] for types other than FLOAT32 and
/// BFLOAT16.
pub fn product(
    rows: &QuantizedTokens,
    weight: &PackedInt8<'_>,
    matrix: usize,
    ty: ScalarType,
) -> Result<Values> {
    let size_k = weight.layout().shape().size_k;
    if rows.size_k != size_k {
        return Err(Error::shape("x", &[rows.scales.len(), rows.size_k], format!("[M, {size_k}]")));
    }
    let codes = weight.codes(matrix);
    let scales = weight.floats(matrix, Int8Tail::Scale);
    let biases = weight.floats(matrix, Int8Tail::Bias);
    let mut y = Vec::with_capacity(rows.scales.len() * scales.len());
    for (q, row) in rows.codes.chunks_exact(size_k).zip(&rows.scales) {
        for ((w, scale), bias) in codes.chunks_exact(size_k).zip(&scales).zip(&biases) {
            let sum: i64 = q.iter().zip(w).map(|(q, w)| i64::from(*q) * i64::from(*w)).sum();
            y.push((sum as f32 * scale).mul_add(*row, *bias));
        }
    }
    Values::from_f32(y, ty)
}

/// The definition as a kernel.
#[derive(Debug, Clone, Copy)]
pub struct Scalar;

impl Kernel for Scalar {
    fn name(&self) -> &'static str {
        "scalar"
    }

    fn run(&self, panel: Panel<'_>, rhs: Int8Run<'_>, y: &mut [f32], stride: usize) {
        rhs.check(panel, y, stride, panel.rows());
        let (layout, rows) = (rhs.layout, panel.rows());
        for (b, block) in rhs.bytes.chunks_exact(layout.block_bytes()).enumerate() {
            let (codes, tail) = block.split_at(layout.code_bytes());
            let word = |what: Int8Tail, n: usize| {
                let at = (what as usize * NR + n) * 4;
                f32::from_le_bytes([0, 1, 2, 3].map(|i| tail[at + i]))
            };
            for m in 0..rows {
                for n in 0..NR.min(rhs.columns - b * NR) {
                    let product = |k: usize| {
                        let w = codes[(k / PIECE * NR + n) * PIECE + k % PIECE] as i8;
                        let q = panel.codes()[(k / OCTET * rows + m) * OCTET + k % OCTET] as i8;
                        i32::from(q) * i32::from(w)
                    };
                    let sum: i32 = (0..layout.padded_k()).map(product).sum();
                    let sum = sum as f32 * word(Int8Tail::Scale, n);
                    let row = panel.reciprocals()[m];
                    y[m * stride + b * NR + n] = sum.mul_add(row, word(Int8Tail::Bias, n));
                }
            }
        }
    }
}
