//! One product.

use std::borrow::Cow;

use super::Kernel;
use super::scalar::product;
use crate::Result;
use crate::layouts::CPU_INT8;
use crate::layouts::int8::{Int8Layout, Int8Tail, PackedInt8};
use crate::w4a8::Values;
use crate::w4a8::linear::LinearOf;
use crate::w4a8::linears::{Dense, LinearEngine, load_as};
use crate::w4a8::moe::kernel_names;
use crate::w4a8::quantize::{ActivationRounding, quantize_tokens};
use crate::w4a8::stored::LinearDescription;

/// A packed weight with its kernel.
pub type Linear<'a> = LinearOf<PackedInt8<'a>, dyn Kernel>;

/// Linear layers of int8 codes.
pub(in crate::w4a8) const LINEAR: LinearEngine = LinearEngine {
    format: &CPU_INT8,
    kernels: kernel_names::<PackedInt8<'_>>,
    load: |described, bytes, options| load_as::<PackedInt8<'_>>(described, bytes, options),
};

/// The rule of linear layers: `dynamic_scaled_int8_quant`.
const ROUNDING: ActivationRounding = ActivationRounding::HalfEven;

impl<'a> Linear<'a> {
    /// The first matrix of `weight`, `[K, N]`, run by the fastest kernel of this CPU.
    pub fn new(weight: PackedInt8<'a>) -> Self {
        Self::of(weight, ROUNDING)
    }
}

impl<'a> Dense<'a> for PackedInt8<'a> {
    fn read(described: &LinearDescription, bytes: Cow<'a, [u8]>) -> Result<Self> {
        Self::new("rhs_packed", Int8Layout::new(described.shape)?, bytes)
    }

    fn linear(self, _: ActivationRounding) -> LinearOf<Self, Self::Kernel> {
        Linear::new(self)
    }

    fn definition(&self, x: &Values, rounding: ActivationRounding) -> Result<Values> {
        let rows = quantize_tokens(x, self.layout().shape().size_k, rounding)?;
        product(&rows, self, 0, x.ty())
    }

    fn dequantized(&self) -> Vec<f32> {
        let (codes, scales) = (self.codes(0), self.floats(0, Int8Tail::Scale));
        let columns = codes.chunks_exact(self.layout().shape().size_k).zip(scales);
        columns.flat_map(|(w, scale)| w.iter().map(move |&w| f32::from(w) * scale)).collect()
    }
}
