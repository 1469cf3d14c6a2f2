//! The arithmetic of a product by convention: the value of a weight, and the chain of scales, bias
//! and roundings after the sum.

use super::chain::{Chain, Step};
use super::columns::{Rule, WeightColumns, round_half};
use super::schedule::{self, StepOp};
use crate::num::scalar::ScalarType;
use crate::weight::Weight;
use crate::{Error, Result};

/// The conventions that the reference knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Convention {
    /// Upstream's Marlin kernels: group scales are multiplied into the weight in the activation
    /// type; channel-wise scales, bias and router weight are applied to the rounded sum, each with
    /// its own rounding.
    #[default]
    Marlin,
    /// A layer of a framework on dequantized weights, `F.linear(x, w) + bias`: (q − z)·s is rounded to
    /// the activation type, whether s belongs to a group or a column; the sum is rounded, and bias
    /// and router weight follow, each with its own rounding.
    Stepwise,
    /// The convention of this project: weights as in Marlin, everything after the sum in f32, and
    /// one rounding at the end.
    Canonical,
    /// As canonical, but the weights are not rounded: (q − z)·s enters the product exactly.
    Unrounded,
    /// Upstream's W8A8-FP8 kernels (CUTLASS `cutlass_scaled_mm`, Triton `fused_moe_kernel`): codes
    /// enter the unit; the scales of row, column and router multiply the f32 sum in any order, with
    /// the bias before the router weight; one rounding at the end.
    W8a8,
}

impl Convention {
    /// Every convention with its name.
    pub const NAMED: &'static [(&'static str, Self)] = &[
        ("marlin", Self::Marlin),
        ("stepwise", Self::Stepwise),
        ("canonical", Self::Canonical),
        ("unrounded", Self::Unrounded),
        ("scaled_mm", Self::W8a8),
    ];

    /// Name in case files and reports.
    pub fn name(self) -> &'static str {
        let named = Self::NAMED.iter().find(|(_, convention)| *convention == self);
        named.map_or("unnamed", |(name, _)| name)
    }

    /// The convention called `name`.
    ///
    /// # Errors
    /// [`Error::Size`] with all names.
    pub fn from_name(name: &str) -> Result<Self> {
        let found = Self::NAMED.iter().find(|(known, _)| *known == name);
        found.map(|(_, convention)| *convention).ok_or_else(|| {
            let names: Vec<_> = Self::NAMED.iter().map(|(name, _)| *name).collect();
            Error::size("convention", format!("`{name}`"), format!("one of {}", names.join(", ")))
        })
    }

    /// Whether kernels of the convention dequantize codes before the product, so that any weight
    /// type is possible; otherwise the codes of two 8-bit operands enter the product.
    pub const fn dequantizes(self) -> bool {
        match self {
            Self::Marlin | Self::Stepwise | Self::Canonical | Self::Unrounded => true,
            Self::W8a8 => false,
        }
    }
}

/// The arithmetic of one product.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// The value of a code in the product.
    pub rule: Rule,
    /// Weights enter multiplied by 2^power, and the scales after the sum by 2^−power, as in kernels
    /// that move bits instead of converting them.
    pub power: i32,
    /// Whether the bits of 8-bit floats are moved and not converted, so that e4m3's NaN codes are
    /// ±480: see [`super::WeightColumns::moving_bits`].
    pub moves_bits: bool,
    /// The epilogue of the f32 sum, as in a schedule.
    pub steps: Vec<schedule::Step>,
    /// Whether a kernel may multiply by the scales of row, column and router in any order.
    pub any_order: bool,
    /// Type of activations and output.
    pub dtype: ScalarType,
    /// Type of both factors in the unit: `dtype`, or the type of 8-bit activations. Integers count
    /// as e4m3, since no bound for integers depends on it.
    pub operands: ScalarType,
}

