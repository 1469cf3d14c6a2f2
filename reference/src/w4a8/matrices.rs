//! What the engine knows of packed weights, whatever their format.

use std::ops::Range;

use super::buffer::RowShape;
use super::{Kernel, PANELS, Panel, Run, zero_points};
use crate::num::dims::Shape;
use crate::w4a8::packed::{MatrixBytes, RhsLayout};
use crate::w4a8::quantize::ActivationRounding;

/// Packed matrices of one shape, with the kernel that multiplies them.
pub(super) trait Matrices: Sync {
    /// `[K, N]` of each matrix.
    fn shape(&self) -> Shape;

    /// The order of a matrix's rows, as the columns of x are gathered; absent: the checkpoint's.
    fn order(&self, matrix: usize) -> Option<&[[u8; 4]]> {
        let _ = matrix;
        None
    }

    /// Storage of the rows that the kernel takes.
    fn rows(&self) -> RowShape;

    /// The largest number of panels of [`Matrices::multiply`].
    fn panels(&self) -> usize {
        PANELS
    }

    /// The results of up to [`Matrices::panels`] panels times these columns of a matrix: the row
    /// `m` of all panels to `y[m * stride..]`. Returns the number of columns before `columns` in `y`.
    ///
    /// Panics if a slice is too short or the columns are outside the matrix.
    fn multiply(
        &self,
        matrix: usize,
        columns: Range<usize>,
        panels: &[Panel<'_>],
        y: &mut [f32],
        stride: usize,
    ) -> usize;
}

/// Int4 matrices in KleidiAI's layout.
#[derive(Debug, Clone, Copy)]
pub(super) struct Int4<'l> {
    pub(super) layout: RhsLayout,
    /// Whole matrices.
    pub(super) bytes: &'l [u8],
    pub(super) kernel: &'l dyn Kernel,
    pub(super) rounding: ActivationRounding,
}

impl<'l> Int4<'l> {
    fn parts(&self, matrix: usize) -> MatrixBytes<'l> {
        let len = self.layout.packed_len();
        self.layout.parts(&self.bytes[matrix * len..][..len])
    }
}

impl Matrices for Int4<'_> {
    fn order(&self, matrix: usize) -> Option<&[[u8; 4]]> {
        self.layout.tables().act_order.then(|| self.parts(matrix).order)
    }

    fn shape(&self) -> Shape {
        self.layout.shape()
    }

    fn rows(&self) -> RowShape {
        RowShape::of(self.layout, self.rounding).for_kernel(self.kernel)
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
        let parts = self.parts(matrix);
        let (run, before) = Run::covering(self.layout, parts.blocks, columns.start, columns.end);
        self.kernel.run_all(panels, run, y, stride);
        if self.layout.tables().zero_points {
            let first = columns.start / self.layout.nr() * self.layout.nr();
            let offsets = &parts.offsets[first * self.layout.groups()..];
            zero_points::add(panels, run, offsets, y, stride);
        }
        before
    }
}
