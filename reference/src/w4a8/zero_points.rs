//! What zero points of weights add to a kernel's results.
//!
//! A weight is (w + o) · scale, where w is a code from −8 to 7 that the kernels multiply, and o is 8 − zero
//! point. The rest starts from 0 and adds, for ascending groups, float(Σ(q − z)) · fl(o · scale), each
//! product and each sum rounded; q are the codes of the activations and z their zero point. Times 1 / s of
//! the row, it is added to the finished result of the kernel, which is then limited to the finite range.

use super::wide::{Loop, wide};
use super::{Blocks, MAX_ROWS, Panel, Run, finish};
use crate::num::scalar::bf16_to_f32;
use crate::w4a8::packed::{NR, PIECE, PackedRhs};

/// Adds to the results of [`Kernel::run_all`](super::Kernel::run_all); `offsets` are those of `run`'s blocks.
pub(super) fn add(
    panels: &[Panel<'_>],
    run: Run<'_>,
    offsets: &[i8],
    y: &mut [f32],
    stride: usize,
) {
    let mut row = 0;
    for &panel in panels {
        let y = &mut y[row * stride..];
        row += panel.rows();
        if run.layout.nr() == NR[0] {
            wide(Add::<{ NR[0] }> { panel, run, offsets, y, stride });
        } else {
            wide(Add::<{ NR[1] }> { panel, run, offsets, y, stride });
        }
    }
}

/// Adds to the rows of one panel, in blocks of `N` columns.
struct Add<'a, const N: usize> {
    panel: Panel<'a>,
    run: Run<'a>,
    offsets: &'a [i8],
    y: &'a mut [f32],
    stride: usize,
}

impl<const N: usize> Loop for Add<'_, N> {
    #[inline(always)]
    fn run(self) {
        let Self { panel, run, offsets, y, stride } = self;
        let (layout, rows) = (run.layout, panel.rows());
        let groups = layout.groups();
        let group_rows = (layout.shape().size_k / groups) as i32;
        let blocks = run.bytes.chunks_exact(layout.block_bytes());
        for (b, (rhs, offsets)) in blocks.zip(offsets.chunks_exact(groups * N)).enumerate() {
            let blocks = Blocks { panel, rhs_layout: layout, rhs };
            let mut sums = [[0.0f32; N]; MAX_ROWS];
            for (g, offsets) in offsets.as_chunks::<N>().0.iter().enumerate() {
                let mut factors = [0.0; N];
                for (n, (factor, &offset)) in factors.iter_mut().zip(offsets).enumerate() {
                    *factor = f32::from(offset) * scale(blocks, g, n);
                }
                for (m, sums) in sums.iter_mut().enumerate().take(rows) {
                    // A start is −8·Σq.
                    let codes = -(blocks.starts(g)[m] >> 3);
                    let centred = codes + panel.negated_zero_points()[m] * group_rows;
                    for (sum, &factor) in sums.iter_mut().zip(&factors) {
                        *sum += centred as f32 * factor;
                    }
                }
            }
            let columns = N.min(run.columns - b * N);
            for (m, sums) in sums.iter().enumerate().take(rows) {
                let reciprocal = panel.reciprocals()[m];
                let out = &mut y[m * stride + b * N..][..columns];
                for (y, &sum) in out.iter_mut().zip(sums) {
                    *y = finish(*y, sum * reciprocal);
                }
            }
        }
    }
}

/// The scale of a group and column of a block.
#[inline(always)]
fn scale(blocks: Blocks<'_>, g: usize, n: usize) -> f32 {
    match blocks.rhs_layout.is_channel_wise() {
        // Stored divided by 16.
        true => f32::from_bits(blocks.tail_word(blocks.rhs_layout.nr() + n)) * 16.0,
        false => blocks.group_scale(g, n),
    }
}

/// [`add`] in plain loops, value by value from the codes: the definition. `y` `[rows, N]`.
pub(super) fn define(panel: Panel<'_>, rhs: &PackedRhs<'_>, y: &mut [f32]) {
    let (layout, parts) = (rhs.layout(), rhs.parts());
    let (shape, rows) = (layout.shape(), panel.rows());
    let group_rows = shape.size_k / layout.groups();
    let code = |m: usize, k: usize| panel.codes()[(k / PIECE * rows + m) * PIECE + k % PIECE] as i8;
    for (at, y) in y.iter_mut().enumerate() {
        let (m, n) = (at / shape.size_n, at % shape.size_n);
        let (block, inside) = (n / layout.nr(), n % layout.nr());
        let mut sum = 0.0f32;
        for g in 0..layout.groups() {
            let mut centred = 0i64;
            for k in g * group_rows..(g + 1) * group_rows {
                centred += i64::from(code(m, k)) + i64::from(panel.negated_zero_points()[m]);
            }
            let offset = parts.offsets[(block * layout.groups() + g) * layout.nr() + inside];
            let bytes = &parts.blocks[layout.scale_offset(g, n)..];
            let scale = match layout.is_channel_wise() {
                true => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) * 16.0,
                false => bf16_to_f32(u16::from_le_bytes([bytes[0], bytes[1]])),
            };
            let factor = f32::from(offset) * scale;
            let product = centred as f32 * factor;
            sum += product;
        }
        *y = finish(*y, sum * panel.reciprocals()[m]);
    }
}
