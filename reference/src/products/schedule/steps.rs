//! The steps of an epilogue.

use super::{Step, StepOp};
use crate::num::scalar::{self, ScalarType};
use crate::products::chain::round_sum;

/// The operands of one output's steps; `None` leaves the value as it is.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Operands {
    pub(super) channel_scale: Option<f32>,
    pub(super) global_scale: Option<f32>,
    pub(super) activation_scale: Option<f32>,
    pub(super) bias: Option<f32>,
    pub(super) router_weight: Option<f32>,
    /// The output is one of those that [`StepOp::ChannelScaleBiasMarlin`] rounds twice.
    pub(super) corner: bool,
}

impl StepOp {
    fn rounds_apart(self, operands: &Operands) -> bool {
        self == Self::ChannelScaleBiasMarlin && operands.corner
    }
}

/// What comes out of a NaN.
const NAN: f32 = f32::from_bits(0x7fff_ffff);

/// A value on its way, always held as the f32 that it equals.
fn canonical(x: f32) -> f32 {
    if x.is_nan() { NAN } else { x }
}

/// The bits of `x` in `ty`, to nearest even.
pub(super) fn round_bits(x: f32, ty: ScalarType) -> u32 {
    if x.is_nan() {
        return if ty == ScalarType::FLOAT32 { NAN.to_bits() } else { 0x7fff };
    }
    match ty {
        ScalarType::FLOAT16 => scalar::f32_to_f16_rne(x).into(),
        ScalarType::BFLOAT16 => scalar::f32_to_bf16_rne(x).into(),
        _ => x.to_bits(),
    }
}

/// `x` rounded to `ty`, as an f32.
fn round_to(x: f32, ty: ScalarType) -> f32 {
    match ty {
        ScalarType::FLOAT16 => canonical(scalar::f16_to_f32(scalar::f32_to_f16_rne(x))),
        ScalarType::BFLOAT16 => canonical(scalar::bf16_to_f32(scalar::f32_to_bf16_rne(x))),
        _ => canonical(x),
    }
}

impl Step {
    /// x · scale + bias, rounded once.
    fn multiply_add(self, x: f32, scale: f32, bias: f32) -> f32 {
        let (scale, bias) = (round_to(scale, self.ty), round_to(bias, self.ty));
        // 24 bits by 24: exact.
        let product = f64::from(x) * f64::from(scale);
        canonical(round_sum(self.ty, product, f64::from(bias)) as f32)
    }

    fn apply(self, x: f32, operands: &Operands) -> f32 {
        let operand = match self.op {
            StepOp::Round => return round_to(x, self.ty),
            StepOp::ChannelScale => operands.channel_scale,
            StepOp::ChannelScaleBias | StepOp::ChannelScaleBiasMarlin => {
                match (operands.channel_scale, operands.bias) {
                    (Some(_), Some(_)) if self.op.rounds_apart(operands) => {
                        let scale = Self { op: StepOp::ChannelScale, ..self };
                        let bias = Self { op: StepOp::Bias, ..self };
                        return bias.apply(scale.apply(x, operands), operands);
                    }
                    (Some(scale), Some(bias)) => return self.multiply_add(x, scale, bias),
                    (scale, _) => scale,
                }
            }
            StepOp::GlobalScale => operands.global_scale,
            StepOp::ActivationScaleBias => match (operands.activation_scale, operands.bias) {
                (Some(scale), Some(bias)) => return self.multiply_add(x, scale, bias),
                (scale, _) => scale,
            },
            StepOp::ActivationScale => operands.activation_scale,
            StepOp::Bias => operands.bias,
            StepOp::RouterWeight => operands.router_weight,
            StepOp::RouterWeightGlobal => {
                operands.router_weight.map(|w| operands.global_scale.map_or(w, |g| w * g))
            }
        };
        let Some(operand) = operand.map(|o| round_to(o, self.ty)) else { return x };
        if self.ty == ScalarType::FLOAT32 {
            let result = if self.op == StepOp::Bias { x + operand } else { x * operand };
            return canonical(result);
        }
        // Both are 16-bit values. A product has at most 22 bits, so f64 holds it. A sum that f64
        // does not hold has an operand below 2^-40 of the other, which decides no rounding here.
        let (x, operand) = (f64::from(x), f64::from(operand));
        let result = if self.op == StepOp::Bias { x + operand } else { x * operand };
        let bits = self.ty.encode_rne(result);
        canonical(self.ty.to_f64(bits) as f32)
    }
}

/// Applies `steps` to `x`, in order.
pub(super) fn apply(steps: &[Step], x: f32, operands: &Operands) -> f32 {
    steps.iter().fold(canonical(x), |x, step| step.apply(x, operands))
}
