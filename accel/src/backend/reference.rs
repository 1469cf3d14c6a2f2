//! The reference behind the operations: what every bit must be.

use marlinspike::case::QuantConfig;
use marlinspike::layouts::marlin::{
    Activations, ScalePermutation, WeightLayout, int4_to_fp8_asymmetric, int4_to_fp8_symmetric,
};
use marlinspike::moe::activation::Definition;
use marlinspike::moe::align::Align;
use marlinspike::moe::router::{Router, Routing};
use marlinspike::moe::{Chain, sum, to_slots};
use marlinspike::ndarray::Array2;
use marlinspike::num::array::{FloatView2, FloatView3, HalfArray2, into_vec, rows_of};
use marlinspike::num::scalar::ScalarType;
use marlinspike::products::schedule::{Extras, Schedule, Stack};
use marlinspike::weight::Weight;

use super::operations::{Experts, Operations, Packed, sixteen_bits};
use crate::{error::AccelError, ops::align::Blocks};

/// The reference behind the same operations: what every bit must be.
#[derive(Debug, Clone, Copy)]
pub struct Reference;

/// The reference's error as this crate's.
fn refused(operation: &'static str) -> impl FnOnce(marlinspike::Error) -> AccelError {
    move |error| AccelError::Argument {
        operation,
        what: "reference",
        found: error.to_string(),
        expected: "arguments that the reference takes".into(),
    }
}

/// 16-bit values, zero-extended.
fn codes(x: &[u16]) -> Vec<u32> {
    x.iter().map(|&bits| bits.into()).collect()
}

/// The low halves of 32-bit values.
fn halves(y: Array2<u32>) -> Vec<u16> {
    y.into_iter().map(|bits| bits as u16).collect()
}

impl Packed<'_> {
    fn layout(&self) -> marlinspike::Result<WeightLayout> {
        let act = if self.is_a_8bit { Activations::Bits8 } else { Activations::Bits16 };
        WeightLayout::new(self.shape, self.bits, act)
    }
}

impl Operations for Reference {
    fn repack(&self, p: Packed<'_>) -> Result<Vec<u32>, AccelError> {
        let packed = || -> marlinspike::Result<Vec<u32>> {
            let (layout, words) = (p.layout()?, p.qweight.len() / p.experts);
            let mut out = Vec::new();
            for (e, words) in p.qweight.chunks_exact(words).enumerate() {
                let perm = p.perm.map(|perm| &perm[e * p.shape.size_k..][..p.shape.size_k]);
                let codes = p.format.codes(p.bits, p.shape, words.to_vec())?;
                out.extend(layout.pack(&codes, perm)?);
            }
            Ok(out)
        };
        packed().map_err(refused(p.operator()))
    }

    fn int4_fp8(
        &self,
        qweight: &[u32],
        qzeros: Option<&[u32]>,
        words: usize,
    ) -> Result<Vec<u32>, AccelError> {
        match qzeros {
            None => Ok(int4_to_fp8_symmetric(qweight)),
            Some(zeros) => rows_of("qweight", qweight, words)
                .and_then(|q| int4_to_fp8_asymmetric(q, rows_of("qzeros", zeros, words)?))
                .map(into_vec)
                .map_err(refused("marlin_int4_fp8_preprocess")),
        }
    }

    fn permute_scales(
        &self,
        scales: &[u16],
        _size_n: usize,
        order: ScalePermutation,
    ) -> Result<Vec<u16>, AccelError> {
        let columns = order.columns();
        let run = columns.len();
        Ok((0..scales.len()).map(|i| scales[i / run * run + columns[i % run]]).collect())
    }

    fn route(
        &self,
        router: &Router<'_>,
        logits: &[f32],
        experts: usize,
    ) -> Result<Routing, AccelError> {
        rows_of("router_logits", logits, experts)
            .and_then(|logits| router.route(logits))
            .map_err(refused("topk_router"))
    }

    fn align(&self, align: &Align<'_>, topk_ids: &[i32]) -> Result<Blocks, AccelError> {
        let aligned = align.run(topk_ids).map_err(refused("moe_align_block_size"))?;
        Ok(Blocks {
            sorted_token_ids: aligned.sorted_token_ids,
            expert_ids: aligned.expert_ids,
            num_tokens_post_padded: aligned.num_tokens_post_padded,
        })
    }

    fn product(
        &self,
        weight: &Weight<'_>,
        quant: &QuantConfig,
        x: &[u16],
    ) -> Result<Vec<u16>, AccelError> {
        sixteen_bits("marlin_gemm", quant)?;
        let schedule = Schedule::canonical(weight, quant.dtype, quant.dtype);
        let x = codes(x);
        let y = rows_of("x", &x, weight.shape().size_k)
            .and_then(|x| schedule?.execute(x, weight, Extras::default()));
        y.map(halves).map_err(refused("marlin_gemm"))
    }

    fn expert_product(&self, e: Experts<'_>, x: &[u16]) -> Result<Vec<u16>, AccelError> {
        sixteen_bits("moe_wna16_marlin_gemm", e.quant)?;
        let product = || -> marlinspike::Result<Array2<u32>> {
            let expert_of = |&id: &i32| -> Option<usize> {
                let global = usize::try_from(id).ok().filter(|&id| id < e.num_experts)?;
                match e.expert_map {
                    Some(map) => usize::try_from(map[global]).ok(),
                    None => Some(global),
                }
            };
            let expert_of: Vec<_> = e.topk_ids.iter().map(expert_of).collect();
            let first = e.weights.first().ok_or_else(|| {
                let (tensor, needed_by) = ("weights".into(), "experts".into());
                marlinspike::Error::Missing { tensor, needed_by }
            })?;
            let x = to_slots(x, first.shape().size_k, e.top_k);
            let (weights, expert_of) = (e.weights, &expert_of[..]);
            let stack = Stack { weights, expert_of, orders: None, places: None };
            let extras = Extras { router_weights: e.topk_weights, ..Extras::default() };
            let schedule = Schedule::canonical(first, e.quant.dtype, e.quant.dtype)?;
            let x = codes(&x);
            schedule.execute_stack(rows_of("x", &x, first.shape().size_k)?, stack, extras)
        };
        product().map(halves).map_err(refused("moe_wna16_marlin_gemm"))
    }

    fn activate(
        &self,
        definition: &Definition,
        gate_up: &[u16],
        dtype: ScalarType,
        size_i: usize,
    ) -> Result<Vec<u16>, AccelError> {
        FloatView2::from_rows("gate_up", dtype, definition.width_in(size_i), gate_up)
            .and_then(|gate_up| definition.apply(gate_up, Chain::Canonical))
            .map(HalfArray2::into_bits)
            .map_err(refused("moe_activation"))
    }

    fn sum(
        &self,
        down: &[u16],
        dtype: ScalarType,
        top_k: usize,
        size_n: usize,
    ) -> Result<Vec<u16>, AccelError> {
        let shape = [down.len() / (top_k * size_n).max(1), top_k, size_n];
        FloatView3::from_bits("down", dtype, shape, down)
            .and_then(|down| sum::sum(down, Chain::Canonical))
            .map(HalfArray2::into_bits)
            .map_err(refused("moe_sum"))
    }
}
