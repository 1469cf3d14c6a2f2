//! The product in plain loops: the definition, from packed and from unpacked data.

use super::{Blocks, Kernel, Tile, Values, finish};
use crate::num::scalar::{ScalarType, bf16_to_f32};
use crate::w4a8::packed::{CHUNK, Columns, Factors, PIECE, QuantizedRows};
use crate::{Error, Result};

/// `y` `[M, N]` of type `ty` from data that is not interleaved: the same bits as
/// [`multiply`](super::multiply) with any kernel.
///
/// # Errors
/// [`Error::Shape`] if the two have different K; [`Error::Unsupported`] for types other than
/// FLOAT32 and BFLOAT16.
pub fn product(rows: &QuantizedRows, columns: &Columns, ty: ScalarType) -> Result<Values> {
    product_with(rows, columns, ty, Steps::default())
}

/// Known mistakes of implementations.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Steps {
    /// Multiplications and additions are rounded separately.
    pub(crate) unfused: bool,
    /// Groups are added from the last to the first.
    pub(crate) descending: bool,
    /// The correction for zero points comes before the groups.
    pub(crate) correction_first: bool,
    /// The correction is missing.
    pub(crate) no_correction: bool,
    /// The last multiplication and the bias are fused.
    pub(crate) bias_fused: bool,
    /// Infinities are not clamped.
    pub(crate) unclamped: bool,
    /// Sums of neighbouring products have 16 bits.
    pub(crate) narrow: Option<Narrow>,
}

/// A 16-bit sum of products.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Narrow {
    /// Products that are added in 16 bits.
    pub(crate) run: usize,
    /// Whether the sum saturates; otherwise it wraps.
    pub(crate) saturates: bool,
}

pub(crate) fn product_with(
    rows: &QuantizedRows,
    columns: &Columns,
    ty: ScalarType,
    steps: Steps,
) -> Result<Values> {
    let shape = columns.shape();
    if rows.size_k != shape.size_k {
        let expected = format!("[M, {}], K of the weights", shape.size_k);
        return Err(Error::shape("activations", &[rows.size_m, rows.size_k], expected));
    }
    let mut y = Vec::with_capacity(rows.size_m * shape.size_n);
    for m in 0..rows.size_m {
        let row = Row {
            codes: rows.row(m),
            zero: rows.negated_zero_points[m],
            reciprocal: rows.reciprocals[m],
        };
        y.extend((0..shape.size_n).map(|n| {
            let ([sum, factor], bias) = (row.times(columns, n, steps), columns.bias()[n]);
            match steps {
                Steps { bias_fused: true, .. } => finish(sum.mul_add(factor, bias), -0.0),
                Steps { unclamped: true, .. } => sum * factor + bias,
                _ => finish(sum * factor, bias),
            }
        }));
    }
    Values::from_f32(y, ty)
}

/// A quantized row.
struct Row<'a> {
    codes: &'a [i8],
    zero: i32,
    reciprocal: f32,
}

impl Row<'_> {
    /// The sum and its factor.
    fn times(&self, columns: &Columns, n: usize, steps: Steps) -> [f32; 2] {
        let column = columns.column(n);
        let zero = if steps.no_correction { 0 } else { self.zero };
        match columns.factors() {
            Factors::Channel { scales, sums } => {
                let sum = channel_wise_sum(dot_with(self.codes, column, steps), sums[n], zero);
                [sum, scales[n] * self.reciprocal]
            }
            Factors::Group { group_size, scales, sums } => {
                let g = *group_size;
                let groups = column.len() / g;
                let add = |a: f32, x: f32, y: f32| {
                    if steps.unfused { a + x * y } else { x.mul_add(y, a) }
                };
                let mut a = 0.0;
                if steps.correction_first {
                    a = add(a, sums[n], zero as f32);
                }
                for i in 0..groups {
                    let i = if steps.descending { groups - 1 - i } else { i };
                    let sum = dot_with(&self.codes[i * g..][..g], &column[i * g..][..g], steps);
                    a = add(a, sum as f32, bf16_to_f32(scales[n * groups + i]));
                }
                if !steps.correction_first && !steps.no_correction {
                    a = add(a, sums[n], zero as f32);
                }
                [a, self.reciprocal]
            }
        }
    }
}

