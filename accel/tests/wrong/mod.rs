//! The reference behind a backend's operations, with one of them at fault.

use marlinspike::case::QuantConfig;
use marlinspike::layouts::marlin::ScalePermutation;
use marlinspike::moe::activation::Definition;
use marlinspike::moe::align::Align;
use marlinspike::moe::router::{Router, Routing};
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::Weight;
use marlinspike_accel::{
    AccelError,
    backend::{Experts, Operations, Packed, Reference},
    ops::align::Blocks,
};

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// What it should.
    None,
    /// The lowest bit of its last output is flipped.
    LastBit,
    /// It has no kernel for its arguments.
    Refusal,
    /// The device fails.
    Failure,
}

/// The reference, but for `operation`.
pub(crate) struct Faulty {
    pub(crate) operation: &'static str,
    pub(crate) fault: Fault,
}

impl Faulty {
    fn result<R>(
        &self,
        name: &'static str,
        made: Result<R, AccelError>,
        flip: impl FnOnce(&mut R),
    ) -> Result<R, AccelError> {
        let mut made = made?;
        match self.fault {
            Fault::LastBit if name == self.operation => flip(&mut made),
            Fault::Refusal if name == self.operation => {
                return Err(AccelError::Argument {
                    operation: name,
                    what: "weight",
                    found: "this".into(),
                    expected: "another".into(),
                });
            }
            Fault::Failure if name == self.operation => {
                return Err(AccelError::Driver { call: name, reason: "broken".into() });
            }
            _ => {}
        }
        Ok(made)
    }
}

/// Flips the lowest bit of the last element.
fn last<T: std::ops::BitXorAssign + From<u8>>(values: &mut [T]) {
    if let Some(value) = values.last_mut() {
        *value ^= T::from(1);
    }
}

impl Operations for Faulty {
    fn repack(&self, packed: Packed<'_>) -> Result<Vec<u32>, AccelError> {
        self.result(packed.operator(), Reference.repack(packed), |values| last(values))
    }

    fn int4_fp8(
        &self,
        qweight: &[u32],
        qzeros: Option<&[u32]>,
        words: usize,
    ) -> Result<Vec<u32>, AccelError> {
        let made = Reference.int4_fp8(qweight, qzeros, words);
        self.result("marlin_int4_fp8_preprocess", made, |values| last(values))
    }

    fn permute_scales(
        &self,
        scales: &[u16],
        size_n: usize,
        order: ScalePermutation,
    ) -> Result<Vec<u16>, AccelError> {
        let made = Reference.permute_scales(scales, size_n, order);
        self.result("marlin_permute_scales", made, |values| last(values))
    }

    fn route(
        &self,
        router: &Router<'_>,
        logits: &[f32],
        experts: usize,
    ) -> Result<Routing, AccelError> {
        self.result("topk_router", Reference.route(router, logits, experts), |routing| {
            if let Some(weight) = routing.topk_weights.last_mut() {
                *weight += 0.25;
            }
        })
    }

    fn align(&self, align: &Align<'_>, topk_ids: &[i32]) -> Result<Blocks, AccelError> {
        self.result("moe_align_block_size", Reference.align(align, topk_ids), |blocks| {
            last(&mut blocks.sorted_token_ids);
        })
    }

    fn product(
        &self,
        weight: &Weight<'_>,
        quant: &QuantConfig,
        x: &[u16],
    ) -> Result<Vec<u16>, AccelError> {
        self.result("marlin_gemm", Reference.product(weight, quant, x), |values| last(values))
    }

    fn expert_product(&self, experts: Experts<'_>, x: &[u16]) -> Result<Vec<u16>, AccelError> {
        self.result("moe_wna16_marlin_gemm", Reference.expert_product(experts, x), |values| {
            last(values)
        })
    }

    fn activate(
        &self,
        definition: &Definition,
        gate_up: &[u16],
        dtype: ScalarType,
        size_i: usize,
    ) -> Result<Vec<u16>, AccelError> {
        let made = Reference.activate(definition, gate_up, dtype, size_i);
        self.result("moe_activation", made, |values| last(values))
    }

    fn sum(
        &self,
        down: &[u16],
        dtype: ScalarType,
        top_k: usize,
        size_n: usize,
    ) -> Result<Vec<u16>, AccelError> {
        self.result("moe_sum", Reference.sum(down, dtype, top_k, size_n), |values| last(values))
    }
}
