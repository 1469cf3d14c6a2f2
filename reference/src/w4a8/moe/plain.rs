//! What formats other than int4 share: their layers' checks, and the definition of a layer by products
//! of unpacked weights, without the engine.

use std::collections::BTreeMap;

use super::layer::{Experts, LayerOf, gated};
use super::{Mode, MoeConfig, check_routed};
use crate::moe::layer::Routed;
use crate::w4a8::{LayerRouter, Values};
use crate::{Error, Result};

#[allow(private_bounds, reason = "the formats are this crate's")]
impl<'a, S: Experts<'a, Kernel = K>, K: ?Sized> LayerOf<'a, S, K> {
    /// A layer of the format `title` without refusals of upstream, router weights on the output.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an activation that the engine lacks, and for router weights on the
    /// input; [`Error::Size`], [`Error::Shape`] and [`Error::Value`] naming the part that does not agree.
    pub(in crate::w4a8) fn weighted_output(
        title: &str,
        [w13, w2]: [S; 2],
        config: MoeConfig<'a>,
    ) -> Result<Self> {
        let kind = gated(&config.router, config.activation)?;
        let by_rule = match &config.router {
            LayerRouter::Operator(_) => false,
            LayerRouter::Family(family) => family.rule().apply_router_weight_on_input,
        };
        if by_rule || config.router_weight_on_input {
            let what = format!("{title} experts with router weights on the input");
            return Err(Error::unsupported(what, "expected them on the output"));
        }
        let (gate_up, down) = (w13.shape(), w2.shape());
        if gate_up.size_n != 2 * down.size_k {
            let expected = format!("[{}, {}], twice K of w2", gate_up.size_k, 2 * down.size_k);
            return Err(Error::shape("w13", &[gate_up.size_k, gate_up.size_n], expected));
        }
        if down.size_n != gate_up.size_k {
            let expected = format!("[{}, {}], K of w13", down.size_k, gate_up.size_k);
            return Err(Error::shape("w2", &[down.size_k, down.size_n], expected));
        }
        Self::of([w13, w2], MoeConfig { mode: Mode::Extended, ..config }, kind)
    }

    /// `[M, H]` of `x` `[M, H]`, in its type, for given experts and weights; expert −1 is none.
    /// `linear` is the product of rows with a matrix of w13 or w2, in the type of the rows.
    ///
    /// Gate and up, the activated rows and the rows of down are rounded to the type of `x`. Weighted rows
    /// are added in f32, in the order of experts, and the sum is rounded once.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::Value`] for inputs, ids and weights that do not agree.
    pub(in crate::w4a8) fn plain(
        &self,
        x: &Values,
        routed: Routed<'_>,
        linear: impl Fn(&Values, &S, usize) -> Result<Values>,
    ) -> Result<Values> {
        check_routed(routed, self.config.num_experts, Mode::Extended)?;
        let (h, i) = (self.hidden_size(), self.intermediate_size());
        let (tokens, ty) = (routed.topk_ids.len() / routed.top_k, x.ty());
        if x.len() != tokens * h {
            return Err(Error::shape("x", &[x.len()], format!("[{tokens}, {h}]")));
        }
        let mut slots = BTreeMap::<usize, Vec<usize>>::new();
        for (slot, &id) in routed.topk_ids.iter().enumerate() {
            if let Ok(expert) = usize::try_from(id) {
                slots.entry(expert).or_default().push(slot);
            }
        }
        let (x, mut sums) = (x.to_f32(), vec![0f32; tokens * h]);
        for (expert, slots) in slots {
            let local = match self.config.expert_map.as_deref() {
                None => Some(expert),
                Some(map) => usize::try_from(map[expert]).ok(),
            };
            let Some(local) = local else { continue };
            let row = |slot: usize| &x[slot / routed.top_k * h..][..h];
            let rows: Vec<f32> = slots.iter().flat_map(|&slot| row(slot).to_vec()).collect();
            let rows = Values::from_f32(rows, ty)?;
            let gate_up = linear(&rows, &self.w13, local)?;
            let activated = self.kind().apply(&gate_up, i)?;
            let down = linear(&activated, &self.w2, local)?.to_f32();
            for (&slot, row) in slots.iter().zip(down.chunks_exact(h)) {
                let sums = &mut sums[slot / routed.top_k * h..][..h];
                for (sum, y) in sums.iter_mut().zip(row) {
                    *sum += y * routed.topk_weights[slot];
                }
            }
        }
        Values::from_f32(sums, ty)
    }
}
