//! A layer of experts, whatever the format of its weights.

use std::borrow::Cow;
use std::fmt::Debug;

use ndarray::ArrayView2;

use super::layer::{Experts, LayerOf, admit};
use super::{GatedActivation, Layer, Mode, MoeConfig, MoeLayer, Workspace};
use crate::layouts::cpu::CpuFormat;
use crate::moe::layer::Routed;
use crate::num::array::FloatView2;
use crate::num::array_mut::FloatViewMut2;
use crate::num::scalar::ScalarType;
use crate::w4a8::matrices::Packed;
use crate::w4a8::packed::PackedStack;
use crate::w4a8::quantize::ActivationRounding;
use crate::w4a8::scalar::Scalar;
use crate::w4a8::stored::MoeDescription;
use crate::w4a8::{LayerRouter, Values};
use crate::{Error, Result};

/// How a stored layer runs.
#[derive(Debug, Clone, Copy)]
pub struct ExpertOptions<'o> {
    /// Int4: rounding of quantized activations. The other formats define their own.
    pub rounding: ActivationRounding,
    /// Int4: whether upstream's refusals apply.
    pub mode: Mode,
    /// A kernel by name; absent: the fastest of this CPU.
    pub kernel: Option<&'o str>,
}

/// One rank's experts, ready to run. Every kernel gives the bits of [`ExpertLayer::definition`].
pub trait ExpertLayer: Debug + Send + Sync {
    /// H.
    fn hidden_size(&self) -> usize;

    /// I.
    fn intermediate_size(&self) -> usize;

    /// Experts of all ranks.
    fn num_experts(&self) -> usize;

    /// Global to local expert, −1 for those of other ranks; absent: all experts are local.
    fn expert_map(&self) -> Option<&[i32]>;

    /// The router: logits to experts and weights.
    fn router(&self) -> &LayerRouter<'_>;

    /// The activation between the products.
    fn activation(&self) -> GatedActivation;

    /// The kernel's name.
    fn kernel_name(&self) -> &'static str;

    /// Buffers for calls of up to `max_tokens` tokens.
    fn workspace(&self, max_tokens: usize) -> Workspace;

    /// `out` `[M, H]` of `x` `[M, H]` and `router_logits` `[M, num_experts]`.
    ///
    /// # Errors
    /// As [`ExpertLayer::forward_routed`]; [`Error::Shape`] and [`Error::Value`] for the logits. On an
    /// error `out` is unchanged.
    fn forward(
        &self,
        x: FloatView2<'_>,
        router_logits: ArrayView2<'_, f32>,
        workspace: &mut Workspace,
        out: FloatViewMut2<'_>,
    ) -> Result<()>;

    /// `out` `[M, H]` of `x` `[M, H]` for given experts and weights; expert −1 is none.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::Value`] for inputs, ids and weights that do not agree;
    /// [`Error::Unsupported`] if `x` and `out` differ in type or are f16; [`Error::NotContiguous`] for
    /// other strides than row-major ones. On an error `out` is unchanged.
    fn forward_routed(
        &self,
        x: FloatView2<'_>,
        routed: Routed<'_>,
        workspace: &mut Workspace,
        out: FloatViewMut2<'_>,
    ) -> Result<()>;

    /// `[M, H]` of `x` `[M, H]` by the scalar definition, value by value.
    ///
    /// # Errors
    /// As [`ExpertLayer::forward_routed`].
    fn definition(&self, x: &Values, routed: Routed<'_>) -> Result<Values>;
}

/// A layer of a description and the bytes of w13 and w2.
type Load = for<'a> fn(
    MoeDescription,
    [Cow<'a, [u8]>; 2],
    ExpertOptions<'_>,
) -> Result<Box<dyn ExpertLayer + 'a>>;

/// What runs the experts of a format.
pub(in crate::w4a8) struct Engine {
    pub(in crate::w4a8) format: &'static CpuFormat,
    /// Names of the kernels that this CPU supports, slowest first.
    pub(in crate::w4a8) kernels: fn() -> Vec<&'static str>,
    pub(in crate::w4a8) load: Load,
}

/// Names of the kernels that this CPU supports, slowest first.
pub(in crate::w4a8) fn kernel_names<P: Packed>() -> Vec<&'static str> {
    P::kernels().iter().map(|kernel| P::kernel_name(kernel)).collect()
}

