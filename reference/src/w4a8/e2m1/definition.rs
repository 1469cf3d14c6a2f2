//! The layer's definition: products of unpacked weights in plain loops, without the engine.

use std::collections::BTreeMap;

use super::moe::E2m1Layer;
use super::quantize_groups;
use super::scalar::product;
use crate::layouts::e2m1::{E2m1Rows, PackedE2m1};
use crate::moe::layer::Routed;
use crate::num::scalar::ScalarType;
use crate::w4a8::Values;
use crate::w4a8::moe::{Mode, check_routed};
use crate::{Error, Result};

impl E2m1Layer<'_> {
    /// `[M, H]` of `x` `[M, H]`, in its type, for given experts and weights; expert −1 is none.
    ///
    /// Gate and up, the activated rows and the rows of down are rounded to the type of `x`. Weighted rows
    /// are added in f32, in the order of experts, and the sum is rounded once.
    ///
    /// # Errors
    /// [`Error::Shape`] and [`Error::Value`] for inputs, ids and weights that do not agree.
    pub fn definition(&self, x: &Values, routed: Routed<'_>) -> Result<Values> {
        check_routed(routed, self.config().num_experts, Mode::Extended)?;
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
            let local = match self.config().expert_map.as_deref() {
                None => Some(expert),
                Some(map) => usize::try_from(map[expert]).ok(),
            };
            let Some(local) = local else { continue };
            let row = |slot: usize| &x[slot / routed.top_k * h..][..h];
            let rows: Vec<f32> = slots.iter().flat_map(|&slot| row(slot).to_vec()).collect();
            let rows = Values::from_f32(rows, ty)?;
            let gate_up = linear(&rows, &self.w13().get(local), ty)?;
            let activated = self.kind().apply(&gate_up, i)?;
            let down = linear(&activated, &self.w2().get(local), ty)?.to_f32();
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

/// The product with one matrix.
fn linear(x: &Values, weight: &PackedE2m1<'_>, ty: ScalarType) -> Result<Values> {
    let rows = quantize_groups(x, weight.layout().shape().size_k)?;
    let weight = weight.unpack();
    let parts =
        E2m1Rows { blocks: &weight.blocks, scales: &weight.scales, bias: Some(&weight.bias) };
    product(&rows, parts, ty)
}