/// The operands of a product besides the matrices.
#[derive(Debug, Clone, Copy, Default)]
pub struct Extras<'e> {
    /// A scale for each row of activations (int8 activations).
    pub activation_scales: Option<&'e [f32]>,
    /// A router weight for each row.
    pub router_weights: Option<&'e [f32]>,
}

impl Recipe {
    /// The recipe of a convention for one matrix.
    ///
    /// # Errors
    /// Returns an error unless activations are float16 or bfloat16.
    pub fn new(
        convention: Convention,
        weight: &Weight<'_>,
        dtype: ScalarType,
        extras: Extras<'_>,
    ) -> Result<Self> {
        if !matches!(dtype, ScalarType::FLOAT16 | ScalarType::BFLOAT16) {
            return Err(Error::unsupported(
                format!("activations of {dtype}"),
                "float16 or bfloat16",
            ));
        }
        let recipe = match convention {
            Convention::Marlin => Self::marlin(weight, dtype, extras),
            Convention::Stepwise => Self::canonical(weight, dtype, extras)?.rounding_each(),
            Convention::Canonical => Self::canonical(weight, dtype, extras)?,
            Convention::Unrounded => {
                let canonical = Self::canonical(weight, dtype, extras)?;
                match canonical.rule {
                    Rule::Rounded(_) => Self { rule: Rule::Exact, ..canonical },
                    _ => canonical,
                }
            }
            Convention::W8a8 if weight.scales.rows() > 1 => {
                if extras.activation_scales.is_some() {
                    let what = format!("{}: groups of k under {}", weight.name, convention.name());
                    let reason = "activations that have a scale for each group, or none";
                    return Err(Error::unsupported(what, reason));
                }
                Self::scaled_blocks(dtype)
            }
            Convention::W8a8 => Self::scaled_codes(dtype),
        };
        let eight_bits = extras.activation_scales.is_some() || convention == Convention::W8a8;
        let operands = if eight_bits { ScalarType::FLOAT8_E4M3FN } else { dtype };
        Ok(Self { operands, ..recipe })
    }

    /// The recipe with the sum rounded before bias and router weight, which are applied in the
    /// output's type.
    fn rounding_each(mut self) -> Self {
        let (dtype, late) = (self.dtype, [StepOp::Bias, StepOp::RouterWeight]);
        let is_late = |s: &schedule::Step| late.contains(&s.op);
        let after: Vec<_> = self.steps.iter().copied().filter(is_late).collect();
        self.steps.retain(|s| !is_late(s));
        self.steps.extend(after.into_iter().map(|s| schedule::Step { ty: dtype, ..s }));
        self
    }

    /// Upstream's W8A8-FP8 kernels. Steps without an operand (no bias, no router weight) do nothing.
    fn scaled_codes(dtype: ScalarType) -> Self {
        let f32 = ScalarType::FLOAT32;
        let step = |op, ty| schedule::Step { op, ty };
        let steps = vec![
            step(StepOp::ActivationScale, f32),
            step(StepOp::ChannelScale, f32),
            step(StepOp::Bias, f32),
            step(StepOp::RouterWeight, f32),
            step(StepOp::Round, dtype),
        ];
        let (rule, operands) = (Rule::Unscaled, ScalarType::FLOAT8_E4M3FN);
        Self { rule, power: 0, moves_bits: false, steps, any_order: true, dtype, operands }
    }

    /// As [`Self::scaled_codes`], for scales of groups, which enter the sum.
    fn scaled_blocks(dtype: ScalarType) -> Self {
        let recipe = Self::scaled_codes(dtype);
        let scale =
            |s: &schedule::Step| matches!(s.op, StepOp::ActivationScale | StepOp::ChannelScale);
        let steps = recipe.steps.into_iter().filter(|s| !scale(s)).collect();
        Self { rule: Rule::Exact, steps, any_order: false, ..recipe }
    }

