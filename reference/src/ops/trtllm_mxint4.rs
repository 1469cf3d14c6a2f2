//! Experts of int4 with bf16 scales, for TensorRT-LLM's kernels.

use serde_json::{Value, json};

use super::interleaving::Interleaving;
use super::projected::{
    ExpertLayout, Experts, Forgotten, Projected, Projection, stack, swap_nibbles,
};
use crate::Result;
use crate::layouts::Layout as _;
use crate::num::scalar::ScalarType;
use crate::num::tensor::DType;
use crate::ops::Operation;
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Defined, Expected, Mistake, ids, known};
use crate::ops::schema::{CaseError, Reader, TensorRule};
use crate::ops::tensors::{I32, U8, input, is, output, refused};

/// Config of `prepare_static_weights_for_trtllm_mxint4_moe`.
///
/// in: `gemm1_weights` `[E, 2I, H / 8]` and `gemm2_weights` `[E, H, I / 8]` int32, codes with an offset of 8
/// along K; `gemm1_scales` `[E, 2I, H / 32]` and `gemm2_scales` bfloat16. out: the same names, weights
/// as bytes `[E, K / 256, N, 128]`, scales `[E, N · K / 32]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MxInt4Config {
    /// Experts.
    pub num_experts: usize,
    /// H.
    pub hidden_size: usize,
    /// I.
    pub intermediate_size: usize,
}

impl MxInt4Config {
    /// The layout of one projection.
    ///
    /// # Errors
    /// As [`ExpertLayout::mxint4`].
    pub fn layout(&self, projection: Projection) -> Result<ExpertLayout> {
        ExpertLayout::mxint4(projection, self.hidden_size, self.intermediate_size)
    }

    /// The projections with the prefix of their tensors.
    pub(crate) const PROJECTIONS: [(&'static str, Projection); 2] =
        [("gemm1", Projection::W13), ("gemm2", Projection::W2)];
}

impl Operation for MxInt4Config {
    fn keys() -> &'static [&'static str] {
        &["num_experts", "hidden_size", "intermediate_size"]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let config = Self {
            num_experts: r.size("num_experts")?,
            hidden_size: r.size("hidden_size")?,
            intermediate_size: r.size("intermediate_size")?,
        };
        config
            .layout(Projection::W13)
            .map_err(|e| refused(r, "hidden_size", config.hidden_size, &e))?;
        Ok(config)
    }

    fn json(&self) -> Value {
        json!({
            "num_experts": self.num_experts, "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
        })
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let e = is(self.num_experts);
        let mut rules = Vec::new();
        for (name, projection) in Self::PROJECTIONS {
            let layout = self.layout(projection)?;
            let (n, k) = (layout.shape().size_n, layout.shape().size_k);
            let (weights, scales) = (format!("{name}_weights"), format!("{name}_scales"));
            let bf16 = [DType::BF16];
            rules.extend([
                input(&weights, I32, &[e, is(n), is(k / 8)]),
                input(&scales, &bf16, &[e, is(n), is(k / 32)]),
                output(&weights, U8, &[e, is(k / 256), is(n), is(128)]),
                output(&scales, &bf16, &[e, is(layout.scales().packed_len())]),
            ]);
        }
        Ok(rules)
    }

    fn lattice() -> Result<Vec<Self>> {
        let sizes = [(256, 256), (512, 256), (256, 512)];
        let of = |(hidden_size, intermediate_size)| {
            [1, 2].map(|num_experts| Self { num_experts, hidden_size, intermediate_size })
        };
        Ok(sizes.into_iter().flat_map(of).collect())
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(MxInt4::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<MxInt4>()
    }
}

/// `prepare_static_weights_for_trtllm_mxint4_moe`.
#[derive(Debug, Clone)]
struct MxInt4(Experts);

impl MxInt4 {
    fn new(case: &Case<'_>, c: &MxInt4Config) -> Result<Self> {
        let one = |(name, projection)| {
            let layout = c.layout(projection)?;
            let (weights, scales) = (format!("{name}_weights"), format!("{name}_scales"));
            let types = (ScalarType::UINT4B8, ScalarType::BFLOAT16, 32);
            let given = stack(case.input(&weights)?, case.input(&scales)?, &layout, types)?;
            let shape = layout.shape();
            let shapes = [
                vec![c.num_experts, shape.size_k / 256, shape.size_n, 128],
                vec![c.num_experts, layout.scales().packed_len()],
            ];
            let interleaving = Interleaving::Once;
            Ok(Projected { weights, scales, layout, given, interleaving, shapes })
        };
        let projections = MxInt4Config::PROJECTIONS.into_iter().map(one);
        Ok(Self(Experts { projections: projections.collect::<Result<_>>()? }))
    }

    fn each(&mut self, change: impl Fn(&mut Projected)) {
        self.0.each(change);
    }
}

impl Computation for MxInt4 {
    fn outputs(&self) -> Result<Vec<Expected>> {
        self.0.outputs()
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "rows-not-shuffled", "the rows were not shuffled in blocks of 32" =>
                |c| c.each(|p| p.forget(Forgotten::Shuffle));
            "gate-up-swapped", "gate and up are exchanged: the halves of w13 kept their places" =>
                |c| c.each(|p| p.forget(Forgotten::SwapHalves));
            "rows-not-interleaved", "gate and up stand in halves, not in turn" =>
                |c| c.each(|p| p.forget(Forgotten::Interleave));
            "scales-not-shuffled", "the scales are in the checkpoint's order of rows" =>
                |c| c.each(|p| p.forget(Forgotten::RowsOfScales));
            "scales-not-swizzled", "the scales are not interleaved in tiles of 128 x 4" =>
                |c| c.each(|p| p.interleaving = Interleaving::None);
            "scales-swizzled-twice", "the scales were interleaved twice" =>
                |c| c.each(|p| p.interleaving = Interleaving::Twice);
            "not-block-major", "each row's bytes stand together, not in blocks of 128 bytes of k" =>
                |c| c.each(|p| p.forget(Forgotten::Blocks));
            "sign-bit", "the codes kept their offset of 8" =>
                |c| c.each(|p| p.forget(Forgotten::SignBit));
            "nibble-order", "the nibbles of each byte are exchanged: even k in the high nibble" =>
                |c| c.each(|p| p.map_codes(swap_nibbles));
        }
    }
}
