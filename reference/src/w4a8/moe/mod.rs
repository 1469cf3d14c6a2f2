//! The Mixture-of-Experts layer on the int4 path: upstream's `CompressedTensorsW4A8Int8MoEMethod`
//! and its operator `dynamic_4bit_int_moe` (vLLM 0.21.0).
//!
//! 1. Slots (token, j) are sorted into buckets by expert, stably.
//! 2. With `router_weight_on_input`, a slot's row is multiplied by its router weight. The product is
//!    f32 for every type of activations, and so is everything up to step 5.
//! 3. w13, the activation ([`GatedActivation`]), w2: each product quantizes its own rows.
//! 4. Without `router_weight_on_input`, the rows of w2 are multiplied by the router weights, in f32.
//! 5. Each token's rows are added from zero in the order of experts, in the activations' type.
//!
//! Upstream cannot add f32 rows to a bf16 tensor, so bf16 without `router_weight_on_input` fails there
//! ([`Refusal::WeightedBf16`]). [`Mode::Extended`] adds in f32 and rounds once. Rows are independent:
//! the number of threads, the batching of tokens and unused experts change no bit.

mod activation;
mod buckets;
mod engine;
mod experts;
mod layer;
mod load;
mod parts;
mod plain;
mod refusal;
mod route;
mod steps;
mod workspace;

pub use activation::GatedActivation;
pub use experts::{ExpertLayer, ExpertOptions};
pub use layer::{LayerOf, MoeConfig, MoeLayer};
pub use refusal::{Mode, Refusal, Settings};
pub use workspace::Workspace;

pub(super) use experts::{Engine, kernel_names, load, named_kernel};
pub(super) use layer::Experts;
pub(super) use load::ENGINE;

use std::borrow::Cow;

use ndarray::ArrayView2;
use rayon::prelude::*;

use super::{Kernel, LayerRouter, Values, linear};
use crate::moe::activation::Activation;
use crate::moe::layer::Routed;
use crate::num::array::row_major;
use crate::num::scalar::ScalarType;
use crate::num::scalar::round_to;
use crate::w4a8::packed::{PackedRhs, RhsLayout};
use crate::w4a8::quantize::ActivationRounding;
use crate::{Error, Result};

/// One rank's layer.
#[derive(Debug, Clone, Copy)]
pub struct Layer<'w> {
    /// Gate and up, `[H, 2I]`, of this rank's experts.
    pub w13: &'w [PackedRhs<'w>],
    /// Down, `[I, H]` each.
    pub w2: &'w [PackedRhs<'w>],
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Global to local expert, −1 for those of other ranks; absent: all experts are local.
    pub expert_map: Option<&'w [i32]>,
    /// Activation between the products.
    pub activation: Activation,
    /// Rounding of quantized activations.
    pub rounding: ActivationRounding,
    /// Whether router weights multiply the input instead of the output.
    pub router_weight_on_input: bool,
    /// Whether upstream's refusals apply.
    pub mode: Mode,
}

/// An expert's slots, ascending, as indices into the flattened `topk_ids`.
struct Bucket {
    local: usize,
    slots: Vec<usize>,
}

