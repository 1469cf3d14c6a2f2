//! The Mixture-of-Experts layer of a method.

use super::activations::Quantizer;
use super::product::{Arithmetic, Product};
use crate::moe::Chain;
use crate::moe::layer::{Layer, Routed, Stages};
use crate::{Error, Result};

/// Which of [`Product`]'s two ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Multiply {
    /// [`Product::compute`].
    Compute,
    /// [`Product::define`].
    Define,
}

/// A layer whose activations are quantized as its checkpoint's method says.
#[derive(Debug, Clone)]
pub struct MethodLayer<'w> {
    /// Weights, routing, activation. Its own `input_dtype` must be absent, and `orders` are not read:
    /// act-order is sorted stably.
    pub layer: Layer<'w>,
    /// Of x, and of what leaves the activation.
    pub quantizers: [Quantizer; 2],
    /// NVFP4: multipliers of gate and up of each expert, where they are not the weight's own.
    pub w13_multipliers: Option<&'w [[f32; 2]]>,
}

impl MethodLayer<'_> {
    /// Computes the layer of `x` `[M, H]`, bits of the layer's type. Activation and sum are
    /// [`Chain::Canonical`].
    ///
    /// # Errors
    /// As [`Layer::validate`], [`Layer::local_experts`], [`Quantizer::quantize`],
    /// [`Product::compute`]; [`Error::Shape`] when x has not the rows that `routed` has;
    /// [`Error::Unsupported`] where multipliers of gate and up are given for columns that are no halves.
    pub fn forward(
        &self,
        x: &[u16],
        routed: Routed<'_>,
        arithmetic: Arithmetic,
        multiply: Multiply,
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
        let tokens = experts.len() / top_k;
        if tokens.checked_mul(hidden) != Some(x.len()) {
            return Err(Error::shape("x", &[x.len()], format!("[{tokens}, {hidden}]")));
        }
        let slots: Vec<u16> = x
            .chunks_exact(hidden.max(1))
            .flat_map(|row| std::iter::repeat_n(row, top_k).flatten().copied())
            .collect();
        let product = |which: usize, x: &[u16], size_k: usize| -> Result<Vec<u16>> {
            let rows = self.quantizers[which].quantize(x, layer.dtype, size_k, &experts)?;
            let product = Product {
                rows: &rows,
                expert_of: &experts,
                weights: [layer.w13, layer.w2][which],
                halves: self.w13_multipliers.filter(|_| which == 0),
                router_weights: (layer.router_weight_on_input == (which == 0))
                    .then_some(routed.topk_weights),
                dtype: layer.dtype,
            };
            match multiply {
                Multiply::Compute => product.compute(arithmetic),
                Multiply::Define => product.define(arithmetic),
            }
        };
        let gate_up = product(0, &slots, hidden)?;
        let activated = layer.activate(&gate_up, Chain::Canonical)?;
        let down = product(1, &activated, inner)?;
        let y = layer.sum(&down, top_k, Chain::Canonical)?;
        Ok(Stages { gate_up, activated, down, y })
    }
}