/// [`Engine::load`] of a format.
pub(in crate::w4a8) fn load<'a, S: Experts<'a>>(
    described: MoeDescription,
    bytes: [Cow<'a, [u8]>; 2],
    options: ExpertOptions<'_>,
) -> Result<Box<dyn ExpertLayer + 'a>> {
    let kernel = named_kernel::<S>(options.kernel)?;
    let experts = S::read(&described, bytes)?;
    let layer = LayerOf::described_experts(described, experts, options.rounding, options.mode)?;
    Ok(Box::new(layer.with_kernel(kernel)))
}

/// The kernel of this name; the fastest without one.
///
/// # Errors
/// [`Error::Size`] naming the known kernels.
pub(in crate::w4a8) fn named_kernel<P: Packed>(name: Option<&str>) -> Result<Box<P::Kernel>> {
    let Some(name) = name else { return Ok(P::fastest()) };
    let mut all = P::kernels();
    match all.iter().position(|kernel| P::kernel_name(kernel) == name) {
        Some(i) => Ok(all.swap_remove(i)),
        None => {
            let known = kernel_names::<P>();
            Err(Error::size("kernel", name, format!("one of {}", known.join(", "))))
        }
    }
}

impl<'a> Experts<'a> for PackedStack<'a> {
    fn count(&self) -> usize {
        self.count()
    }

    fn read(described: &MoeDescription, [w13, w2]: [Cow<'a, [u8]>; 2]) -> Result<[Self; 2]> {
        let w13 = Self::new("w13_packed", described.w13_layout()?, w13)?;
        Ok([w13, Self::new("w2_packed", described.w2_layout()?, w2)?])
    }

    fn layer([w13, w2]: [Self; 2], config: MoeConfig<'a>) -> Result<MoeLayer<'a>> {
        MoeLayer::new(w13, w2, config)
    }

    fn admit(config: &MoeConfig<'_>, dtype: ScalarType) -> Result<()> {
        admit(config, dtype)
    }

    fn definition(layer: &MoeLayer<'a>, x: &Values, routed: Routed<'_>) -> Result<Values> {
        let config = layer.config();
        let (w13, w2): (Vec<_>, Vec<_>) =
            (layer.w13().iter().collect(), layer.w2().iter().collect());
        let definition = Layer {
            w13: &w13,
            w2: &w2,
            num_experts: config.num_experts,
            expert_map: config.expert_map.as_deref(),
            activation: config.activation,
            rounding: config.rounding,
            router_weight_on_input: config.router_weight_on_input,
            mode: config.mode,
        };
        match &config.router {
            LayerRouter::Operator(_) => definition.forward(&Scalar, x, routed),
            LayerRouter::Family(_) => {
                definition.forward_activated(&Scalar, layer.kind(), x, routed)
            }
        }
    }
}

#[allow(private_bounds, reason = "the formats are this crate's")]
impl<'a, S: Experts<'a, Kernel = K>, K: ?Sized + Debug + Send + Sync> ExpertLayer
    for LayerOf<'a, S, K>
{
    fn hidden_size(&self) -> usize {
        self.hidden_size()
    }

    fn intermediate_size(&self) -> usize {
        self.intermediate_size()
    }

    fn num_experts(&self) -> usize {
        self.config().num_experts
    }

    fn expert_map(&self) -> Option<&[i32]> {
        self.config().expert_map.as_deref()
    }

    fn router(&self) -> &LayerRouter<'_> {
        &self.config().router
    }

    fn activation(&self) -> GatedActivation {
        self.kind()
    }

    fn kernel_name(&self) -> &'static str {
        S::kernel_name(self.kernel())
    }

    fn workspace(&self, max_tokens: usize) -> Workspace {
        self.workspace(max_tokens)
    }

    fn forward(
        &self,
        x: FloatView2<'_>,
        router_logits: ArrayView2<'_, f32>,
        workspace: &mut Workspace,
        out: FloatViewMut2<'_>,
    ) -> Result<()> {
        self.forward(x, router_logits, workspace, out)
    }

    fn forward_routed(
        &self,
        x: FloatView2<'_>,
        routed: Routed<'_>,
        workspace: &mut Workspace,
        out: FloatViewMut2<'_>,
    ) -> Result<()> {
        self.forward_routed(x, routed, workspace, out)
    }

    fn definition(&self, x: &Values, routed: Routed<'_>) -> Result<Values> {
        S::definition(self, x, routed)
    }
}
