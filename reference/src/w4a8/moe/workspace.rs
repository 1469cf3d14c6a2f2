//! The memory of forward calls.

use super::buckets::Buckets;
use super::parts::Parts;
use super::route::{Choice, route};
use crate::moe::layer::Routed;
use crate::w4a8::LayerRouter;
use crate::w4a8::buffer::{PanelBuffer, grow};
use crate::w4a8::gather::Gathered;
use crate::w4a8::parallel::{Wide, for_parts};
use crate::w4a8::runs::BLOCK;

/// The buffers of [`MoeLayer::forward`](super::MoeLayer::forward). They grow as needed and are reused, so calls with no more
/// tokens than before allocate nothing.
#[derive(Debug, Clone, Default)]
pub struct Workspace {
    /// Routing: `[T, top_k]` each, and `[T][2 · experts]`.
    pub(super) topk_ids: Vec<i32>,
    pub(super) topk_weights: Vec<f32>,
    pub(super) scores: Vec<f32>,
    pub(in crate::w4a8) buffers: Buffers,
}

/// The buffers of the products, for a block of tokens.
#[derive(Debug, Clone, Default)]
pub(in crate::w4a8) struct Buffers {
    /// Slots by expert.
    pub(super) buckets: Buckets,
    /// The quantized tokens, in panels of one row.
    pub(super) tokens: PanelBuffer,
    /// Input of w13, a row per slot.
    pub(super) input: PanelBuffer,
    /// The activated rows, in one of the two types: see [`super::engine`].
    pub(super) activated_f32: Vec<f32>,
    pub(super) activated_bf16: Vec<u16>,
    /// Input of w2, a row per slot.
    pub(super) inner: PanelBuffer,
    /// Rows in the order of w13's and w2's rows, where these have one.
    pub(super) gathered: Gathered,
    /// Sums of the tokens' rows, `[run of columns][T][width]`.
    pub(super) sums: Vec<f32>,
}

impl Workspace {
    /// A workspace for calls of up to `max_tokens` tokens of either type on `layer`.
    pub(super) fn for_parts(layer: &Parts<'_>, top_k: usize, max_tokens: usize) -> Self {
        let mut workspace = Self::default();
        workspace.reserve_routing(max_tokens, layer.num_experts, top_k);
        let buffers = &mut workspace.buffers;
        buffers.reserve(layer, max_tokens, top_k);
        let size = max_tokens.min(BLOCK) * top_k * layer.intermediate_size();
        grow(&mut buffers.activated_f32, size);
        grow(&mut buffers.activated_bf16, size);
        let widths = [layer.w13, layer.w2].map(|w| w.order(0).map_or(0, <[_]>::len));
        buffers.gathered.reserve(max_tokens.min(BLOCK) * top_k * widths[0].max(widths[1]));
        workspace
    }

    /// The experts and weights of each row of `router_logits` `[tokens, experts]`, which the router has
    /// accepted; and the other buffers.
    pub(in crate::w4a8) fn route(
        &mut self,
        router: &LayerRouter<'_>,
        router_logits: &[f32],
        experts: usize,
    ) -> (Routed<'_>, &mut Buffers) {
        let (tokens, top_k) = (router_logits.len() / experts, router.top_k());
        self.reserve_routing(tokens, experts, top_k);
        let Workspace { topk_ids, topk_weights, scores, buffers } = self;
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
                let logits = &logits[token * experts..][..experts];
                match router {
                    LayerRouter::Operator(router) => route(router, logits, choice),
                    LayerRouter::Family(routing) => choice.by_family(routing, logits),
                }
            });
        }
        (Routed { top_k, topk_ids, topk_weights }, buffers)
    }

    pub(super) fn reserve_routing(&mut self, tokens: usize, experts: usize, top_k: usize) {
        grow(&mut self.topk_ids, tokens * top_k);
        grow(&mut self.topk_weights, tokens * top_k);
        grow(&mut self.scores, tokens.min(BLOCK) * 2 * experts);
    }
}

impl Buffers {
    /// All but the activations.
    pub(super) fn reserve(&mut self, layer: &Parts<'_>, tokens: usize, top_k: usize) {
        let tokens = tokens.min(BLOCK);
        let slots = tokens * top_k;
        self.buckets.reserve(slots, layer.num_experts);
        let [w13, w2] = [layer.w13.rows(), layer.w2.rows()];
        self.tokens.reserve(tokens, w13);
        self.input.reserve(slots, w13);
        self.inner.reserve(slots, w2);
        grow(&mut self.sums, tokens * layer.hidden_size());
    }
}
