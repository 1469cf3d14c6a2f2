//! Requirements of each NVFP4 MoE backend on weights, block scales and the activations' global
//! scales.

use super::RowStep;
use super::projection::{EPILOGUE_TILE_M, Projection};
use crate::num::dims::Shape;
use crate::{Error, Result};

/// The backends of vLLM 0.21.0 whose weights are codes and interleaved block scales
/// (`NvFp4MoeBackend`; `MARLIN` has its own layout, `EMULATION` reads the checkpoint's).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpertBackend {
    /// TensorRT-LLM's generated kernels in FlashInfer (`FLASHINFER_TRTLLM`).
    FlashInferTrtllm,
    /// CUTLASS in FlashInfer (`FLASHINFER_CUTLASS`).
    FlashInferCutlass,
    /// CuTe DSL in FlashInfer (`FLASHINFER_CUTEDSL`); its six-dimensional scales are a view of the
    /// same bytes.
    FlashInferCuteDsl,
    /// The same for batched experts (`FLASHINFER_CUTEDSL_BATCHED`).
    FlashInferCuteDslBatched,
    /// vLLM's own CUTLASS kernels (`VLLM_CUTLASS`).
    VllmCutlass,
}

impl ExpertBackend {
    /// Every backend with upstream's name.
    pub const NAMED: [(&'static str, Self); 5] = [
        ("FLASHINFER_TRTLLM", Self::FlashInferTrtllm),
        ("FLASHINFER_CUTEDSL", Self::FlashInferCuteDsl),
        ("FLASHINFER_CUTEDSL_BATCHED", Self::FlashInferCuteDslBatched),
        ("FLASHINFER_CUTLASS", Self::FlashInferCutlass),
        ("VLLM_CUTLASS", Self::VllmCutlass),
    ];

    /// Upstream's name.
    pub fn name(self) -> &'static str {
        Self::NAMED.iter().find(|(_, backend)| *backend == self).map_or("", |(name, _)| name)
    }

    /// Upstream's names, in the order of [`Self::NAMED`].
    pub const NAMES: [&'static str; 5] = {
        let mut names = [""; 5];
        let mut i = 0;
        while i < names.len() {
            names[i] = Self::NAMED[i].0;
            i += 1;
        }
        names
    };

    /// The reordering of a projection's rows; the checkpoint's w13 is `[w1, w3]`, gate first.
    ///
    /// FlashInfer's kernels expect `[w3, w1]`, except the batched ones, which expect `[w1, w3]`
    /// like vLLM's.
    pub fn row_steps(self, projection: Projection, gated: bool) -> Vec<RowStep> {
        let w13 = projection == Projection::W13 && gated;
        let shuffle = RowStep::shuffle(EPILOGUE_TILE_M);
        match self {
            Self::FlashInferTrtllm if w13 => {
                vec![RowStep::SwapHalves, RowStep::Interleave(1), shuffle]
            }
            Self::FlashInferTrtllm => vec![shuffle],
            Self::FlashInferCutlass if w13 => vec![RowStep::SwapHalves],
            Self::FlashInferCuteDsl if w13 => vec![RowStep::SwapHalves, RowStep::Interleave(64)],
            _ => Vec::new(),
        }
    }

    /// The padded shape of the codes in the kernel: zeros follow the last k and n.
    ///
    /// `FLASHINFER_TRTLLM` pads the hidden size to 256, and without a gate the intermediate size to
    /// 128. The others pad nothing with a gate; without one they pad the intermediate size to 128.
    ///
    /// # Errors
    /// [`Error::Size`] for sizes that upstream refuses: not a multiple of 16 (a block) and, with a
    /// gate, an intermediate size that is not a multiple of 64 (128 rows of w13's scales).
    /// `FLASHINFER_CUTEDSL` refuses every layer without a gate, since it always exchanges the
    /// halves.
    pub fn padded_shape(
        self,
        projection: Projection,
        hidden_size: usize,
        intermediate_size: usize,
        gated: bool,
    ) -> Result<Shape> {
        let multiple = |what: &str, size: usize, unit: usize| match size.is_multiple_of(unit) {
            true => Ok(()),
            false => Err(Error::size(what, size, format!("a multiple of {unit}"))),
        };
        projection.shape(hidden_size, intermediate_size, gated)?;
        multiple("hidden_size", hidden_size, 16)?;
        multiple("intermediate_size", intermediate_size, if gated { 64 } else { 16 })?;
        if !gated && self == Self::FlashInferCuteDsl {
            return Err(Error::unsupported(
                "FLASHINFER_CUTEDSL without a gate",
                "w13 is two halves",
            ));
        }
        let hidden = match self {
            Self::FlashInferTrtllm => hidden_size.next_multiple_of(256),
            _ => hidden_size,
        };
        let unit = if gated { 1 } else { 128 };
        projection.shape(hidden, intermediate_size.next_multiple_of(unit), gated)
    }

