//! The fast layer: the bits of [`Layer`](super::Layer), without allocations.
//!
//! A forward has five steps, each distributed over rayon's current pool:
//!
//! 1. Slots are sorted by expert ([`Buckets`]). Each token is quantized once and copied into the
//!    panels of its experts. With router weights on the input, each slot is quantized separately.
//! 2. An item is an expert and a run of I columns: gate and up of a panel, then their activation,
//!    while the run's weights stay in a core's cache.
//! 3. The activated rows are quantized into panels.
//! 4. An item is a run of H columns: it visits the experts in ascending order and adds their weighted
//!    rows to its columns of the sums.
//! 5. Sums become rows of the output.
//!
//! No `[M, 2I]` and no `[slots, H]` array is written, and the division of work does not change the
//! order of additions. The items of step 2 store the activated rows as
//! `[expert][run][row][column of the run]`.

use super::activation::Kind;
use super::buckets::Buckets;
use super::refusal::{Mode, Refusal, Settings};
use super::route::{Choice, route};
use super::workspace::{Buffers, Workspace};
use super::{check_expert_map, steps};
use crate::layout::kleidi::PackedStack;
use crate::moe::activation::Activation;
use crate::moe::layer::Routed;
use crate::moe::router::Router;
use crate::scalar::ScalarType;
use crate::w4a8::buffer::grow;
use crate::w4a8::parallel::{Wide, for_parts};
use crate::w4a8::quantize::ActivationRounding;
use crate::w4a8::rows::{Element, Rows, RowsMut};
use crate::w4a8::runs::{BLOCK, Runs};
use crate::w4a8::{Kernel, fastest};
use crate::{Error, Result};

