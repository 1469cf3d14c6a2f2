//! This project's kernel for 4-bit weights under e4m3fn activations on Hopper.

use super::named::{half, step};
use super::{
    Chunks, FP8_PROMOTION, FP8_UNIT, GroupScale, GroupSum, MultiplyAdd, Rows, Schedule, StepOp,
    Sum, WeightForm, Weights,
};
use crate::num::scalar::ScalarType;
use crate::weight::Weight;
use crate::{Error, Result};

impl Schedule {
    /// The schedule of a product of e4m3fn activations with 4-bit `weight` on Hopper's `wgmma`, whose
    /// output is `dtype`: a function of the weight's groups and type alone, never of M.
    ///
    /// A part is one chain of instructions from zero over a group of k, or over
    /// [`FP8_PROMOTION`] k where all of k is one group. Parts join the f32 total with k ascending: by
    /// one fused multiply-add with the group's scale, or by an addition, and the column's scale
    /// follows the last one. Then come the row's scale with the bias in one multiply-add, the router
    /// weight, and one rounding.
    ///
    /// Codes enter the unit as subnormal e4m3fn numbers and the next binade: integers times 2^−9,
    /// e2m1 times 2^−6. The scales are multiplied by the inverse, which is exact. The unit gives all
    /// subnormal factors one exponent, so this choice changes bits.
    ///
    /// [`Schedule::canonical`] of the same types is a schedule of `mma.sync`, which computes e4m3fn
    /// products in another way: the two differ in bits.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for other types.
    pub fn canonical_wgmma(weight: &Weight<'_>, dtype: ScalarType) -> Result<Self> {
        half(dtype)?;
        let exponent = match weight.ty {
            ScalarType::UINT4B8 | ScalarType::UINT4 => -9,
            ScalarType::FLOAT4_E2M1F => -6,
            ty => return Err(Error::unsupported(ty, "uint4b8, uint4 or float4_e2m1f codes")),
        };
        let has_groups = weight.scales.rows() > 1;
        let in_f32 = |op| step(op, ScalarType::FLOAT32);
        let mut epilogue = Vec::new();
        if !has_groups {
            epilogue.push(in_f32(StepOp::ChannelScale));
        }
        epilogue.extend([StepOp::ActivationScaleBias, StepOp::RouterWeight].map(in_f32));
        epilogue.push(step(StepOp::Round, dtype));
        Ok(Self {
            unit: FP8_UNIT,
            weights: Weights { form: WeightForm::Unscaled, exponent },
            rows: Rows::Stored,
            chunks: if has_groups { Chunks::Whole } else { Chunks::Size(FP8_PROMOTION) },
            stripes: None,
            group_sum: has_groups.then_some(GroupSum::of(GroupScale::Stored, MultiplyAdd::Fused)),
            warp_steps: Vec::new(),
            chunk_steps: Vec::new(),
            leaf_chunks: None,
            chunk_sum: Sum::default(),
            epilogue,
        })
    }
}
