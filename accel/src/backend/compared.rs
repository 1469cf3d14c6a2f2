//! Every operation twice: on a device, and by the reference; every bit compared.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use marlinspike::case::QuantConfig;
use marlinspike::layouts::marlin::ScalePermutation;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::align::Align;
use marlinspike::moe::router::{Router, Routing};
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;

use super::{
    operations::{Experts, Operations, Packed},
    reference::Reference,
};
use crate::{error::AccelError, ops::align::Blocks};

/// What an operation was held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Count {
    /// Calls.
    pub calls: usize,
    /// Elements of their outputs.
    pub outputs: usize,
    /// Those whose bits are not the reference's.
    pub differing: usize,
}

/// Counts by the operations' registry names.
pub type Counts = BTreeMap<&'static str, Count>;

/// Operations that answer with their own results, and count what differs from the reference's.
#[derive(Debug)]
pub(super) struct Compared<'o, O> {
    operations: &'o O,
    counts: Mutex<Counts>,
}

impl<'o, O: Operations> Compared<'o, O> {
    pub(super) fn new(operations: &'o O) -> Self {
        Self { operations, counts: Mutex::default() }
    }

    pub(super) fn into_counts(self) -> Counts {
        self.counts.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Elements that differed so far.
    pub(super) fn differing(&self) -> usize {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.values().map(|count| count.differing).sum()
    }

    /// Compares the results' elements.
    fn count<R, T: PartialEq>(
        &self,
        name: &'static str,
        call: impl Fn(&dyn Operations) -> Result<R, AccelError>,
        elements: impl Fn(&R) -> Vec<T>,
    ) -> Result<R, AccelError> {
        let made = call(self.operations)?;
        // What was computed must have an expectation: this is no refusal.
        let wanted = call(&Reference).map_err(|error| AccelError::Driver {
            call: name,
            reason: format!("computed what the reference refuses: {error}"),
        })?;
        let (found, wanted) = (elements(&made), elements(&wanted));
        let differing = found.iter().zip(&wanted).filter(|(f, w)| f != w).count();
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(name).or_default();
        count.calls += 1;
        count.outputs += wanted.len();
        count.differing += differing + found.len().abs_diff(wanted.len());
        Ok(made)
    }
}

impl<O: Operations> Operations for Compared<'_, O> {
    fn repack(&self, packed: Packed<'_>) -> Result<Vec<u32>, AccelError> {
        self.count(packed.operator(), |o| o.repack(packed), Vec::clone)
    }

    fn int4_fp8(
        &self,
        qweight: &[u32],
        qzeros: Option<&[u32]>,
        words: usize,
    ) -> Result<Vec<u32>, AccelError> {
        let name = "marlin_int4_fp8_preprocess";
        self.count(name, |o| o.int4_fp8(qweight, qzeros, words), Vec::clone)
    }

    fn permute_scales(
        &self,
        scales: &[u16],
        size_n: usize,
        order: ScalePermutation,
    ) -> Result<Vec<u16>, AccelError> {
        let name = "marlin_permute_scales";
        self.count(name, |o| o.permute_scales(scales, size_n, order), Vec::clone)
    }

    fn route(
        &self,
        router: &Router<'_>,
        logits: &[f32],
        experts: usize,
    ) -> Result<Routing, AccelError> {
        let elements = |r: &Routing| -> Vec<u32> {
            let ids = r.topk_ids.iter().map(|id| id.cast_unsigned());
            ids.chain(r.topk_weights.iter().map(|w| w.to_bits())).collect()
        };
        self.count("topk_router", |o| o.route(router, logits, experts), elements)
    }

    fn align(&self, align: &Align<'_>, topk_ids: &[i32]) -> Result<Blocks, AccelError> {
        let elements = |b: &Blocks| -> Vec<i32> {
            let total = std::iter::once(&b.num_tokens_post_padded);
            total.chain(&b.sorted_token_ids).chain(&b.expert_ids).copied().collect()
        };
        self.count("moe_align_block_size", |o| o.align(align, topk_ids), elements)
    }

    fn product(
        &self,
        weight: &Weight<'_>,
        quant: &QuantConfig,
        x: &[u16],
    ) -> Result<Vec<u16>, AccelError> {
        self.count("marlin_gemm", |o| o.product(weight, quant, x), Vec::clone)
    }

    fn expert_product(&self, experts: Experts<'_>, x: &[u16]) -> Result<Vec<u16>, AccelError> {
        self.count("moe_wna16_marlin_gemm", |o| o.expert_product(experts, x), Vec::clone)
    }

    fn activate(
        &self,
        definition: &Definition,
        gate_up: &[u16],
        dtype: ScalarType,
        size_i: usize,
    ) -> Result<Vec<u16>, AccelError> {
        let call = |o: &dyn Operations| o.activate(definition, gate_up, dtype, size_i);
        self.count("moe_activation", call, Vec::clone)
    }

    fn sum(
        &self,
        down: &[u16],
        dtype: ScalarType,
        top_k: usize,
        size_n: usize,
    ) -> Result<Vec<u16>, AccelError> {
        self.count("moe_sum", |o| o.sum(down, dtype, top_k, size_n), Vec::clone)
    }
}
