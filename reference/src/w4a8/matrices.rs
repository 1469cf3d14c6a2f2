//! What the engine knows of packed weights, whatever their format.

use std::ops::Range;

use super::buffer::RowShape;
use super::{Kernel, PANELS, Panel, Run};
use crate::num::dims::Shape;
use crate::w4a8::packed::RhsLayout;
use crate::w4a8::quantize::ActivationRounding;

/// Packed matrices of one shape, with the kernel that multiplies them.
pub(super) trait Matrices: Sync {
    /// `[K, N]` of each matrix.
    fn shape(&self) -> Shape;

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

impl Matrices for Int4<'_> {
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
        let len = self.layout.packed_len();
        let bytes = &self.bytes[matrix * len..][..len];
        let (run, before) = Run::covering(self.layout, bytes, columns.start, columns.end);
        self.kernel.run_all(panels, run, y, stride);
        before
    }
}
