//! Kernels of int8 weights: the trait, and how the engine calls them.

use std::fmt::Debug;
use std::ops::Range;

use super::{fastest, kernels};
use crate::layouts::int8::{Int8Layout, NR, PackedInt8};
use crate::num::dims::Shape;
use crate::w4a8::buffer::RowShape;
use crate::w4a8::matrices::{Matrices, packed};
use crate::w4a8::quantize::ActivationRounding;
use crate::w4a8::{PANELS, Panel};

/// A kernel that multiplies panels by blocks. All kernels produce the same bits.
pub trait Kernel: Debug + Send + Sync {
    /// A name for reports.
    fn name(&self) -> &'static str;

    /// Whether panels hold q + 128, for products of which one factor is unsigned.
    fn unsigned(&self) -> bool {
        false
    }

    /// The largest number of panels that [`Kernel::run_all`] takes.
    fn panels(&self) -> usize {
        PANELS
    }

    /// Whether [`Kernel::run_all`] reads [`Panel::lines`], which hold q.
    fn reads_lines(&self) -> bool {
        false
    }

    /// The results of a panel times a run of blocks, with bias: row `m`, column `n` of the run to
    /// `y[m * stride + n]`, for columns below `columns`. The rest of `y` is unchanged.
    ///
    /// Panics if a slice is too short.
    fn run(&self, panel: Panel<'_>, rhs: Int8Run<'_>, y: &mut [f32], stride: usize);

    /// [`Kernel::run`] of up to [`Kernel::panels`] panels; the rows of each follow those of the
    /// previous one in `y`.
    fn run_all(&self, panels: &[Panel<'_>], rhs: Int8Run<'_>, y: &mut [f32], stride: usize) {
        let mut row = 0;
        for panel in panels {
            self.run(*panel, rhs, &mut y[row * stride..], stride);
            row += panel.rows();
        }
    }
}

/// Whole blocks of a packed weight, one after the other.
#[derive(Debug, Clone, Copy)]
pub struct Int8Run<'a> {
    /// How they are packed.
    pub layout: Int8Layout,
    /// A whole number of [`Int8Layout::block_bytes`].
    pub bytes: &'a [u8],
    /// Columns to compute: all but those past N in the matrix's last block.
    pub columns: usize,
}

impl<'a> Int8Run<'a> {
    /// The blocks that cover these columns of a whole packed matrix, and the number of columns before
    /// them in the first block. Panics if they are outside the matrix.
    pub fn covering(layout: Int8Layout, matrix: &'a [u8], columns: Range<usize>) -> (Self, usize) {
        let (len, first) = (layout.block_bytes(), columns.start / NR);
        let bytes = &matrix[first * len..columns.end.div_ceil(NR) * len];
        (Self { layout, bytes, columns: columns.end - first * NR }, columns.start - first * NR)
    }

    /// Panics unless the panel has `rows` rows of the run's K and every slice has the length of its
    /// layout. Kernels rely on these checks.
    pub(in crate::w4a8) fn check(&self, panel: Panel<'_>, y: &[f32], stride: usize, rows: usize) {
        assert!(panel.rows() == rows && rows > 0, "{} rows, not {rows}", panel.rows());
        assert!(panel.codes().len() == self.layout.padded_k() * rows, "codes of the panel");
        self.check_blocks(y, stride, rows);
    }

    /// Panics unless the blocks, and `rows` rows of `y`, have the lengths of the layout.
    pub(in crate::w4a8) fn check_blocks(&self, y: &[f32], stride: usize, rows: usize) {
        let len = self.layout.block_bytes();
        assert!(self.bytes.len() == self.columns.div_ceil(NR) * len, "bytes of the run");
        let last = stride.saturating_mul(rows - 1).saturating_add(self.columns);
        assert!(y.len() >= last && (rows == 1 || stride >= self.columns), "room in y");
    }
}

packed!(PackedInt8: Kernel, kernels, fastest, Int8::new);

/// Packed matrices with their kernel, for the engine.
#[derive(Debug, Clone, Copy)]
struct Int8<'l> {
    layout: Int8Layout,
    /// Whole matrices.
    bytes: &'l [u8],
    kernel: &'l dyn Kernel,
    rounding: ActivationRounding,
}

impl<'l> Int8<'l> {
    fn new(
        layout: Int8Layout,
        bytes: &'l [u8],
        kernel: &'l dyn Kernel,
        rounding: ActivationRounding,
    ) -> Self {
        Self { layout, bytes, kernel, rounding }
    }
}

impl Matrices for Int8<'_> {
    fn shape(&self) -> Shape {
        self.layout.shape()
    }

    fn rows(&self) -> RowShape {
        let how = [self.kernel.unsigned(), self.kernel.reads_lines()];
        RowShape::of_tokens(self.layout.padded_k(), self.rounding, how)
    }

    fn panels(&self) -> usize {
        self.kernel.panels()
    }

    fn multiply(
        &self,
        matrix: usize,
        columns: Range<usize>,
        panels: &[Panel<'_>],
        y: &mut [f32],
        stride: usize,
    ) -> usize {
        let len = self.layout.packed_len();
        let bytes = &self.bytes[matrix * len..][..len];
        let (run, before) = Int8Run::covering(self.layout, bytes, columns);
        self.kernel.run_all(panels, run, y, stride);
        before
    }
}
