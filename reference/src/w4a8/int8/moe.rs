//! Experts of int8 gate, up and down, on the engine of the int4 layer.

use std::borrow::Cow;

use super::Kernel;
use super::scalar::product;
use crate::Result;
use crate::layouts::CPU_INT8;
use crate::layouts::int8::{Int8Layout, PackedInt8};
use crate::moe::layer::Routed;
use crate::w4a8::Values;
use crate::w4a8::moe::{Engine, Experts, LayerOf, MoeConfig, kernel_names, load};
use crate::w4a8::quantize::{ActivationRounding, quantize_tokens};
use crate::w4a8::stored::MoeDescription;

/// Experts of int8 codes.
pub(in crate::w4a8) const ENGINE: Engine = Engine {
    format: &CPU_INT8,
    kernels: kernel_names::<PackedInt8<'_>>,
    load: |described, bytes, options| load::<PackedInt8<'_>>(described, bytes, options),
};

/// The rule of experts: `per_token_quant_int8`.
const ROUNDING: ActivationRounding = ActivationRounding::HalfAway;

/// One rank's layer of int8 experts, ready to run.
///
/// Of its configuration, the format defines the rounding of activations, and upstream has no refusals.
pub type Int8Layer<'a> = LayerOf<'a, PackedInt8<'a>, dyn Kernel>;

impl<'a> Int8Layer<'a> {
    /// Gate and up `w13` `[H, 2I]` and down `w2` `[I, H]` of this rank's experts, run by the fastest
    /// kernel of this CPU.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for an activation that the engine lacks, and for
    /// router weights on the input; [`Error::Size`](crate::Error::Size),
    /// [`Error::Shape`](crate::Error::Shape) and [`Error::Value`](crate::Error::Value) naming the part that
    /// does not agree.
    pub fn new(w13: PackedInt8<'a>, w2: PackedInt8<'a>, config: MoeConfig<'a>) -> Result<Self> {
        let config = MoeConfig { rounding: ROUNDING, ..config };
        Self::weighted_output(CPU_INT8.title, [w13, w2], config)
    }
}

impl<'a> Experts<'a> for PackedInt8<'a> {
    fn count(&self) -> usize {
        self.count()
    }

    fn read(described: &MoeDescription, [w13, w2]: [Cow<'a, [u8]>; 2]) -> Result<[Self; 2]> {
        let [gate_up, down] = described.shapes()?;
        let w13 = Self::new("w13_packed", Int8Layout::new(gate_up)?, w13)?;
        Ok([w13, Self::new("w2_packed", Int8Layout::new(down)?, w2)?])
    }

    fn layer([w13, w2]: [Self; 2], config: MoeConfig<'a>) -> Result<Int8Layer<'a>> {
        Int8Layer::new(w13, w2, config)
    }

    fn definition(layer: &Int8Layer<'a>, x: &Values, routed: Routed<'_>) -> Result<Values> {
        layer.plain(x, routed, |x, weight, local| {
            let rows = quantize_tokens(x, weight.layout().shape().size_k, ROUNDING)?;
            product(&rows, weight, local, x.ty())
        })
    }
}