impl Layer<'_> {
    /// H.
    pub fn hidden_size(&self) -> usize {
        self.w13.first().map_or(0, |w| w.layout().shape().size_k)
    }

    /// I.
    pub fn intermediate_size(&self) -> usize {
        self.w2.first().map_or(0, |w| w.layout().shape().size_k)
    }

    /// Fails unless [`Layer::mode`] admits the layer and its parts agree.
    ///
    /// # Errors
    /// The [`Refusal`] as [`Error::Unsupported`]; [`Error::Size`], [`Error::Shape`] and
    /// [`Error::Value`] naming the part.
    pub fn validate(&self, dtype: ScalarType) -> Result<GatedActivation> {
        let settings = Settings {
            has_expert_map: self.expert_map.is_some(),
            router_weight_on_input: self.router_weight_on_input,
            ..Settings::new(self.activation, dtype)
        };
        self.mode.admit(&settings)?;
        let kind = GatedActivation::of(self.activation)
            .ok_or(Refusal::Activation { found: self.activation })?;
        self.check_parts()?;
        Ok(kind)
    }

    /// Fails unless the weights and the expert map agree.
    fn check_parts(&self) -> Result<()> {
        if self.w13.is_empty() || self.w13.len() != self.w2.len() {
            let found = format!("{} of w13, {} of w2", self.w13.len(), self.w2.len());
            return Err(Error::size("experts", found, "as many of each, 1 or more"));
        }
        let (h, i) = (self.hidden_size(), self.intermediate_size());
        for (name, weights, size_n) in [("w13", self.w13, 2 * i), ("w2", self.w2, h)] {
            let first = weights[0].layout();
            if first.shape().size_n != size_n {
                let found = [first.shape().size_k, first.shape().size_n];
                let expected = format!("[{}, {size_n}]", first.shape().size_k);
                return Err(Error::shape(name, &found, expected));
            }
            let differs = |w: &&PackedRhs<'_>| w.layout() != first;
            if let Some(other) = weights.iter().find(differs) {
                let show = |l: RhsLayout| {
                    format!("{}, {} groups, blocks of {}", l.shape(), l.groups(), l.nr())
                };
                let what = format!("{name}: an expert's layout");
                return Err(Error::size(what, show(other.layout()), show(first)));
            }
        }
        check_expert_map(self.num_experts, self.expert_map, self.w13.len())
    }

    /// Slots by expert, in the order of global ids; experts without slots are omitted.
    fn buckets(&self, routed: Routed<'_>) -> Result<Vec<Bucket>> {
        check_routed(routed, self.num_experts, self.mode)?;
        let mut slots = std::collections::BTreeMap::<usize, Vec<usize>>::new();
        for (slot, &id) in routed.topk_ids.iter().enumerate() {
            if let Ok(expert) = usize::try_from(id) {
                slots.entry(expert).or_default().push(slot);
            }
        }
        let here = |(expert, slots)| {
            let local = match self.expert_map {
                Some(map) => usize::try_from(map[expert]).ok()?,
                None => expert,
            };
            Some(Bucket { local, slots })
        };
        Ok(slots.into_iter().filter_map(here).collect())
    }

    /// `y` `[M, H]` of `x` `[M, H]`, in its type. Experts run on rayon's current pool.
    ///
    /// # Errors
    /// As [`Layer::validate`]; [`Error::Shape`] and [`Error::Value`] for `x`, ids and weights that
    /// do not agree.
    pub fn forward(&self, kernel: &dyn Kernel, x: &Values, routed: Routed<'_>) -> Result<Values> {
        let kind = self.validate(x.ty())?;
        self.weighted_sum(kernel, kind, x, routed)
    }

    /// [`Layer::forward`] with a family's activation in place of [`Layer::activation`].
    ///
    /// # Errors
    /// As [`Layer::forward`]; [`Error::Unsupported`] in [`Mode::Upstream`].
    pub fn forward_activated(
        &self,
        kernel: &dyn Kernel,
        kind: GatedActivation,
        x: &Values,
        routed: Routed<'_>,
    ) -> Result<Values> {
        if self.mode == Mode::Upstream {
            let reason = "upstream's method has only its own; expected Mode::Extended";
            return Err(Error::unsupported("a family's activation", reason));
        }
        layer::admit_type(x.ty())?;
        self.check_parts()?;
        self.weighted_sum(kernel, kind, x, routed)
    }

    fn weighted_sum(
        &self,
        kernel: &dyn Kernel,
        kind: GatedActivation,
        x: &Values,
        routed: Routed<'_>,
    ) -> Result<Values> {
        let buckets = self.buckets(routed)?;
        let (h, tokens) = (self.hidden_size(), routed.topk_ids.len() / routed.top_k);
        if x.len() != tokens * h {
            return Err(Error::shape("x", &[x.len()], format!("[{tokens}, {h}]")));
        }
        let rows = x.to_f32();
        let down: Vec<Vec<f32>> = buckets
            .par_iter()
            .map(|bucket| self.expert(kernel, kind, &rows, x.ty(), bucket, routed))
            .collect::<Result<_>>()?;
        // If upstream's rows are f32 and its sum is not, round only at the end.
        let wide = x.ty() == ScalarType::BFLOAT16 && !self.router_weight_on_input;
        let sum_type = if wide { ScalarType::FLOAT32 } else { x.ty() };
        let mut y = vec![0.0f32; tokens * h];
        for (bucket, down) in buckets.iter().zip(&down) {
            for (&slot, row) in bucket.slots.iter().zip(down.chunks_exact(h)) {
                let sums = &mut y[slot / routed.top_k * h..][..h];
                for (sum, &value) in sums.iter_mut().zip(row) {
                    *sum = round_to(sum_type, *sum + value);
                }
            }
        }
        Values::from_f32(y, x.ty())
    }

    /// The weighted rows of one expert, as they enter the sum.
    fn expert(
        &self,
        kernel: &dyn Kernel,
        kind: GatedActivation,
        x: &[f32],
        dtype: ScalarType,
        bucket: &Bucket,
        routed: Routed<'_>,
    ) -> Result<Vec<f32>> {
        let (h, i) = (self.hidden_size(), self.intermediate_size());
        let mut rows = Vec::with_capacity(bucket.slots.len() * h);
        for &slot in &bucket.slots {
            let row = &x[slot / routed.top_k * h..][..h];
            let weight = if self.router_weight_on_input { routed.topk_weights[slot] } else { 1.0 };
            rows.extend(row.iter().map(|&x| x * weight));
        }
        let inner = if self.router_weight_on_input { ScalarType::FLOAT32 } else { dtype };
        let rows = Values::from_f32(rows, inner)?;
        let gate_up = linear(kernel, &rows, &self.w13[bucket.local], self.rounding)?;
        let activated = kind.apply(&gate_up, i)?;
        let down = linear(kernel, &activated, &self.w2[bucket.local], self.rounding)?;
        let mut down = down.to_f32();
        for (&slot, row) in bucket.slots.iter().zip(down.chunks_exact_mut(h)) {
            for value in row {
                *value = match self.router_weight_on_input {
                    true => round_to(dtype, *value),
                    false => *value * routed.topk_weights[slot],
                };
            }
        }
        Ok(down)
    }
}

