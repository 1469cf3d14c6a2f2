//! One product, without allocations.

use super::fastest;
use super::kernel::{Kernel, Mxfp4};
use crate::Result;
use crate::layouts::mxfp4::PackedMxfp4;
use crate::num::array::FloatView2;
use crate::num::array_mut::FloatViewMut2;
use crate::w4a8::LinearWorkspace;
use crate::w4a8::linear::forward;
use crate::w4a8::rows::slices;

/// A packed weight with its kernel.
#[derive(Debug)]
pub struct Linear<'a> {
    weight: PackedMxfp4<'a>,
    kernel: Box<dyn Kernel>,
}

impl<'a> Linear<'a> {
    /// `weight` `[K, N]`, run by the fastest kernel of this CPU.
    pub fn new(weight: PackedMxfp4<'a>) -> Self {
        Self { weight, kernel: fastest() }
    }

    /// The same run by another kernel.
    pub fn with_kernel(self, kernel: Box<dyn Kernel>) -> Self {
        Self { kernel, ..self }
    }

    /// The weight.
    pub fn weight(&self) -> &PackedMxfp4<'a> {
        &self.weight
    }

    /// `out` `[M, N]` of `x` `[M, K]`, on rayon's current pool.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if the sizes do not agree;
    /// [`Error::Unsupported`](crate::Error::Unsupported) if `x` and `out` differ in type or are f16;
    /// [`Error::NotContiguous`](crate::Error::NotContiguous) for other strides than row-major ones. On
    /// an error `out` is unchanged.
    pub fn forward<'x, 'o>(
        &self,
        x: impl Into<FloatView2<'x>>,
        workspace: &mut LinearWorkspace,
        out: impl Into<FloatViewMut2<'o>>,
    ) -> Result<()> {
        let (x, out) = (x.into(), out.into());
        let (size_m, shape) = (x.shape()[0], self.weight.layout().shape());
        let (x, out) = slices(x, out, size_m, [shape.size_k, shape.size_n])?;
        let weight = Mxfp4 {
            layout: self.weight.layout(),
            bytes: self.weight.bytes(),
            kernel: self.kernel.as_ref(),
        };
        forward(&weight, x, workspace, out);
        Ok(())
    }
}