/// Σ q·w in int32.
fn dot(q: &[i8], w: &[i8]) -> i32 {
    q.iter().zip(w).fold(0i32, |sum, (&q, &w)| sum.wrapping_add(i32::from(q) * i32::from(w)))
}

/// [`dot`], or its 16-bit runs.
fn dot_with(q: &[i8], w: &[i8], steps: Steps) -> i32 {
    let Some(Narrow { run, saturates }) = steps.narrow else { return dot(q, w) };
    let add = |sum: i16, (&q, &w): (&i8, &i8)| {
        let product = i16::from(q) * i16::from(w);
        if saturates { sum.saturating_add(product) } else { sum.wrapping_add(product) }
    };
    let runs = q.chunks(run).zip(w.chunks(run));
    runs.map(|(q, w)| i32::from(q.iter().zip(w).fold(0, add))).sum()
}

/// `dot` = Σ q·w, `sum` = 16 · Σw, `zero` = −zero point.
fn channel_wise_sum(dot: i32, sum: i32, zero: i32) -> f32 {
    dot.wrapping_mul(16).wrapping_add(zero.wrapping_mul(sum)) as f32
}

/// As [`channel_wise_sum`], scaled: `scale` = scale / 16.
pub(super) fn channel_wise(dot: i32, sum: i32, scale: f32, zero: i32, reciprocal: f32) -> f32 {
    channel_wise_sum(dot, sum, zero) * (scale * reciprocal)
}

/// The end of the group-wise sum `a`, where `sum` = Σ scale · Σw.
#[inline(always)]
pub(super) fn group_wise_end(a: f32, sum: f32, zero: i32, reciprocal: f32) -> f32 {
    sum.mul_add(zero as f32, a) * reciprocal
}

/// The definition as a kernel: one product after the other, directly from packed bytes.
#[derive(Debug, Clone, Copy)]
pub struct Scalar;

impl Kernel for Scalar {
    fn new() -> Option<Self> {
        Some(Self)
    }

    fn name(&self) -> &'static str {
        "scalar"
    }

    fn tile(&self, blocks: Blocks<'_>, tile: &mut Tile) {
        let (mr, nr) = (blocks.panel.rows(), blocks.rhs_layout.nr());
        let channel = blocks.rhs_layout.is_channel_wise();
        for (m, out) in tile.iter_mut().enumerate().take(mr) {
            let (zero, reciprocal) = blocks.row_factors(m);
            for (n, y) in out.iter_mut().enumerate().take(nr) {
                let dot = |g| packed_dot(blocks.activations(g), m, mr, blocks.codes(g), n, nr);
                let sum = blocks.tail_word(n);
                *y = if channel {
                    let scale = f32::from_bits(blocks.tail_word(nr + n));
                    channel_wise(dot(0), sum as i32, scale, zero, reciprocal)
                } else {
                    let groups = 0..blocks.rhs_layout.groups();
                    let a = groups
                        .fold(0.0f32, |a, g| (dot(g) as f32).mul_add(blocks.group_scale(g, n), a));
                    group_wise_end(a, f32::from_bits(sum), zero, reciprocal)
                };
            }
        }
    }
}

/// Σ q·w of a group of row `m` and column `n`, in int32.
fn packed_dot(activations: &[u8], m: usize, mr: usize, codes: &[u8], n: usize, nr: usize) -> i32 {
    let mut sum = 0i32;
    for (segment, columns) in codes.chunks_exact(nr * PIECE).enumerate() {
        let low = segment / 2 * CHUNK + segment % 2 * PIECE;
        for (j, &byte) in columns[n * PIECE..][..PIECE].iter().enumerate() {
            for (k, code) in [(low, (byte << 4) as i8 >> 4), (low + 16, byte as i8 >> 4)] {
                let q = activations[(k / PIECE * mr + m) * PIECE + j] as i8;
                sum = sum.wrapping_add(i32::from(q) * i32::from(code));
            }
        }
    }
    sum
}