/// Fails unless `map` (absent: all experts are local) maps each of `num_experts` experts to one of
/// `local`, or to −1.
pub(super) fn check_expert_map(
    num_experts: usize,
    map: Option<&[i32]>,
    local: usize,
) -> Result<()> {
    let Some(map) = map else {
        if num_experts != local {
            return Err(Error::size("num_experts", num_experts, local));
        }
        return Ok(());
    };
    if map.len() != num_experts {
        return Err(Error::shape("expert_map", &[map.len()], format!("[{num_experts}]")));
    }
    match map.iter().position(|&e| e < -1 || i64::from(e) >= local as i64) {
        Some(at) => {
            let rule = format!("-1 or a local expert below {local}");
            Err(Error::value("expert_map", &[at], map[at], rule))
        }
        None => Ok(()),
    }
}

/// The logits `[M, num_experts]`, row-major; an error for another shape and for logits that the router refuses.
pub(super) fn checked_logits<'l>(
    router: &LayerRouter<'_>,
    logits: ArrayView2<'l, f32>,
    num_experts: usize,
) -> Result<Cow<'l, [f32]>> {
    if logits.ncols() != num_experts {
        let expected = format!("[{}, {num_experts}]", logits.nrows());
        return Err(Error::shape("router_logits", logits.shape(), expected));
    }
    router.validate(logits)?;
    Ok(row_major(logits))
}

/// Fails unless ids and weights agree, and each id is an expert (or −1, in [`Mode::Extended`]).
pub(super) fn check_routed(routed: Routed<'_>, num_experts: usize, mode: Mode) -> Result<()> {
    let Routed { top_k, topk_ids, topk_weights } = routed;
    if top_k == 0 || !topk_ids.len().is_multiple_of(top_k) {
        return Err(Error::shape("topk_ids", &[topk_ids.len()], format!("[M, {top_k}]")));
    }
    if topk_weights.len() != topk_ids.len() {
        let rule = format!("[{}, {top_k}]", topk_ids.len() / top_k);
        return Err(Error::shape("topk_weights", &[topk_weights.len()], rule));
    }
    let nobody = |id| id == -1 && mode == Mode::Extended;
    let is_expert = |id| usize::try_from(id).is_ok_and(|id| id < num_experts);
    match topk_ids.iter().position(|&id| !is_expert(id) && !nobody(id)) {
        Some(slot) => {
            let rule = format!("an expert below {num_experts}");
            Err(Error::value("topk_ids", &[slot / top_k, slot % top_k], topk_ids[slot], rule))
        }
        None => Ok(()),
    }
}
