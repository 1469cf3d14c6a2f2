//! What the engine knows of packed weights, whatever their format.

use std::fmt::Debug;
use std::ops::Range;

use super::buffer::RowShape;
use super::{Kernel, PANELS, Panel, Run, fastest, kernels, zero_points};
use crate::num::dims::Shape;
use crate::w4a8::packed::{MatrixBytes, PackedRhs, PackedStack, RhsLayout};
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

/// Packed weights of one format: a matrix, or the experts of a layer.
pub(super) trait Packed: Debug + Send + Sync {
    /// What multiplies them.
    type Kernel: ?Sized + Debug + Send + Sync + 'static;

    /// Every kernel that this CPU supports, slowest first.
    fn kernels() -> Vec<Box<Self::Kernel>>;

    /// The fastest one.
    fn fastest() -> Box<Self::Kernel>;

    /// A kernel's name.
    fn kernel_name(kernel: &Self::Kernel) -> &'static str;

    /// `[K, N]` of each matrix.
    fn shape(&self) -> Shape;

    /// The matrices with the kernel that multiplies them. `rounding` is for formats that do not define
    /// their own.
    fn matrices<'l>(
        &'l self,
        kernel: &'l Self::Kernel,
        rounding: ActivationRounding,
    ) -> impl Matrices + 'l;
}

/// Implements [`Packed`] for types with a `layout` and `bytes`.
macro_rules! packed {
    ($($ty:ident),+: $kernel:path, $kernels:path, $fastest:path, $matrices:expr) => { $(
        impl crate::w4a8::matrices::Packed for $ty<'_> {
            type Kernel = dyn $kernel;

            fn kernels() -> Vec<Box<Self::Kernel>> {
                $kernels()
            }

            fn fastest() -> Box<Self::Kernel> {
                $fastest()
            }

            fn kernel_name(kernel: &Self::Kernel) -> &'static str {
                kernel.name()
            }

            fn shape(&self) -> crate::num::dims::Shape {
                self.layout().shape()
            }

            fn matrices<'l>(
                &'l self,
                kernel: &'l Self::Kernel,
                rounding: crate::w4a8::quantize::ActivationRounding,
            ) -> impl crate::w4a8::matrices::Matrices + 'l {
                $matrices(self.layout(), self.bytes(), kernel, rounding)
            }
        }
    )+ };
}
pub(super) use packed;

packed!(PackedRhs, PackedStack: Kernel, kernels, fastest, Int4::new);

/// Int4 matrices in KleidiAI's layout.
#[derive(Debug, Clone, Copy)]
struct Int4<'l> {
    layout: RhsLayout,
    /// Whole matrices.
    bytes: &'l [u8],
    kernel: &'l dyn Kernel,
    rounding: ActivationRounding,
}

impl<'l> Int4<'l> {
    fn new(
        layout: RhsLayout,
        bytes: &'l [u8],
        kernel: &'l dyn Kernel,
        rounding: ActivationRounding,
    ) -> Self {
        Self { layout, bytes, kernel, rounding }
    }

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
