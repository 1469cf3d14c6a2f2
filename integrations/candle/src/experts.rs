//! Routed experts.

use std::sync::Arc;

use candle_core::{DType, Module, Tensor};
use marlinspike::moe::math;
use marlinspike::ndarray::ArrayView2;
use marlinspike::num::array::FloatView2;
use marlinspike::num::array_mut::FloatViewMut2;
use marlinspike::w4a8::moe::MoeLayer;

use crate::error::{Error, Result};
use crate::linear::DenseLinear;
use crate::operator::{Argument, RoutedLayer, apply_routed, widened, with_workspaces};

/// The routed experts of a Mixture-of-Experts layer, with packed 4-bit weights. Their routing rule, of
/// any family that [`LayerRouter`](marlinspike::w4a8::LayerRouter) has, is part of the layer. A clone
/// shares the weights.
#[derive(Debug, Clone)]
pub struct Int4Experts(Arc<Experts>);

#[derive(Debug)]
struct Experts {
    module: String,
    layer: MoeLayer<'static>,
}

impl Int4Experts {
    /// The experts of a packed layer. `module` names them in errors.
    ///
    /// # Errors
    /// [`Error::Rank`] for a layer with an expert map, whose output is one rank's part of a sum.
    pub fn new(module: impl Into<String>, layer: MoeLayer<'static>) -> Result<Self> {
        let module = module.into();
        if layer.config().expert_map.is_some() {
            return Err(Error::Rank { place: module });
        }
        Ok(Self(Arc::new(Experts { module, layer })))
    }

    /// The layer's name in errors.
    pub fn module(&self) -> &str {
        &self.0.module
    }

    /// H.
    pub fn hidden_size(&self) -> usize {
        self.layer().hidden_size()
    }

    /// E.
    pub fn num_experts(&self) -> usize {
        self.layer().config().num_experts
    }

    /// Experts per token.
    pub fn top_k(&self) -> usize {
        self.layer().config().router.top_k()
    }

    /// The packed layer.
    pub fn layer(&self) -> &MoeLayer<'static> {
        &self.0.layer
    }

    /// The weighted sum over each token's experts, `[.., H]`, of hidden states `x` `[.., H]` and router
    /// logits `[.., E]`, which may have different types. `x` and the output are as
    /// [`Int4Linear`](crate::Int4Linear)'s: the bits of [`MoeLayer::forward`].
    ///
    /// # Errors
    /// [`Error`], wrapped, that names the tensor of another shape, type or device, or the logit that is
    /// not finite.
    pub fn forward(&self, x: &Tensor, router_logits: &Tensor) -> candle_core::Result<Tensor> {
        let module = self.module();
        Argument { module, tensor: "x" }.check(x, self.hidden_size())?;
        let logits = Argument { module, tensor: "router_logits" };
        logits.check(router_logits, self.num_experts())?;
        let lead = &x.dims()[..x.rank() - 1];
        if router_logits.dims()[..router_logits.rank() - 1] != *lead {
            let expected = [lead, &[self.num_experts()]].concat();
            return Err(logits.shape(router_logits, format!("{expected:?}")).into());
        }
        apply_routed(&self.0, x, router_logits)
    }
}

impl RoutedLayer for Experts {
    fn module(&self) -> &str {
        &self.module
    }

    fn run(
        &self,
        x: FloatView2<'_>,
        logits: ArrayView2<'_, f32>,
        out: FloatViewMut2<'_>,
    ) -> marlinspike::Result<()> {
        with_workspaces(|w| self.layer.forward(x, logits, &mut w.experts, out))
    }
}

/// The product of a router, `[.., H]` to logits `[.., E]`.
///
/// Sums are f32. Each step (product, bias, soft cap) is rounded to the type of `x`, as checkpoints of
/// that type compute logits, unless the family's router multiplies in f32.
#[derive(Debug, Clone)]
pub struct Router {
    linear: DenseLinear,
    is_f32: bool,
    softcap: Option<f32>,
}

impl Router {
    /// A router with a weight `[E, H]` and an optional bias.
    pub fn new(linear: DenseLinear) -> Self {
        Self { linear, is_f32: false, softcap: None }
    }

    /// Whether logits stay f32, as DeepSeek's and GLM's do.
    pub fn with_f32_logits(self, is_f32: bool) -> Self {
        Self { is_f32, ..self }
    }

    /// The soft cap c of c · tanh(logit / c), as Grok's.
    pub fn with_softcap(self, softcap: Option<f32>) -> Self {
        Self { softcap, ..self }
    }

    /// The product.
    pub fn linear(&self) -> &DenseLinear {
        &self.linear
    }
}

impl Module for Router {
    /// Logits in F32.
    ///
    /// # Errors
    /// As [`DenseLinear`]'s.
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let logits = self.linear.wide(&widened(x)?)?;
        let ty = if self.is_f32 || x.dtype() == DType::F16 { DType::F32 } else { x.dtype() };
        let rounded = |t: Tensor| t.to_dtype(ty)?.to_dtype(DType::F32);
        let logits = rounded(logits)?;
        match self.softcap {
            None => Ok(logits),
            Some(cap) => {
                let capped = crate::shared::elementwise(self.linear.module(), &logits, move |l| {
                    cap * math::tanh(l / cap)
                })?;
                rounded(capped)
            }
        }
    }
}
