//! Upstream's kernels whose activations and weights are both e4m3fn, on Hopper.
//!
//! `wgmma` keeps 13 fraction bits of e4m3 products and truncates its sum to as many. A kernel that
//! promotes adds its accumulator to one in f32 after every 128 k, and begins again from zero; one
//! with "fast accumulation" goes through all of k in the unit.
//!
//! Source: CUTLASS's `ScaledEpilogue` as vLLM 0.21.0 builds `cutlass_scaled_mm`
//! (`scaled_mm_epilogues_c3x.hpp`), and its Triton kernel `fused_moe_kernel`.

use super::named::half;
use super::{
    AccumulatorType, Chunks, GroupScale, GroupSum, MultiplyAdd, RowScale, Rows, Schedule, Step,
    StepOp, Sum, UnitName, WeightForm, Weights,
};
use crate::Result;
use crate::num::scalar::ScalarType;
use crate::products::tensor_core::{Architecture, Instruction};

/// `wgmma` with e4m3 and sums of 14 bits.
pub const FP8_UNIT: UnitName = UnitName {
    architecture: Architecture::Hopper,
    instruction: Instruction::Wgmma,
    a: ScalarType::FLOAT8_E4M3FN,
    b: ScalarType::FLOAT8_E4M3FN,
    accumulator: AccumulatorType::Float32,
    size_k: 32,
};

/// k after which a promoting kernel adds its accumulator to the one in f32: four instructions.
pub const FP8_PROMOTION: usize = 128;

/// Whose epilogue a W8A8-FP8 product has, all of it in f32 with one rounding at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8Kernel {
    /// CUTLASS: the column's scale, then the row's and the bias in one multiply-add.
    Cutlass,
    /// Triton: the row's scale, the column's, the bias, the router weight.
    Triton,
}

/// Whose product of e4m3 operands with scales for each 128 k of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8BlockKernel {
    /// `fp8_gemm_nt` of DeepGEMM on Hopper: the scales are multiplied first, the part follows in a
    /// fused multiply-add. CUTLASS's blockwise main loop computes the same.
    DeepGemm,
    /// `_w8a8_triton_block_scaled_mm` and `fused_moe_kernel`: the part is multiplied by the row's
    /// scale, then by the block's in a fused multiply-add.
    Triton,
}

impl Schedule {
    /// The schedule of a product of e4m3 operands that both have a scale for each group of k
    /// ([`RowScale`]): four instructions from zero for each 128 k, promoted to f32 with both scales,
    /// k ascending; bias and router weight follow in f32.
    ///
    /// Source: DeepGEMM's `sm90_fp8_gemm_1d2d.cuh`; CUTLASS's blockwise collective, as vLLM builds it
    /// in `scaled_mm_blockwise_sm90_fp8_dispatch.cuh`; vLLM's `fp8_utils.py` and `fused_moe.py`. Not
    /// compared with a GPU's outputs.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] for outputs other than f16 and bf16.
    pub fn w8a8_fp8_blocks(kernel: Fp8BlockKernel, dtype: ScalarType) -> Result<Self> {
        let mut schedule = Self::w8a8_fp8(Fp8Kernel::Triton, dtype, false)?;
        let scales = |step: &Step| step.op == StepOp::ChannelScale || step.op.scales_rows();
        schedule.epilogue.retain(|step| !scales(step));
        let row_scale = match kernel {
            Fp8BlockKernel::DeepGemm => RowScale::Product,
            Fp8BlockKernel::Triton => RowScale::First,
        };
        let sum = GroupSum::of(GroupScale::Stored, MultiplyAdd::Fused);
        schedule.group_sum = Some(GroupSum { row_scale: Some(row_scale), ..sum });
        Ok(schedule)
    }

    /// The schedule of a W8A8-FP8 product whose output is `dtype`, with or without promotion. Scales are
    /// one for each row of x and one for each column ([`StepOp::ActivationScale`],
    /// [`StepOp::ChannelScale`]); a scale of the whole tensor is repeated.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] for outputs other than f16 and bf16.
    pub fn w8a8_fp8(kernel: Fp8Kernel, dtype: ScalarType, promoted: bool) -> Result<Self> {
        half(dtype)?;
        let in_f32 = |op| Step { op, ty: ScalarType::FLOAT32 };
        let mut epilogue: Vec<Step> = match kernel {
            Fp8Kernel::Cutlass => {
                [StepOp::ChannelScale, StepOp::ActivationScaleBias].map(in_f32).into()
            }
            Fp8Kernel::Triton => {
                [StepOp::ActivationScale, StepOp::ChannelScale, StepOp::Bias, StepOp::RouterWeight]
                    .map(in_f32)
                    .into()
            }
        };
        epilogue.push(Step { op: StepOp::Round, ty: dtype });
        Ok(Self {
            unit: FP8_UNIT,
            weights: Weights { form: WeightForm::Unscaled, exponent: 0 },
            rows: Rows::Stored,
            chunks: if promoted { Chunks::Size(FP8_PROMOTION) } else { Chunks::Whole },
            stripes: None,
            group_sum: None,
            warp_steps: Vec::new(),
            chunk_steps: Vec::new(),
            leaf_chunks: None,
            chunk_sum: Sum::default(),
            epilogue,
        })
    }
}
