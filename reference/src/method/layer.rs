//! The Mixture-of-Experts layer of a method.

use super::activations::{Activations, Quantizer};
use super::product::Product;
use crate::moe::layer::{Layer, Routed, Stages};
use crate::moe::{Chain, to_slots};
use crate::num::array::{FloatView2, HalfArray2};
use crate::{Error, Result};

/// A layer whose activations are quantized by its checkpoint's method.
#[derive(Debug, Clone)]
pub struct MethodLayer<'w> {
    /// Weights, routing, activation. Its `input_dtype` must be `None`, and `orders` are ignored:
    /// act-order is sorted stably.
    pub layer: Layer<'w>,
    /// Quantizers of x and of the activation's output.
    pub quantizers: [Quantizer; 2],
    /// NVFP4: multipliers of gate and up of each expert, if they differ from those of the weight.
    pub w13_multipliers: Option<&'w [[f32; 2]]>,
}

impl MethodLayer<'_> {
    /// Computes the layer of `x` `[M, H]`, of the layer's type. `multiply` computes the
    /// products with w13 (0) and w2 (1): [`Product::compute`], [`Product::define`],
    /// [`Product::execute`]. Activation and sum are [`Chain::Canonical`].
    ///
    /// # Errors
    /// As [`Layer::validate`], [`Layer::local_experts`], [`Quantizer::quantize`], `multiply`;
    /// [`Error::Shape`] if x and `routed` differ in their rows; [`Error::Unsupported`] for
    /// multipliers of gate and up if these are not halves.
    pub fn forward<'x>(
        &self,
        x: impl Into<FloatView2<'x>>,
        routed: Routed<'_>,
        multiply: impl Fn(usize, &Product<'_>) -> Result<HalfArray2>,
    ) -> Result<Stages> {
        let layer = &self.layer;
        layer.validate()?;
        let [hidden, inner] = [layer.hidden_size(), layer.intermediate_size()];
        if layer.input_dtype.is_some() {
            return Err(Error::unsupported("input_dtype", "a method's quantizers say it"));
        }
        let halves = crate::moe::activation::Columns::Halves;
        if self.w13_multipliers.is_some() && layer.activation.columns != halves {
            let what = "multipliers of gate and up each";
            return Err(Error::unsupported(what, "gate and up must be halves of w13"));
        }
        let experts = layer.local_experts(routed)?;
        let top_k = routed.top_k;
        let (tokens, x) = (experts.len() / top_k, x.into());
        if x.shape() != [tokens, hidden] {
            return Err(Error::shape("x", x.shape(), format!("[{tokens}, {hidden}]")));
        }
        let slots = to_slots(&layer.bits("x", &x, hidden)?, hidden, top_k);
        let product = |which: usize, x: &[u16], size_k: usize| -> Result<Vec<u16>> {
            let x = FloatView2::from_rows("activations", layer.dtype, size_k, x)?;
            let rows = self.quantizers[which].quantize(x, &experts)?;
            let product = self.product(which, &rows, &experts, routed);
            let (y, shape) = (multiply(which, &product)?, [experts.len(), product.size_n()]);
            if y.shape() != shape {
                return Err(Error::shape("output of a product", y.shape(), format!("{shape:?}")));
            }
            y.view().bits_of("output of a product", layer.dtype)?;
            Ok(y.into_bits())
        };
        let gate_up = product(0, &slots, hidden)?;
        let activated = layer.activate_bits(&gate_up, Chain::Canonical)?;
        let down = product(1, &activated, inner)?;
        let y = layer.sum_bits(&down, top_k, Chain::Canonical)?;
        Stages::from_bits(layer, [gate_up, activated, down, y])
    }

    /// The product of quantized rows, one for each slot, with w13 (`which` 0) or w2 (1) of the slot's
    /// local expert ([`Layer::local_experts`]).
    pub fn product<'p>(
        &'p self,
        which: usize,
        rows: &'p Activations,
        expert_of: &'p [Option<usize>],
        routed: Routed<'p>,
    ) -> Product<'p> {
        let layer = &self.layer;
        Product {
            rows,
            expert_of,
            weights: [layer.w13, layer.w2][which],
            halves: self.w13_multipliers.filter(|_| which == 0),
            router_weights: (layer.router_weight_on_input == (which == 0))
                .then_some(routed.topk_weights),
            dtype: layer.dtype,
        }
    }
}
