//! The memory of forward calls.

use super::buckets::Buckets;
use super::layer::MoeLayer;
use crate::w4a8::buffer::{PanelBuffer, RowShape, grow};
use crate::w4a8::runs::BLOCK;

/// The buffers of [`MoeLayer::forward`]. They grow as needed and are reused, so calls with no more
/// tokens than before allocate nothing.
#[derive(Debug, Clone, Default)]
pub struct Workspace {
    /// Routing: `[T, top_k]` each, and `[T][2 · experts]`.
    pub(super) topk_ids: Vec<i32>,
    pub(super) topk_weights: Vec<f32>,
    pub(super) scores: Vec<f32>,
    pub(super) buffers: Buffers,
}

/// The buffers of the products, for a block of tokens.
#[derive(Debug, Clone, Default)]
pub(super) struct Buffers {
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
    /// Sums of the tokens' rows, `[run of columns][T][width]`.
    pub(super) sums: Vec<f32>,
}

impl Workspace {
    /// A workspace for calls of up to `max_tokens` tokens of either type on `layer`.
    pub fn for_tokens(layer: &MoeLayer<'_>, max_tokens: usize) -> Self {
        let mut workspace = Self::default();
        let (experts, top_k) = (layer.config().num_experts, layer.config().router.top_k);
        workspace.reserve_routing(max_tokens, experts, top_k);
        let buffers = &mut workspace.buffers;
        buffers.reserve(layer, max_tokens, top_k);
        let size = max_tokens.min(BLOCK) * top_k * layer.intermediate_size();
        grow(&mut buffers.activated_f32, size);
        grow(&mut buffers.activated_bf16, size);
        workspace
    }

    pub(super) fn reserve_routing(&mut self, tokens: usize, experts: usize, top_k: usize) {
        grow(&mut self.topk_ids, tokens * top_k);
        grow(&mut self.topk_weights, tokens * top_k);
        grow(&mut self.scores, tokens.min(BLOCK) * 2 * experts);
    }
}

impl Buffers {
    /// All but the activations.
    pub(super) fn reserve(&mut self, layer: &MoeLayer<'_>, tokens: usize, top_k: usize) {
        let tokens = tokens.min(BLOCK);
        let slots = tokens * top_k;
        self.buckets.reserve(slots, layer.config().num_experts);
        let [w13, w2] = [layer.w13(), layer.w2()].map(|w| RowShape::of(w.layout()));
        self.tokens.reserve(tokens, w13);
        self.input.reserve(slots, w13);
        self.inner.reserve(slots, w2);
        grow(&mut self.sums, tokens * layer.hidden_size());
    }
}