/// The configuration of a layer, without its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig<'a> {
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Global to local expert, −1 for those of other ranks; absent: all experts are local.
    pub expert_map: Option<Vec<i32>>,
    /// The router: logits to experts and weights.
    pub router: Router<'a>,
    /// Activation between the products.
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
    w13: PackedStack<'a>,
    w2: PackedStack<'a>,
    config: MoeConfig<'a>,
    kind: Kind,
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
        let refused = Refusal::Activation { found: config.activation };
        let kind = Kind::of(config.activation).ok_or(refused)?;
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
        layer.config.router.validate(&[], layer.config.num_experts)?;
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

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// Checks `dtype` against upstream's refusals.
    fn admit(&self, dtype: ScalarType) -> Result<()> {
        let settings = Settings {
            has_expert_map: self.config.expert_map.is_some(),
            use_grouped_topk: self.config.router.groups.is_some(),
            router_weight_on_input: self.config.router_weight_on_input,
            ..Settings::new(self.config.activation, dtype)
        };
        Ok(self.config.mode.admit(&settings)?)
    }

    /// `out` `[M, H]` of `x` `[M, H]` and `router_logits` `[M, num_experts]`, all row-major.
    ///
    /// # Errors
    /// As [`MoeLayer::forward_routed`]; [`Error::Shape`] and [`Error::Value`] for the logits. On an
    /// error `out` is unchanged.
    pub fn forward(
        &self,
        x: Rows<'_>,
        router_logits: &[f32],
        workspace: &mut Workspace,
        out: RowsMut<'_>,
    ) -> Result<()> {
        let (experts, router) = (self.config.num_experts, &self.config.router);
        router.validate(router_logits, experts)?;
        let (tokens, top_k) = (router_logits.len() / experts, router.top_k);
        self.check(x, tokens, &out)?;
        workspace.reserve_routing(tokens, experts, top_k);
        let Workspace { topk_ids, topk_weights, scores, buffers } = workspace;
        let (topk_ids, topk_weights) =
            (&mut topk_ids[..tokens * top_k], &mut topk_weights[..tokens * top_k]);
        let blocks = topk_ids.chunks_mut(BLOCK * top_k);
        let blocks = blocks.zip(topk_weights.chunks_mut(BLOCK * top_k));
        for (logits, (ids, weights)) in router_logits.chunks(BLOCK * experts).zip(blocks) {
            let block = logits.len() / experts;
            let parts = (
                Wide { values: ids, width: top_k },
                (
                    Wide { values: weights, width: top_k },
                    Wide { values: &mut scores[..block * 2 * experts], width: 2 * experts },
                ),
            );
            for_parts(0..block, parts, 4096 / experts, &|token| token, &|token, (ids, rest)| {
                let (topk_weights, scratch) = (rest.0.values, rest.1.values);
                let choice = Choice { topk_ids: ids.values, topk_weights, scratch };
                route(router, &logits[token * experts..][..experts], choice);
            });
        }
        let routed = Routed { top_k, topk_ids, topk_weights };
        self.blocks(x, routed, buffers, out);
        Ok(())
    }

    /// `out` `[M, H]` of `x` `[M, H]` for given experts and weights.
    ///
    /// # Errors
    /// The [`Refusal`] as [`Error::Unsupported`] (of the activations' type); [`Error::Shape`] and
    /// [`Error::Value`] for inputs, ids and weights that do not agree; [`Error::Unsupported`] if `x`
    /// and `out` differ in type. On an error `out` is unchanged.
    pub fn forward_routed(
        &self,
        x: Rows<'_>,
        routed: Routed<'_>,
        workspace: &mut Workspace,
        out: RowsMut<'_>,
    ) -> Result<()> {
        super::check_routed(routed, self.config.num_experts, self.config.mode)?;
        self.check(x, routed.topk_ids.len() / routed.top_k, &out)?;
        self.blocks(x, routed, &mut workspace.buffers, out);
        Ok(())
    }

    fn check(&self, x: Rows<'_>, tokens: usize, out: &RowsMut<'_>) -> Result<()> {
        self.admit(x.ty())?;
        for (name, len) in [("x", x.len()), ("out", out.len())] {
            if Some(len) != tokens.checked_mul(self.hidden_size()) {
                let expected = format!("[{tokens}, {}]", self.hidden_size());
                return Err(Error::shape(name, &[len], expected));
            }
        }
        if x.ty() != out.ty() {
            let what = format!("{} output of {} activations", out.ty(), x.ty());
            return Err(Error::unsupported(what, "the output has the activations' type"));
        }
        Ok(())
    }

    /// Processes block after block; the inputs have been checked.
    fn blocks(&self, x: Rows<'_>, routed: Routed<'_>, buffers: &mut Buffers, out: RowsMut<'_>) {
        buffers.reserve(self, routed.topk_ids.len() / routed.top_k, routed.top_k);
        match (x, out, self.config.router_weight_on_input) {
            (Rows::F32(x), RowsMut::F32(out), _) => {
                self.typed::<f32, f32>(x, routed, buffers, out);
            }
            // Router weights are f32, and so is the input that they multiply.
            (Rows::Bf16(x), RowsMut::Bf16(out), true) => {
                self.typed::<u16, f32>(x, routed, buffers, out);
            }
            (Rows::Bf16(x), RowsMut::Bf16(out), false) => {
                self.typed::<u16, u16>(x, routed, buffers, out);
            }
            _ => unreachable!("types that differ have been refused"),
        }
    }

    /// `X` is the type of input and output, `A` that of everything up to the sum.
    fn typed<X: Element, A: Element>(
        &self,
        x: &[X],
        routed: Routed<'_>,
        buffers: &mut Buffers,
        out: &mut [X],
    ) {
        let (h, top_k) = (self.hidden_size(), routed.top_k);
        let blocks = x.chunks(BLOCK * h).zip(out.chunks_mut(BLOCK * h));
        for (block, (x, out)) in blocks.enumerate() {
            let slots = block * BLOCK * top_k..block * BLOCK * top_k + x.len() / h * top_k;
            let routed = Routed {
                top_k,
                topk_ids: &routed.topk_ids[slots.clone()],
                topk_weights: &routed.topk_weights[slots],
            };
            self.block::<X, A>(x, routed, buffers, out);
        }
    }

    fn block<X: Element, A: Element>(
        &self,
        x: &[X],
        routed: Routed<'_>,
        buffers: &mut Buffers,
        out: &mut [X],
    ) {
        let Buffers { buckets, tokens, input, activated_f32, activated_bf16, inner, sums } =
            buffers;
        let map = self.config.expert_map.as_deref();
        buckets.fill(routed.topk_ids, self.config.num_experts, |expert| match map {
            Some(map) => usize::try_from(map[expert]).ok(),
            None => Some(expert),
        });
        let buckets: &Buckets = buckets;
        steps::quantize_input(self, x, routed, buckets, tokens, input);
        let activated = A::of(activated_f32, activated_bf16);
        let size_i = self.intermediate_size();
        grow(activated, buckets.rows() * size_i);
        let activated = &mut activated[..buckets.rows() * size_i];
        let runs = Runs::activated(self.w13.layout(), size_i, buckets.even(), buckets.reuse());
        steps::gate_up(self, input, buckets, runs, activated);
        steps::quantize_inner(self, activated, buckets, runs, inner);
        let size_h = self.hidden_size();
        let runs = Runs::plain(self.w2.layout(), size_h, buckets.reuse());
        let sums = &mut sums[..out.len()];
        steps::down::<X, A>(self, inner, routed, buckets, runs, sums);
        runs.store(sums, out);
    }
}
