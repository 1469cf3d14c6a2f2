//! The experts of gpt-oss: e2m1 gate, up and down with biases, on the engine of the int4 layer.
//!
//! Gate and up are halves of w13; [`E2m1Layout::pack`](crate::layouts::e2m1::E2m1Layout::pack)
//! separates the interleaved rows of checkpoints. Rows of down, with their bias, are multiplied by the
//! router weights in f32 and added from zero in the order of experts; the sum is rounded once.

use std::borrow::Cow;

use super::Kernel;
use crate::Result;
use crate::layouts::CPU_E2M1;
use crate::layouts::e2m1::{E2m1Layout, E2m1Stack};
use crate::moe::ScoringFunc;
use crate::moe::activation::Activation;
use crate::moe::layer::Routed;
use crate::moe::router::Router;
use crate::num::tensor::Tensor;
use crate::w4a8::Values;
use crate::w4a8::moe::{Engine, Experts, LayerOf, Mode, MoeConfig, kernel_names, load};
use crate::w4a8::quantize::ActivationRounding;
use crate::w4a8::stored::MoeDescription;

/// Experts of e2m1 codes.
pub(in crate::w4a8) const ENGINE: Engine = Engine {
    format: &CPU_E2M1,
    kernels: kernel_names::<E2m1Stack<'_>>,
    load: |described, bytes, options| load::<E2m1Stack<'_>>(described, bytes, options),
};

/// One rank's layer of e2m1 experts, ready to run.
///
/// Of its configuration, the format defines the rounding of activations, and upstream has no refusals.
/// gpt-oss: softmax, renormalized, [`Activation::SwigluOai`].
pub type E2m1Layer<'a> = LayerOf<'a, E2m1Stack<'a>, dyn Kernel>;

impl<'a> E2m1Layer<'a> {
    /// Gate and up `w13` `[H, 2I]` and down `w2` `[I, H]` of this rank's experts, run by the fastest
    /// kernel of this CPU.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for an activation that the engine lacks, and for
    /// router weights on the input; [`Error::Size`](crate::Error::Size),
    /// [`Error::Shape`](crate::Error::Shape) and [`Error::Value`](crate::Error::Value) naming the part that
    /// does not agree.
    pub fn new(w13: E2m1Stack<'a>, w2: E2m1Stack<'a>, config: MoeConfig<'a>) -> Result<Self> {
        Self::weighted_output(CPU_E2M1.title, [w13, w2], config)
    }

    /// The experts of a checkpoint of gpt-oss, packed on rayon's current pool. `tensor` returns a tensor of
    /// the experts' module by the rest of its name (`gate_up_proj_blocks`); all experts are local, and
    /// each token has `top_k` of them.
    ///
    /// # Errors
    /// Those of `tensor`; as [`E2m1Stack::from_checkpoint`] and [`E2m1Layer::new`].
    pub fn from_checkpoint<'t>(
        tensor: impl Fn(&str) -> Result<Tensor<'t>>,
        top_k: usize,
    ) -> Result<E2m1Layer<'static>> {
        let stack = |name: &str, interleaved| {
            let part = |end: &str| tensor(&format!("{name}_{end}"));
            let (blocks, scales, bias) = (part("blocks")?, part("scales")?, part("bias")?);
            E2m1Stack::from_checkpoint(&blocks, &scales, Some(&bias), interleaved)
        };
        let (w13, w2) = (stack("gate_up_proj", true)?, stack("down_proj", false)?);
        let config = MoeConfig {
            num_experts: w13.count(),
            expert_map: None,
            router: Router::new(ScoringFunc::Softmax, top_k, true).into(),
            activation: Activation::SwigluOai,
            rounding: ActivationRounding::HalfEven,
            router_weight_on_input: false,
            mode: Mode::Extended,
        };
        E2m1Layer::new(w13, w2, config)
    }
}

impl<'a> Experts<'a> for E2m1Stack<'a> {
    fn count(&self) -> usize {
        self.count()
    }

    fn read(described: &MoeDescription, [w13, w2]: [Cow<'a, [u8]>; 2]) -> Result<[Self; 2]> {
        let [gate_up, down] = described.shapes()?;
        let w13 = Self::new("w13_packed", E2m1Layout::new(gate_up)?, w13)?;
        Ok([w13, Self::new("w2_packed", E2m1Layout::new(down)?, w2)?])
    }

    fn layer([w13, w2]: [Self; 2], config: MoeConfig<'a>) -> Result<E2m1Layer<'a>> {
        E2m1Layer::new(w13, w2, config)
    }

    fn definition(layer: &E2m1Layer<'a>, x: &Values, routed: Routed<'_>) -> Result<Values> {
        layer.definition(x, routed)
    }
}
