//! The two named computations of an activation, operation by operation.

use super::{Definition, Function};
use crate::moe::{Chain, math};
use crate::num::scalar::ScalarType;
use crate::num::scalar::round_to;
use crate::{Error, Result};

/// √½ to nearest.
const SQRT_HALF: f32 = std::f32::consts::FRAC_1_SQRT_2;
/// √(2/π) to nearest.
const BETA: f32 = 0.797_884_6;
/// The cubic's factor in the approximation of GELU by a tangent.
const KAPPA: f32 = 0.044_715;

impl Function {
    /// F(gate) in f32:
    ///
    /// - SiLU: g / (1 + exp(−(α · g)));
    /// - GELU: (½ · g) · (1 + erf(g · √½));
    /// - GELU by tangent: (½ · g) · (1 + tanh(√(2/π) · fma(0.044715, (g · g) · g, g)));
    /// - squared ReLU: m · m, where m is g if g > 0 or g is NaN, else +0.
    pub fn of(self, gate: f32, alpha: f32) -> f32 {
        match self {
            Self::Silu => gate / (1.0 + math::exp(-(alpha * gate))),
            Self::Gelu => (0.5 * gate) * (1.0 + math::erf(gate * SQRT_HALF)),
            Self::GeluTanh => {
                let inner = BETA * KAPPA.mul_add(gate * gate * gate, gate);
                (0.5 * gate) * (1.0 + math::tanh(inner))
            }
            Self::Relu2 => {
                let m = if gate > 0.0 || gate.is_nan() { gate } else { 0.0 };
                m * m
            }
        }
    }
}

/// The smaller of both; a NaN in `x` stays.
fn at_most(x: f32, limit: Option<f32>) -> f32 {
    match limit {
        Some(limit) if x > limit => limit,
        _ => x,
    }
}

fn both_sides(x: f32, limit: Option<f32>) -> f32 {
    match limit {
        Some(limit) if x < -limit => -limit,
        limit => at_most(x, limit),
    }
}

impl Definition {
    /// The canonical result for one gate and up before the last rounding: F of the limited gate,
    /// limited, times the limited up plus its shift.
    pub fn canonical(&self, gate: f32, up: f32) -> f32 {
        let value = self.function.of(at_most(gate, self.gate_limit), self.alpha);
        let value = at_most(value, self.value_limit);
        if !self.is_gated() {
            return value;
        }
        let up = both_sides(up, self.up_limit);
        value * if self.up_shift == 0.0 { up } else { up + self.up_shift }
    }

    /// The result of upstream's operators, according to their machine code for sm_90 (`swiglustep`:
    /// their source; `…_no_mul`: PyTorch's functions):
    ///
    /// - the `…_and_mul` kinds round F to the 16-bit type, multiply and round again; limited gate
    ///   and up are also rounded, which matters if the limit is not a value of the type;
    /// - `swigluoai` is ((u + 1) · g) / (1 + e) in f32, `swiglustep` F · u in f32, each rounded once;
    /// - limits return their other operand for a NaN.
    fn upstream(&self, ty: ScalarType, gate: f32, up: f32) -> f32 {
        // Same as `f32::min`.
        let limited = |x: f32, limit: Option<f32>| limit.map_or(x, |l| x.min(l));
        let mut gate = limited(gate, self.gate_limit);
        let mut up = match (self.up_limit, self.value_limit) {
            (None, _) => up,
            (Some(l), Some(_)) => up.max(-l).min(l),
            (Some(l), None) => up.min(l).max(-l),
        };
        if self.up_shift != 0.0 {
            return (up + self.up_shift) * gate / (1.0 + math::exp(-(self.alpha * gate)));
        }
        let and_mul = self.is_gated() && self.value_limit.is_none();
        if and_mul {
            (gate, up) = (round_to(ty, gate), round_to(ty, up));
        }
        let value = limited(self.function.of(gate, self.alpha), self.value_limit);
        match (self.is_gated(), and_mul) {
            (false, _) => value,
            (true, false) => value * up,
            (true, true) => round_to(ty, value) * up,
        }
    }

    /// The function of one gate and up for `chain`.
    pub(super) fn element(
        &self,
        ty: ScalarType,
        chain: Chain,
    ) -> Result<impl Fn(f32, f32) -> f32 + use<'_>> {
        if chain == Chain::Upstream && self.function == Function::Relu2 && self.is_gated() {
            let reason = "upstream has no operator for it, only for relu2_no_mul";
            return Err(Error::unsupported("activation relu2 by upstream's operators", reason));
        }
        if chain == Chain::Upstream && self.up_shift != 0.0 && self.function != Function::Silu {
            let reason = "upstream adds to up in swigluoai only";
            return Err(Error::unsupported("a shift of up by upstream's operators", reason));
        }
        Ok(move |gate, up| match chain {
            Chain::Canonical => self.canonical(gate, up),
            Chain::Upstream => self.upstream(ty, gate, up),
        })
    }
}