    /// Upstream's kernel (vLLM 0.21.0 `marlin_gemm`, `moe_wna16_marlin_gemm`).
    ///
    /// Group scales: w = round((q − z)·s) in the activation type. One scale for a column: w = q −
    /// z, and the scale multiplies the f32 sum (8-bit weights or activations) or the rounded one
    /// (4-bit weights). NVFP4's global scale multiplies the f32 sum or, if router weights are
    /// applied, the router weights. e4m3 codes are moved bit by bit: a NaN counts as ±480. Then the
    /// sum is rounded, and column scale, bias and router weight follow in the 16-bit type, column
    /// scale and bias with one rounding or two.
    fn marlin(weight: &Weight<'_>, dtype: ScalarType, extras: Extras<'_>) -> Self {
        let half = dtype == ScalarType::FLOAT16;
        let wide = weight.codes.bits() == 8;
        let fp8 = weight.ty == ScalarType::FLOAT8_E4M3FN;
        let by_column = weight.scales.rows() == 1;
        let power = match (by_column && fp8, weight.global_scale) {
            // e4m3's exponent field placed into the activation type's.
            (true, _) => {
                if half {
                    -8
                } else {
                    -120
                }
            }
            // e2m1's likewise, and the scales' 2^7.
            (_, Some(_)) => {
                if half {
                    -7
                } else {
                    -119
                }
            }
            _ => 0,
        };
        let rule = match extras.activation_scales {
            _ if by_column => Rule::Unscaled,
            // The scales are integers and multiply the integer sum of their group.
            Some(_) => Rule::Exact,
            None => Rule::Rounded(dtype),
        };
        let router = extras.router_weights.is_some();
        let mut steps = Vec::new();
        let mut step = |op, ty| steps.push(schedule::Step { op, ty });
        let f32 = ScalarType::FLOAT32;
        if extras.activation_scales.is_some() {
            step(StepOp::ActivationScale, f32);
        }
        // 8-bit weights or activations: in f32; else after the rounding.
        let early = wide || extras.activation_scales.is_some();
        if by_column && early {
            step(StepOp::ChannelScale, f32);
        }
        let folded = weight.global_scale.is_some() && router && weight.bias.is_none();
        if weight.global_scale.is_some() && !folded {
            step(StepOp::GlobalScale, f32);
        }
        step(StepOp::Round, dtype);
        // The compiler decides whether this is a multiply-add; an H200 computes both forms.
        match (by_column && !early, weight.bias.is_some()) {
            (true, true) => step(StepOp::ChannelScaleBiasMarlin, dtype),
            (true, false) => step(StepOp::ChannelScale, dtype),
            (false, true) => step(StepOp::Bias, dtype),
            (false, false) => {}
        }
        if folded {
            step(StepOp::RouterWeightGlobal, dtype);
        } else if router {
            step(StepOp::RouterWeight, dtype);
        }
        let operands = dtype;
        Self { rule, power, moves_bits: true, steps, any_order: false, dtype, operands }
    }

    /// The recipe of the canonical schedule. For 8-bit activations, int8 and FP8 differ only in the
    /// unit, which a recipe does not name.
    fn canonical(weight: &Weight<'_>, dtype: ScalarType, extras: Extras<'_>) -> Result<Self> {
        let eight_bits = extras.activation_scales.is_some();
        let input = if eight_bits { ScalarType::INT8 } else { dtype };
        Ok(Self::of_schedule(&schedule::Schedule::canonical(weight, dtype, input)?, dtype))
    }

    /// The recipe of a schedule, without the order of its additions.
    pub fn of_schedule(schedule: &schedule::Schedule, dtype: ScalarType) -> Self {
        let rule = match (schedule.weights.form, schedule.group_sum) {
            (schedule::WeightForm::Unscaled, Some(sum))
                if sum.scale != schedule::GroupScale::One =>
            {
                Rule::Exact
            }
            (schedule::WeightForm::Unscaled, _) => Rule::Unscaled,
            (schedule::WeightForm::Exact, _) => Rule::Exact,
            (schedule::WeightForm::Rounded, _) => Rule::Rounded(dtype),
        };
        let steps = schedule.steps().copied().collect();
        let power = schedule.weights.exponent;
        let operands = schedule.unit.a;
        Self { rule, power, moves_bits: false, steps, any_order: false, dtype, operands }
    }

