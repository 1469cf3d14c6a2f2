//! The experts of gpt-oss: MXFP4 gate, up and down with biases, on the engine of the int4 layer.
//!
//! Gate and up are halves of w13; [`Mxfp4Layout::pack`](crate::layouts::mxfp4::Mxfp4Layout::pack)
//! separates the interleaved rows of checkpoints. Rows of down, with their bias, are multiplied by the
//! router weights in f32 and added from zero in the order of experts; the sum is rounded once.

use ndarray::{Array2, ArrayView2};

use super::fastest;
use super::kernel::{Kernel, Mxfp4};
use crate::layouts::mxfp4::Mxfp4Stack;
use crate::moe::ScoringFunc;
use crate::moe::activation::Activation;
use crate::moe::layer::Routed;
use crate::moe::router::Router;
use crate::num::array::FloatView2;
use crate::num::array_mut::FloatViewMut2;
use crate::num::tensor::Tensor;
use crate::w4a8::LayerRouter;
use crate::w4a8::moe::{
    GatedActivation, Mode, Parts, Workspace, check_expert_map, check_routed, checked_logits, gated,
};
use crate::w4a8::rows::slices;
use crate::{Error, Result};

/// The configuration of a layer, without its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Mxfp4Config<'a> {
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Global to local expert, −1 for those of other ranks; absent: all experts are local.
    pub expert_map: Option<Vec<i32>>,
    /// The router: logits to experts and weights. gpt-oss: softmax, renormalized.
    pub router: LayerRouter<'a>,
    /// Activation between the products. gpt-oss: [`Activation::SwigluOai`].
    pub activation: Activation,
}

/// One rank's layer, ready to run.
#[derive(Debug)]
pub struct Mxfp4Layer<'a> {
    w13: Mxfp4Stack<'a>,
    w2: Mxfp4Stack<'a>,
    config: Mxfp4Config<'a>,
    kind: GatedActivation,
    kernel: Box<dyn Kernel>,
}

impl<'a> Mxfp4Layer<'a> {
    /// Gate and up `w13` `[H, 2I]` and down `w2` `[I, H]` of this rank's experts, run by the fastest
    /// kernel of this CPU.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an activation that the engine lacks; [`Error::Size`],
    /// [`Error::Shape`] and [`Error::Value`] naming the part that does not agree.
    pub fn new(w13: Mxfp4Stack<'a>, w2: Mxfp4Stack<'a>, config: Mxfp4Config<'a>) -> Result<Self> {
        let kind = gated(&config.router, config.activation)?;
        if let LayerRouter::Family(family) = &config.router
            && family.rule().apply_router_weight_on_input
        {
            let what = "MXFP4 experts with router weights on the input";
            return Err(Error::unsupported(what, "expected them on the output"));
        }
        let (gate_up, down) = (w13.layout().shape(), w2.layout().shape());
        if gate_up.size_n != 2 * down.size_k {
            let expected = format!("[{}, {}], twice K of w2", gate_up.size_k, 2 * down.size_k);
            return Err(Error::shape("w13", &[gate_up.size_k, gate_up.size_n], expected));
        }
        if down.size_n != gate_up.size_k {
            let expected = format!("[{}, {}], K of w13", down.size_k, gate_up.size_k);
            return Err(Error::shape("w2", &[down.size_k, down.size_n], expected));
        }
        if w13.count() != w2.count() {
            let found = format!("{} of w13, {} of w2", w13.count(), w2.count());
            return Err(Error::size("experts", found, "as many of each, 1 or more"));
        }
        check_expert_map(config.num_experts, config.expert_map.as_deref(), w13.count())?;
        // Checks sizes and bias; logits are checked in each call.
        config.router.validate(Array2::zeros((0, config.num_experts)).view())?;
        Ok(Self { w13, w2, config, kind, kernel: fastest() })
    }

