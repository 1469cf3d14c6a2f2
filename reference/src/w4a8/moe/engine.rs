//! The fast layer: the bits of [`Layer`](super::Layer), without allocations (a family's rule allocates
//! the choice of each token).
//!
//! A forward has five steps, each distributed over rayon's current pool:
//!
//! 1. Slots are sorted by expert ([`Buckets`]). Each token is quantized once and copied into the
//!    panels of its experts. With router weights on the input, and for experts with an order of rows
//!    (act-order), each slot is quantized separately.
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

use ndarray::ArrayView2;

use super::buckets::Buckets;
use super::layer::{Experts, LayerOf};
use super::parts::Parts;
use super::steps;
use super::workspace::{Buffers, Workspace};
use crate::Result;
use crate::moe::layer::Routed;
use crate::num::array::FloatView2;
use crate::num::array_mut::FloatViewMut2;
use crate::w4a8::buffer::grow;
use crate::w4a8::rows::{Element, Rows, RowsMut, slices};
use crate::w4a8::runs::{BLOCK, Runs};

#[allow(private_bounds, reason = "the formats are this crate's")]
impl<'a, S: Experts<'a, Kernel = K>, K: ?Sized> LayerOf<'a, S, K> {
    /// `out` `[M, H]` of `x` `[M, H]` and `router_logits` `[M, num_experts]`.
    ///
    /// # Errors
    /// As [`LayerOf::forward_routed`]; [`Shape`](crate::Error::Shape) and [`Value`](crate::Error::Value) for
    /// the logits. On an error `out` is unchanged.
    pub fn forward<'x, 'o>(
        &self,
        x: impl Into<FloatView2<'x>>,
        router_logits: ArrayView2<'_, f32>,
        workspace: &mut Workspace,
        out: impl Into<FloatViewMut2<'o>>,
    ) -> Result<()> {
        let (experts, router) = (self.config.num_experts, &self.config.router);
        let tokens = router_logits.nrows();
        let router_logits = super::checked_logits(router, router_logits, experts)?;
        let (x, out) = self.slices(x.into(), out.into(), tokens)?;
        let (routed, buffers) = workspace.route(router, &router_logits, experts);
        self.with_parts(|parts| parts.blocks(x, routed, buffers, out));
        Ok(())
    }

    /// `out` `[M, H]` of `x` `[M, H]` for given experts and weights.
    ///
    /// # Errors
    /// Int4: the [`Refusal`](super::Refusal) as [`Unsupported`](crate::Error::Unsupported) (of the activations' type);
    /// [`Shape`](crate::Error::Shape) and [`Value`](crate::Error::Value) for inputs, ids and weights that do not
    /// agree; `Unsupported` if `x` and `out` differ in type; [`NotContiguous`](crate::Error::NotContiguous) for
    /// other strides than row-major ones. On an error `out` is unchanged.
    pub fn forward_routed<'x, 'o>(
        &self,
        x: impl Into<FloatView2<'x>>,
        routed: Routed<'_>,
        workspace: &mut Workspace,
        out: impl Into<FloatViewMut2<'o>>,
    ) -> Result<()> {
        super::check_routed(routed, self.config.num_experts, self.config.mode)?;
        let tokens = routed.topk_ids.len() / routed.top_k;
        let (x, out) = self.slices(x.into(), out.into(), tokens)?;
        let buffers = &mut workspace.buffers;
        self.with_parts(|parts| parts.blocks(x, routed, buffers, out));
        Ok(())
    }

    /// `x` and `out` `[tokens, H]` as slices.
    fn slices<'x, 'o>(
        &self,
        x: FloatView2<'x>,
        out: FloatViewMut2<'o>,
        tokens: usize,
    ) -> Result<(Rows<'x>, RowsMut<'o>)> {
        S::admit(&self.config, x.scalar_type())?;
        slices(x, out, tokens, [self.hidden_size(); 2])
    }
}

/// A layer's products and what joins them, for any format of weights.
impl Parts<'_> {
    /// Processes block after block; the inputs have been checked.
    pub(in crate::w4a8) fn blocks(
        &self,
        x: Rows<'_>,
        routed: Routed<'_>,
        buffers: &mut Buffers,
        out: RowsMut<'_>,
    ) {
        buffers.reserve(self, routed.topk_ids.len() / routed.top_k, routed.top_k);
        match (x, out, self.router_weight_on_input) {
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
        let Buffers {
            buckets,
            tokens,
            input,
            activated_f32,
            activated_bf16,
            inner,
            gathered,
            sums,
        } = buffers;
        let map = self.expert_map;
        buckets.fill(routed.topk_ids, self.num_experts, |expert| match map {
            Some(map) => usize::try_from(map[expert]).ok(),
            None => Some(expert),
        });
        let buckets: &Buckets = buckets;
        steps::quantize_input(self, x, routed, buckets, (tokens, gathered), input);
        let activated = A::of(activated_f32, activated_bf16);
        let size_i = self.intermediate_size();
        grow(activated, buckets.rows() * size_i);
        let activated = &mut activated[..buckets.rows() * size_i];
        let runs =
            Runs::activated(self.w13.rows().padded_k, size_i, buckets.even(), buckets.reuse());
        steps::gate_up(self, input, buckets, runs, activated);
        steps::quantize_inner(self, activated, (buckets, runs), gathered, inner);
        let size_h = self.hidden_size();
        let runs = Runs::plain(self.w2.rows().padded_k, size_h, buckets.reuse());
        let sums = &mut sums[..out.len()];
        steps::down::<X, A>(self, inner, routed, buckets, runs, sums);
        runs.store(sums, out);
    }
}
