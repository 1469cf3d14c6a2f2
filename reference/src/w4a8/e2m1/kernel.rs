//! Kernels of e2m1 weights: the trait, and how the engine calls them.

use std::fmt::Debug;
use std::ops::Range;

use super::{OFFSET, fastest, kernels};
use crate::layouts::e2m1::{E2m1Layout, E2m1Stack, GROUP, NR, PackedE2m1};
use crate::num::dims::Shape;
use crate::w4a8::buffer::RowShape;
use crate::w4a8::matrices::{Matrices, packed};
use crate::w4a8::quantize::ActivationRounding;
use crate::w4a8::{PANELS, Panel};

/// A kernel that multiplies panels by blocks. All kernels produce the same bits.
pub trait Kernel: Debug + Send + Sync {
    /// A name for reports.
    fn name(&self) -> &'static str;

    /// The results of a panel times a run of blocks, with bias: row `m`, column `n` of the run to
    /// `y[m * stride + n]`, for columns below `columns`. The rest of `y` is unchanged.
    ///
    /// Panics if a slice is too short.
    fn run(&self, panel: Panel<'_>, rhs: E2m1Run<'_>, y: &mut [f32], stride: usize);

    /// [`Kernel::run`] of two panels: the second one's rows follow the first one's in `y`.
    fn run_pair(&self, panels: [Panel<'_>; 2], rhs: E2m1Run<'_>, y: &mut [f32], stride: usize) {
        let (first, second) = y.split_at_mut(panels[0].rows() * stride);
        self.run(panels[0], rhs, first, stride);
        self.run(panels[1], rhs, second, stride);
    }
}

/// Whole blocks of a packed weight, one after the other.
#[derive(Debug, Clone, Copy)]
pub struct E2m1Run<'a> {
    /// How they are packed.
    pub layout: E2m1Layout,
    /// A whole number of [`E2m1Layout::block_bytes`].
    pub bytes: &'a [u8],
    /// Columns to compute: all but those past N in the matrix's last block.
    pub columns: usize,
}

impl<'a> E2m1Run<'a> {
    /// The blocks that cover these columns of a whole packed matrix, and the number of columns before
    /// them in the first block. Panics if they are outside the matrix.
    pub fn covering(layout: E2m1Layout, matrix: &'a [u8], columns: Range<usize>) -> (Self, usize) {
        let (len, first) = (layout.block_bytes(), columns.start / NR);
        let bytes = &matrix[first * len..columns.end.div_ceil(NR) * len];
        (Self { layout, bytes, columns: columns.end - first * NR }, columns.start - first * NR)
    }

    /// Panics unless the panel has `rows` rows of the run's K and every slice has the length of its
    /// layout. Kernels rely on these checks.
    #[allow(dead_code, reason = "the scalar kernel indexes slices")]
    pub(in crate::w4a8) fn check(&self, panel: Panel<'_>, y: &[f32], stride: usize, rows: usize) {
        let (groups, len) = (self.layout.groups(), self.layout.block_bytes());
        assert!(panel.rows() == rows && rows > 0, "{} rows, not {rows}", panel.rows());
        assert!(panel.codes().len() == groups * GROUP * rows, "codes of the panel");
        assert!(panel.scales().len() == groups * rows, "scales of the panel");
        assert!(panel.starts().len() == groups * rows, "sums of the panel");
        assert!(self.bytes.len() == self.columns.div_ceil(NR) * len, "bytes of the run");
        let last = stride.saturating_mul(rows - 1).saturating_add(self.columns);
        assert!(y.len() >= last && (rows == 1 || stride >= self.columns), "room in y");
    }
}

packed!(PackedE2m1, E2m1Stack: Kernel, kernels, fastest, E2m1::new);

/// Packed matrices with their kernel, for the engine.
#[derive(Debug, Clone, Copy)]
struct E2m1<'l> {
    layout: E2m1Layout,
    /// Whole matrices.
    bytes: &'l [u8],
    kernel: &'l dyn Kernel,
}

impl<'l> E2m1<'l> {
    /// The format defines how activations are rounded.
    fn new(
        layout: E2m1Layout,
        bytes: &'l [u8],
        kernel: &'l dyn Kernel,
        _: ActivationRounding,
    ) -> Self {
        Self { layout, bytes, kernel }
    }
}

impl Matrices for E2m1<'_> {
    fn shape(&self) -> Shape {
        self.layout.shape()
    }

    fn rows(&self) -> RowShape {
        RowShape::of_groups(self.layout.groups(), OFFSET)
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
        let (run, before) = E2m1Run::covering(self.layout, bytes, columns);
        debug_assert!(panels.len() <= PANELS);
        match *panels {
            [first, second] => self.kernel.run_pair([first, second], run, y, stride),
            _ => {
                let mut row = 0;
                for panel in panels {
                    self.kernel.run(*panel, run, &mut y[row * stride..], stride);
                    row += panel.rows();
                }
            }
        }
        before
    }
}