    /// The experts of a checkpoint of gpt-oss, packed on rayon's current pool. `tensor` returns a tensor of
    /// the experts' module by the rest of its name (`gate_up_proj_blocks`); all experts are local, and
    /// each token has `top_k` of them.
    ///
    /// # Errors
    /// Those of `tensor`; as [`Mxfp4Stack::from_checkpoint`] and [`Mxfp4Layer::new`].
    pub fn from_checkpoint<'t>(
        tensor: impl Fn(&str) -> Result<Tensor<'t>>,
        top_k: usize,
    ) -> Result<Mxfp4Layer<'static>> {
        let stack = |name: &str, interleaved| {
            let part = |end: &str| tensor(&format!("{name}_{end}"));
            let (blocks, scales, bias) = (part("blocks")?, part("scales")?, part("bias")?);
            Mxfp4Stack::from_checkpoint(&blocks, &scales, Some(&bias), interleaved)
        };
        let (w13, w2) = (stack("gate_up_proj", true)?, stack("down_proj", false)?);
        let config = Mxfp4Config {
            num_experts: w13.count(),
            expert_map: None,
            router: Router::new(ScoringFunc::Softmax, top_k, true).into(),
            activation: Activation::SwigluOai,
        };
        Mxfp4Layer::new(w13, w2, config)
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
    pub fn w13(&self) -> &Mxfp4Stack<'a> {
        &self.w13
    }

    /// Down.
    pub fn w2(&self) -> &Mxfp4Stack<'a> {
        &self.w2
    }

    /// The layer's configuration.
    pub fn config(&self) -> &Mxfp4Config<'a> {
        &self.config
    }

    /// The activation between the products.
    pub fn kind(&self) -> GatedActivation {
        self.kind
    }

    pub(super) fn kernel(&self) -> &dyn Kernel {
        self.kernel.as_ref()
    }

    /// A workspace for calls of up to `max_tokens` tokens of either type.
    pub fn workspace(&self, max_tokens: usize) -> Workspace {
        let top_k = self.config.router.top_k();
        self.with_parts(|parts| Workspace::for_parts(parts, top_k, max_tokens))
    }

    /// `out` `[M, H]` of `x` `[M, H]` and `router_logits` `[M, num_experts]`.
    ///
    /// # Errors
    /// As [`Mxfp4Layer::forward_routed`]; [`Error::Shape`] and [`Error::Value`] for the logits. On an
    /// error `out` is unchanged.
    pub fn forward<'x, 'o>(
        &self,
        x: impl Into<FloatView2<'x>>,
        router_logits: ArrayView2<'_, f32>,
        workspace: &mut Workspace,
        out: impl Into<FloatViewMut2<'o>>,
    ) -> Result<()> {
        let (experts, router) = (self.config.num_experts, &self.config.router);
        let tokens = router_logits.nrows();
        let router_logits = checked_logits(router, router_logits, experts)?;
        let (x, out) = slices(x.into(), out.into(), tokens, [self.hidden_size(); 2])?;
        let (routed, buffers) = workspace.route(router, &router_logits, experts);
        self.with_parts(|parts| parts.blocks(x, routed, buffers, out));
        Ok(())
    }

    /// `out` `[M, H]` of `x` `[M, H]` for given experts and weights; expert −1 is none.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::Value`] for inputs, ids and weights that do not agree;
    /// [`Error::Unsupported`] if `x` and `out` differ in type or are f16; [`Error::NotContiguous`] for
    /// other strides than row-major ones. On an error `out` is unchanged.
    pub fn forward_routed<'x, 'o>(
        &self,
        x: impl Into<FloatView2<'x>>,
        routed: Routed<'_>,
        workspace: &mut Workspace,
        out: impl Into<FloatViewMut2<'o>>,
    ) -> Result<()> {
        check_routed(routed, self.config.num_experts, Mode::Extended)?;
        let tokens = routed.topk_ids.len() / routed.top_k;
        let (x, out) = slices(x.into(), out.into(), tokens, [self.hidden_size(); 2])?;
        let buffers = &mut workspace.buffers;
        self.with_parts(|parts| parts.blocks(x, routed, buffers, out));
        Ok(())
    }

    fn with_parts<R>(&self, work: impl FnOnce(&Parts<'_>) -> R) -> R {
        let (w13, w2) = (self.matrices(&self.w13), self.matrices(&self.w2));
        work(&Parts {
            w13: &w13,
            w2: &w2,
            num_experts: self.config.num_experts,
            expert_map: self.config.expert_map.as_deref(),
            kind: self.kind,
            router_weight_on_input: false,
        })
    }

    fn matrices<'l>(&'l self, stack: &'l Mxfp4Stack<'_>) -> Mxfp4<'l> {
        Mxfp4 { layout: stack.layout(), bytes: stack.bytes(), kernel: self.kernel.as_ref() }
    }
}