    /// Whether both recipes use the same values of `weight` and the same unit.
    pub(super) fn sums_as(&self, other: &Self, weight: &Weight<'_>) -> bool {
        let of = |r: &Self| (r.rule, r.power, r.operands, r.dtype);
        let bits = self.moves_bits == other.moves_bits || !weight.has_nan_codes();
        of(self) == of(other) && bits
    }

    /// The columns of `weight` under this recipe, with rows in the order `order`, or as stored.
    ///
    /// # Errors
    /// As [`WeightColumns::new`].
    pub fn columns<'w>(
        &self,
        weight: &'w Weight<'w>,
        order: Option<&'w [u32]>,
    ) -> Result<WeightColumns<'w>> {
        let columns = WeightColumns::new(weight, self.rule, order)?;
        let columns = if self.moves_bits { columns.moving_bits() } else { columns };
        Ok(columns.times_power(self.power))
    }

    /// The chain of one element.
    pub fn chain(&self, weight: &Weight<'_>, extras: Extras<'_>, m: usize, n: usize) -> Chain {
        let row = |values: Option<&[f32]>| values.map(|v| f64::from(v[m]));
        let global = weight.global_scale.map(f64::from);
        // The first scale removes the power of two.
        let mut offset = f64::from(-self.power).exp2();
        let mut take = || std::mem::replace(&mut offset, 1.0);
        let steps = self.steps.iter().map(|step| {
            let multiply = |x: Option<f64>| Step::multiply(x.unwrap_or(1.0), step.ty);
            let made = match step.op {
                StepOp::Round => return Step::round(step.ty),
                StepOp::ChannelScale => multiply(Some(weight.scales.value(0, n) * take())),
                StepOp::ChannelScaleBias | StepOp::ChannelScaleBiasMarlin => {
                    let bias = weight.bias.as_ref().map_or(0.0, |b| b.value(0, n));
                    Step::multiply_add(weight.scales.value(0, n) * take(), bias, step.ty)
                }
                StepOp::GlobalScale => multiply(global.map(|g| g * take())),
                StepOp::ActivationScale => multiply(row(extras.activation_scales)),
                StepOp::ActivationScaleBias => {
                    let bias = weight.bias.as_ref().map_or(0.0, |b| b.value(0, n));
                    let scale = row(extras.activation_scales).unwrap_or(1.0);
                    Step::multiply_add(scale, bias, step.ty)
                }
                StepOp::Bias => {
                    let bias = weight.bias.as_ref().map_or(0.0, |b| b.value(0, n));
                    Step::add(bias, step.ty)
                }
                StepOp::RouterWeight => multiply(row(extras.router_weights)),
                StepOp::RouterWeightGlobal => {
                    let both = row(extras.router_weights).zip(global);
                    // The product is rounded to f32 before the step's type.
                    let step = multiply(both.map(|(r, g)| r * g * take()));
                    let rounded = round_half(ScalarType::FLOAT32, step.operand);
                    let narrow = Step::multiply(rounded, step.to).with_operand_in(step.to);
                    return Step { operand: step.operand, ..narrow };
                }
            };
            // A device stores an operand in the type of its step.
            made.with_operand_in(step.ty)
        });
        let mut steps: Vec<Step> = steps.collect();
        let scale =
            |s: &schedule::Step| matches!(s.op, StepOp::ActivationScale | StepOp::ChannelScale);
        // After the scales; the router weight has its own rounding.
        if self.any_order
            && let Some(last) = self.steps.iter().rposition(scale)
        {
            let scales = [row(extras.activation_scales), Some(weight.scales.value(0, n))];
            let router = row(extras.router_weights);
            let operands = scales.into_iter().chain([router]).flatten();
            steps.insert(last + 1, Step::any_order(operands));
        }
        Chain { steps }
    }
}