    /// Whether all experts share one global scale of the activations
    /// (`is_global_sf_supported_for_nvfp4_backend`).
    pub fn shares_activation_scale(self) -> bool {
        self != Self::VllmCutlass
    }

    /// [`activation_scales`] as this backend shares them.
    ///
    /// # Errors
    /// As [`activation_scales`].
    pub fn activation_scales(self, scales: &[Vec<f32>]) -> Result<Vec<f32>> {
        activation_scales(scales, self.shares_activation_scale())
    }
}

/// The multipliers of the quantized activations that enter a projection, one for each expert: of
/// `scales` (each expert's shards, 1 / `input_global_scale`) the largest of all experts where it is
/// `shared`, or of the expert's own shards.
///
/// The kernel quantizes with the reciprocal of this. An expert with a smaller scale than the shared
/// one loses small values, not large ones.
///
/// # Errors
/// [`Error::Value`] for a scale that is not positive and finite, [`Error::Size`] without any.
pub fn activation_scales(scales: &[Vec<f32>], shared: bool) -> Result<Vec<f32>> {
    for (e, shards) in scales.iter().enumerate() {
        if shards.is_empty() {
            return Err(Error::size(format!("shards of expert {e}"), 0, "1 or more"));
        }
        if let Some(i) = shards.iter().position(|s| !(s.is_finite() && *s > 0.0)) {
            let expected = "a positive finite number";
            return Err(Error::value("input_scale", &[e, i], shards[i], expected));
        }
    }
    let largest = |shards: &[f32]| shards.iter().copied().fold(0.0, f32::max);
    let own: Vec<f32> = scales.iter().map(|shards| largest(shards)).collect();
    Ok(match shared {
        true => vec![largest(&own); own.len()],
        false => own,
    })
}

/// The factors of the sums of a layer's two products, one per expert.
#[derive(Debug, Clone, PartialEq)]
pub struct Alphas {
    /// Factor of w13's sums: the weight's multiplier times the activations', rounded to f32.
    pub g1_alphas: Vec<f32>,
    /// Factor of w2's sums.
    pub g2_alphas: Vec<f32>,
    /// Factor of the gated activation's output before its quantization in `FLASHINFER_TRTLLM`:
    /// `g1_alphas` times the rounded reciprocal of the multiplier of w2's activations; without a
    /// gate, only that reciprocal.
    pub g1_scale_c: Vec<f32>,
}

impl Alphas {
    /// Computes the factors from the multipliers of weights and quantized activations
    /// `[w13, a13, w2, a2]`, one per expert (see [`ExpertBackend::activation_scales`]). Source:
    /// `process_weights_after_loading` of vLLM 0.21.0's NVFP4 experts.
    ///
    /// # Errors
    /// [`Error::Shape`] if their numbers of experts differ; [`Error::Value`] if a factor is not a
    /// positive normal number.
    pub fn new([w13, a13, w2, a2]: [&[f32]; 4], gated: bool) -> Result<Self> {
        let experts = w13.len();
        for (name, values) in [("a13_scale", a13), ("w2_scale_2", w2), ("a2_scale", a2)] {
            if values.len() != experts {
                return Err(Error::shape(name, &[values.len()], format!("[{experts}]")));
            }
        }
        let product = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| x * y).collect();
        let reciprocals: Vec<f32> = a2.iter().map(|a| 1.0 / a).collect();
        let g1_alphas: Vec<f32> = product(w13, a13);
        let g1_scale_c = if gated { product(&g1_alphas, &reciprocals) } else { reciprocals };
        let alphas = Self { g2_alphas: product(w2, a2), g1_alphas, g1_scale_c };
        for (name, values) in [
            ("g1_alphas", &alphas.g1_alphas),
            ("g2_alphas", &alphas.g2_alphas),
            ("g1_scale_c", &alphas.g1_scale_c),
        ] {
            if let Some(e) = values.iter().position(|a| !(a.is_normal() && *a > 0.0)) {
                return Err(Error::value(name, &[e], values[e], "a positive normal number"));
            }
        }
        Ok(alphas)
    }
}
