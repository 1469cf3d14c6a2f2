//! gpt-oss: what a rank loads of MXFP4 experts.

use serde_json::{Value, json};

use super::{
    CaseError, Inputs, Method, Reader, Result, TensorRule, U8, input, is, name_of, output,
};
use crate::prepare::gate_up::GateUp;
use crate::prepare::gpt_oss::GptOssShard;
use crate::prepare::pad::Mxfp4Backend;
use crate::select::Platform;
use crate::tensor::DType;

const BACKENDS: &[(&str, Mxfp4Backend)] = &[
    ("DEEPGEMM_MXFP4", Mxfp4Backend::DeepGemm),
    ("MARLIN", Mxfp4Backend::Marlin),
    ("FLASHINFER_TRTLLM_MXFP4_BF16", Mxfp4Backend::FlashInferTrtllm),
    ("FLASHINFER_CUTLASS_MXFP4_BF16", Mxfp4Backend::FlashInferCutlass),
    ("TRITON", Mxfp4Backend::Other),
];
const PLATFORMS: &[(&str, Platform)] =
    &[("cuda", Platform::Cuda), ("rocm", Platform::Rocm), ("xpu", Platform::Xpu)];
const ORDERS: &[(&str, GateUp)] = &[
    ("interleaved", GateUp::Interleaved),
    ("halves", GateUp::Halves),
    ("swapped_halves", GateUp::SwappedHalves),
];

/// Config of `load_weights_mxfp4` (`GptOssModel._load_weights_mxfp4`, and the rounding of sizes of
/// `mxfp4_round_up_hidden_size_and_intermediate_size`).
///
/// in, of the whole model: `w13_weight` `[E, 2I, H / 2]` uint8, gate and up interleaved,
/// `w13_weight_scale` `[E, 2I, H / 32]` e8m0, `w13_bias` `[E, 2I]` bfloat16; `w2_weight`
/// `[E, H, I / 2]`, `w2_weight_scale`, `w2_bias` `[E, H]`. out: the same of the rank, its sizes rounded
/// up for the kernel, gate and up in the order `gate_up`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GptOssConfig {
    /// Experts.
    pub num_experts: usize,
    /// The rank: sizes of the model, `tp_size`, `tp_rank`, `backend`, `platform`.
    pub shard: GptOssShard,
    /// Where gate and up stand in the kernel's w13: `interleaved`, `halves` or `swapped_halves`.
    pub gate_up: GateUp,
}

/// One matrix of an expert.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GptOssMatrix {
    /// Prefix of its tensors.
    pub(crate) name: &'static str,
    /// N and K of the model.
    pub(crate) model: [usize; 2],
    /// N and K of the rank, rounded up.
    pub(crate) padded: [usize; 2],
}

impl GptOssConfig {
    /// w13 and w2.
    ///
    /// # Errors
    /// As [`GptOssShard::sizes`].
    pub(crate) fn matrices(&self) -> Result<[GptOssMatrix; 2]> {
        let (h, i) = (self.shard.hidden_size, self.shard.intermediate_size);
        let [padded_h, padded_i] = self.shard.sizes()?;
        let (model, padded) = ([2 * i, h], [2 * padded_i, padded_h]);
        let w13 = GptOssMatrix { name: "w13", model, padded };
        let w2 = GptOssMatrix { name: "w2", model: [h, i], padded: [padded_h, padded_i] };
        Ok([w13, w2])
    }
}

impl Method for GptOssConfig {
    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let shard = GptOssShard {
            hidden_size: r.size("hidden_size")?,
            intermediate_size: r.size("intermediate_size")?,
            tp_size: r.optional_size("tp_size")?.unwrap_or(1),
            tp_rank: r.index("tp_rank")?,
            backend: r.name("backend", BACKENDS)?,
            platform: r.optional_name("platform", PLATFORMS)?.unwrap_or(Platform::Cuda),
        };
        super::divisible(r, "hidden_size", shard.hidden_size, 32)?;
        let features = shard.features();
        let features = features
            .map_err(|e| super::refused(r, "intermediate_size", shard.intermediate_size, &e))?;
        if features.is_empty() {
            return Err(r.refuse("tp_rank", shard.tp_rank, "a rank that holds a block of 32"));
        }
        shard.sizes().map_err(|e| super::refused(r, "hidden_size", shard.hidden_size, &e))?;
        let gate_up = r.name("gate_up", ORDERS)?;
        Ok(Self { num_experts: r.size("num_experts")?, shard, gate_up })
    }

    fn json(&self) -> Value {
        let s = self.shard;
        json!({
            "num_experts": self.num_experts, "hidden_size": s.hidden_size,
            "intermediate_size": s.intermediate_size, "tp_size": s.tp_size, "tp_rank": s.tp_rank,
            "backend": name_of(BACKENDS, &s.backend), "platform": name_of(PLATFORMS, &s.platform),
            "gate_up": name_of(ORDERS, &self.gate_up),
        })
    }

    fn rules(&self) -> Result<Vec<TensorRule>> {
        let e = is(self.num_experts);
        let (e8m0, bf16) = ([DType::U8, DType::F8E8M0], [DType::BF16]);
        let mut rules = Vec::new();
        for GptOssMatrix { name, model: [n, k], padded: [padded_n, padded_k] } in self.matrices()? {
            let part = |part: &str| format!("{name}_{part}");
            rules.extend([
                input(&part("weight"), U8, &[e, is(n), is(k / 2)]),
                input(&part("weight_scale"), &e8m0, &[e, is(n), is(k / 32)]),
                input(&part("bias"), &bf16, &[e, is(n)]),
                output(&part("weight"), U8, &[e, is(padded_n), is(padded_k / 2)]),
                output(&part("weight_scale"), &e8m0, &[e, is(padded_n), is(padded_k / 32)]),
                output(&part("bias"), &bf16, &[e, is(padded_n)]),
            ]);
        }
        Ok(rules)
    }

    /// Any byte may stand in any place: this moves them.
    fn check(&self, _inputs: &Inputs<'_>) -> Result<()> {
        Ok(())
    }
}
