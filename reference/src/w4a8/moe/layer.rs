//! A layer of packed experts and its configuration, for any format; the int4 layer's own checks.

use std::borrow::Cow;

use ndarray::Array2;

use super::activation::GatedActivation;
use super::check_expert_map;
use super::parts::Parts;
use super::refusal::{Mode, Refusal, Settings};
use super::workspace::Workspace;
use crate::moe::activation::Activation;
use crate::moe::layer::Routed;
use crate::num::scalar::ScalarType;
use crate::w4a8::matrices::Packed;
use crate::w4a8::packed::PackedStack;
use crate::w4a8::quantize::ActivationRounding;
use crate::w4a8::stored::MoeDescription;
use crate::w4a8::{Kernel, LayerRouter, Values};
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

/// Packed experts of one format, as a layer runs them.
pub(in crate::w4a8) trait Experts<'a>: Packed + Sized + 'a {
    /// Number of matrices.
    fn count(&self) -> usize;

    /// w13 and w2 of a description.
    ///
    /// # Errors
    /// [`Error::Shape`] for bytes that do not fit.
    fn read(described: &MoeDescription, bytes: [Cow<'a, [u8]>; 2]) -> Result<[Self; 2]>;

    /// The layer, checked as the format's own constructor does.
    ///
    /// # Errors
    /// As that one.
    fn layer(experts: [Self; 2], config: MoeConfig<'a>) -> Result<LayerOf<'a, Self, Self::Kernel>>;

    /// Checks the type of activations where the format's own refusals do; types that differ from the
    /// output's, and f16, are refused elsewhere.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    fn admit(_config: &MoeConfig<'_>, _dtype: ScalarType) -> Result<()> {
        Ok(())
    }

    /// `[M, H]` of `x` `[M, H]` by the scalar definition, value by value.
    fn definition(
        layer: &LayerOf<'a, Self, Self::Kernel>,
        x: &Values,
        routed: Routed<'_>,
    ) -> Result<Values>;
}

/// One rank's layer of experts in any packed format, ready to run.
#[derive(Debug)]
pub struct LayerOf<'a, S, K: ?Sized> {
    pub(super) w13: S,
    pub(super) w2: S,
    pub(super) config: MoeConfig<'a>,
    kind: GatedActivation,
    kernel: Box<K>,
}

/// One rank's layer of int4 experts: the bits of [`Layer`](super::Layer).
pub type MoeLayer<'a> = LayerOf<'a, PackedStack<'a>, dyn Kernel>;

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
        admit(&config, ScalarType::FLOAT32)?;
        let (h, i) = (w13.layout().shape().size_k, w2.layout().shape().size_k);
        for (name, weights, size_n) in [("w13", &w13, 2 * i), ("w2", &w2, h)] {
            let shape = weights.layout().shape();
            if shape.size_n != size_n {
                let expected = format!("[{}, {size_n}]", shape.size_k);
                return Err(Error::shape(name, &[shape.size_k, shape.size_n], expected));
            }
        }
        Self::of([w13, w2], config, kind)
    }
}

#[allow(private_bounds, reason = "the formats are this crate's")]
impl<'a, S: Experts<'a, Kernel = K>, K: ?Sized> LayerOf<'a, S, K> {
    /// The layer of a format's own constructor, which has checked the matrices' shapes; run by the
    /// fastest kernel of this CPU.
    ///
    /// # Errors
    /// [`Error::Size`], [`Error::Shape`] and [`Error::Value`] naming the part that does not agree.
    pub(in crate::w4a8) fn of(
        [w13, w2]: [S; 2],
        config: MoeConfig<'a>,
        kind: GatedActivation,
    ) -> Result<Self> {
        if w13.count() != w2.count() {
            let found = format!("{} of w13, {} of w2", w13.count(), w2.count());
            return Err(Error::size("experts", found, "as many of each, 1 or more"));
        }
        check_expert_map(config.num_experts, config.expert_map.as_deref(), w13.count())?;
        // Checks sizes and bias; logits are checked in each call.
        config.router.validate(Array2::zeros((0, config.num_experts)).view())?;
        Ok(Self { w13, w2, config, kind, kernel: S::fastest() })
    }

    /// The same layer with another kernel.
    pub fn with_kernel(self, kernel: Box<K>) -> Self {
        Self { kernel, ..self }
    }

    /// H.
    pub fn hidden_size(&self) -> usize {
        self.w13.shape().size_k
    }

    /// I.
    pub fn intermediate_size(&self) -> usize {
        self.w2.shape().size_k
    }

    /// Gate and up.
    pub fn w13(&self) -> &S {
        &self.w13
    }

    /// Down.
    pub fn w2(&self) -> &S {
        &self.w2
    }

    /// The layer's configuration.
    pub fn config(&self) -> &MoeConfig<'a> {
        &self.config
    }

    pub(super) fn kernel(&self) -> &K {
        &self.kernel
    }

    /// The activation between the products.
    pub fn kind(&self) -> GatedActivation {
        self.kind
    }

    /// Calls `work` with the layer as the engine sees it.
    pub(super) fn with_parts<R>(&self, work: impl FnOnce(&Parts<'_>) -> R) -> R {
        let (kernel, rounding) = (self.kernel(), self.config.rounding);
        let w13 = self.w13.matrices(kernel, rounding);
        let w2 = self.w2.matrices(kernel, rounding);
        work(&Parts {
            w13: &w13,
            w2: &w2,
            num_experts: self.config.num_experts,
            expert_map: self.config.expert_map.as_deref(),
            kind: self.kind(),
            router_weight_on_input: self.config.router_weight_on_input,
        })
    }

    /// Buffers for calls of up to `max_tokens` tokens of either type.
    pub fn workspace(&self, max_tokens: usize) -> Workspace {
        let top_k = self.config.router.top_k();
        self.with_parts(|parts| Workspace::for_parts(parts, top_k, max_tokens))
    }
}

/// Checks `dtype` against upstream's refusals.
pub(super) fn admit(config: &MoeConfig<'_>, dtype: ScalarType) -> Result<()> {
    let router = match &config.router {
        LayerRouter::Operator(router) => router,
        LayerRouter::Family(_) => return admit_type(dtype),
    };
    let settings = Settings {
        has_expert_map: config.expert_map.is_some(),
        use_grouped_topk: router.groups.is_some(),
        router_weight_on_input: config.router_weight_on_input,
        ..Settings::new(config.activation, dtype)
    };
    Ok(config.mode.admit(&settings)?)
}

/// The activation of a layer, which its router may state.
pub(super) fn gated(router: &LayerRouter<'_>, activation: Activation) -> Result<GatedActivation> {
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
