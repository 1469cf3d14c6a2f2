//! A layer of the int4 path and its configuration.

use ndarray::Array2;

use super::activation::GatedActivation;
use super::check_expert_map;
use super::refusal::{Mode, Refusal, Settings};
use crate::moe::activation::Activation;
use crate::num::scalar::ScalarType;
use crate::w4a8::packed::PackedStack;
use crate::w4a8::quantize::ActivationRounding;
use crate::w4a8::{Kernel, LayerRouter, fastest};
use crate::{Error, Result};

/// The configuration of a layer, without its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig<'a> {
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Global to local expert, −1 for those of other ranks; absent: all experts are local.
    pub expert_map: Option<Vec<i32>>,
    /// The router: logits to experts and weights.
    pub router: LayerRouter<'a>,
    /// Activation between the products. A family's rule states the same one, and its parameters.
    pub activation: Activation,
    /// Rounding of quantized activations.
    pub rounding: ActivationRounding,
    /// Whether router weights multiply the input instead of the output.
    pub router_weight_on_input: bool,
    /// Whether upstream's refusals apply.
    pub mode: Mode,
}

/// One rank's layer, ready to run: the bits of [`Layer`](super::Layer).
#[derive(Debug)]
pub struct MoeLayer<'a> {
    pub(super) w13: PackedStack<'a>,
    pub(super) w2: PackedStack<'a>,
    pub(super) config: MoeConfig<'a>,
    kind: GatedActivation,
    kernel: Box<dyn Kernel>,
}

impl<'a> MoeLayer<'a> {
    /// Gate and up `w13` `[H, 2I]` and down `w2` `[I, H]` of this rank's experts, run by the
    /// fastest kernel of this CPU.
    ///
    /// # Errors
    /// The [`Refusal`] as [`Error::Unsupported`]; [`Error::Size`], [`Error::Shape`] and
    /// [`Error::Value`] naming the part that does not agree.
    pub fn new(w13: PackedStack<'a>, w2: PackedStack<'a>, config: MoeConfig<'a>) -> Result<Self> {
        check_rule(&config)?;
        let kind = gated(&config.router, config.activation)?;
        let layer = Self { w13, w2, config, kind, kernel: fastest() };
        layer.admit(ScalarType::FLOAT32)?;
        let (h, i) = (layer.hidden_size(), layer.intermediate_size());
        for (name, weights, size_n) in [("w13", &layer.w13, 2 * i), ("w2", &layer.w2, h)] {
            let shape = weights.layout().shape();
            if shape.size_n != size_n {
                let expected = format!("[{}, {size_n}]", shape.size_k);
                return Err(Error::shape(name, &[shape.size_k, shape.size_n], expected));
            }
        }
        let local = layer.w13.count();
        if local != layer.w2.count() {
            let found = format!("{local} of w13, {} of w2", layer.w2.count());
            return Err(Error::size("experts", found, "as many of each, 1 or more"));
        }
        check_expert_map(layer.config.num_experts, layer.config.expert_map.as_deref(), local)?;
        // Checks sizes and bias; logits are checked in each call.
        layer.config.router.validate(Array2::zeros((0, layer.config.num_experts)).view())?;
        Ok(layer)
    }

    /// The same layer with another kernel.
    pub fn with_kernel(self, kernel: Box<dyn Kernel>) -> Self {
        Self { kernel, ..self }
    }

    /// H.
    pub fn hidden_size(&self) -> usize {
        self.w13.layout().shape().size_k
    }

    /// I.
    pub fn intermediate_size(&self) -> usize {
        self.w2.layout().shape().size_k
    }

    /// Gate and up.
    pub fn w13(&self) -> &PackedStack<'a> {
        &self.w13
    }

    /// Down.
    pub fn w2(&self) -> &PackedStack<'a> {
        &self.w2
    }

    /// The layer's configuration.
    pub fn config(&self) -> &MoeConfig<'a> {
        &self.config
    }

    pub(super) fn kernel(&self) -> &dyn Kernel {
        self.kernel.as_ref()
    }

    /// The activation between the products.
    pub fn kind(&self) -> GatedActivation {
        self.kind
    }

    /// Checks `dtype` against upstream's refusals.
    pub(super) fn admit(&self, dtype: ScalarType) -> Result<()> {
        let router = match &self.config.router {
            LayerRouter::Operator(router) => router,
            LayerRouter::Family(_) => return admit_type(dtype),
        };
        let settings = Settings {
            has_expert_map: self.config.expert_map.is_some(),
            use_grouped_topk: router.groups.is_some(),
            router_weight_on_input: self.config.router_weight_on_input,
            ..Settings::new(self.config.activation, dtype)
        };
        Ok(self.config.mode.admit(&settings)?)
    }
}

/// The activation of a layer, which its router may state.
pub(in crate::w4a8) fn gated(
    router: &LayerRouter<'_>,
    activation: Activation,
) -> Result<GatedActivation> {
    let LayerRouter::Family(family) = router else {
        let refused = Refusal::Activation { found: activation };
        return Ok(GatedActivation::of(activation).ok_or(refused)?);
    };
    if activation != family.rule().activation {
        return Err(Error::size("activation", activation, family.rule().activation));
    }
    GatedActivation::of_family(family.activation())
}

/// Checks that a family's rule runs in this mode, with these settings.
fn check_rule(config: &MoeConfig<'_>) -> Result<()> {
    let LayerRouter::Family(family) = &config.router else { return Ok(()) };
    if config.mode == Mode::Upstream {
        let reason = "upstream's method has no family's rule; expected Mode::Extended";
        return Err(Error::unsupported("a family's routing", reason));
    }
    let expected = family.rule().apply_router_weight_on_input;
    if config.router_weight_on_input != expected {
        return Err(Error::size("router_weight_on_input", config.router_weight_on_input, expected));
    }
    Ok(())
}

/// Checks the type of activations.
pub(super) fn admit_type(dtype: ScalarType) -> Result<()> {
    match dtype {
        ScalarType::FLOAT32 | ScalarType::BFLOAT16 => Ok(()),
        found => Err(Refusal::Dtype { found }.into()),
    }
}
