//! How a product's numbers come about, by name: which number stands for a weight, and the chain
//! of scales, bias and roundings after the sum.

use super::chain::{Chain, Step};
use super::columns::Rule;
use crate::scalar::ScalarType;
use crate::weight::Weight;
use crate::{Error, Result};

/// The conventions that the reference knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Convention {
    /// Upstream's Marlin kernels: group scales are multiplied into the weight in the activation
    /// type; scales of whole columns, bias and router weight multiply the sum after it was
    /// rounded, each with its own rounding.
    #[default]
    Marlin,
    /// The project's own: weights as in Marlin, everything after the sum in f32, and one rounding
    /// at the end.
    Canonical,
    /// As canonical, and the weights are not rounded: (q − z)·s enters the product exactly.
    Unrounded,
}

impl Convention {
    /// Every convention with its name.
    pub const NAMED: &'static [(&'static str, Self)] =
        &[("marlin", Self::Marlin), ("canonical", Self::Canonical), ("unrounded", Self::Unrounded)];
}

/// Where a step's operand comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The scale of the column.
    ColumnScale,
    /// The matrix's global scale.
    GlobalScale,
    /// The scale of the row's activations.
    ActivationScale,
    /// The bias of the column.
    Bias,
    /// The router weight of the row.
    RouterWeight,
    /// Router weight times global scale.
    RouterTimesGlobal,
}

/// A step of the chain, before it is known which element it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Times an operand, rounded to a type.
    Multiply(Source, ScalarType),
    /// Plus an operand, rounded to a type.
    Add(Source, ScalarType),
    /// Rounded to a type.
    Round(ScalarType),
}

/// How the elements of one product are computed.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// What enters the product for a code.
    pub rule: Rule,
    /// The weights that enter are 2^power of what they stand for, and the scales after the sum
    /// 2^−power: kernels that move bits instead of converting them work at such an offset.
    pub power: i32,
    /// After the sum, which is an f32.
    pub operations: Vec<Operation>,
    /// Type of activations and output.
    pub dtype: ScalarType,
}

/// What the case gives beside the matrices.
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
    /// When the type of activations is not float16 or bfloat16.
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
        Ok(match convention {
            Convention::Marlin => Self::marlin(weight, dtype, extras),
            Convention::Canonical => Self::canonical(weight, dtype, extras, Rule::Rounded(dtype)),
            Convention::Unrounded => Self::canonical(weight, dtype, extras, Rule::Exact),
        })
    }

    /// Upstream's kernel (vLLM 0.21.0 `marlin_gemm`, `moe_wna16_marlin_gemm`).
    ///
    /// Group scales: w = round((q − z)·s) in the activation type. One scale for a column: w = q − z,
    /// and the scale multiplies the f32 sum (8-bit weights or activations) or the rounded one (4-bit
    /// weights).
    /// NVFP4's global scale multiplies the f32 sum, or where router weights are applied enters them.
    /// Then the sum is rounded, and column scale, bias and router weight follow in the 16-bit type.
    fn marlin(weight: &Weight<'_>, dtype: ScalarType, extras: Extras<'_>) -> Self {
        use Operation::{Add, Multiply, Round};
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
        let mut operations = Vec::new();
        if extras.activation_scales.is_some() {
            operations.push(Multiply(Source::ActivationScale, ScalarType::FLOAT32));
        }
        // 8-bit weights or activations: in f32; else after the rounding.
        let early = wide || extras.activation_scales.is_some();
        if by_column && early {
            operations.push(Multiply(Source::ColumnScale, ScalarType::FLOAT32));
        }
        let folded = weight.global_scale.is_some() && router && weight.bias.is_none();
        if weight.global_scale.is_some() && !folded {
            operations.push(Multiply(Source::GlobalScale, ScalarType::FLOAT32));
        }
        operations.push(Round(dtype));
        if by_column && !early {
            operations.push(Multiply(Source::ColumnScale, dtype));
        }
        if weight.bias.is_some() {
            operations.push(Add(Source::Bias, dtype));
        }
        if folded {
            operations.push(Multiply(Source::RouterTimesGlobal, dtype));
        } else if router {
            operations.push(Multiply(Source::RouterWeight, dtype));
        }
        Self { rule, power, operations, dtype }
    }

    fn canonical(weight: &Weight<'_>, dtype: ScalarType, extras: Extras<'_>, rule: Rule) -> Self {
        use Operation::{Add, Multiply, Round};
        let f32 = ScalarType::FLOAT32;
        let by_column = weight.scales.rows() == 1;
        let mut operations = Vec::new();
        if extras.activation_scales.is_some() {
            operations.push(Multiply(Source::ActivationScale, f32));
        }
        if by_column {
            operations.push(Multiply(Source::ColumnScale, f32));
        }
        if weight.global_scale.is_some() {
            operations.push(Multiply(Source::GlobalScale, f32));
        }
        if weight.bias.is_some() {
            operations.push(Add(Source::Bias, f32));
        }
        if extras.router_weights.is_some() {
            operations.push(Multiply(Source::RouterWeight, f32));
        }
        operations.push(Round(dtype));
        let rule = if by_column { Rule::Unscaled } else { rule };
        Self { rule, power: 0, operations, dtype }
    }

    /// The chain of one element.
    pub fn chain(&self, weight: &Weight<'_>, extras: Extras<'_>, m: usize, n: usize) -> Chain {
        let of = |values: Option<&[f32]>| values.map_or(1.0, |v| f64::from(v[m]));
        let global = f64::from(weight.global_scale.unwrap_or(1.0));
        // The scale that comes first takes the power of two back.
        let mut offset = f64::from(-self.power).exp2();
        let mut operand = |source: Source| match source {
            Source::ColumnScale => weight.scales.value(0, n) * std::mem::replace(&mut offset, 1.0),
            Source::GlobalScale => global * std::mem::replace(&mut offset, 1.0),
            Source::ActivationScale => of(extras.activation_scales),
            Source::Bias => weight.bias.as_ref().map_or(0.0, |b| b.value(0, n)),
            Source::RouterWeight => of(extras.router_weights),
            Source::RouterTimesGlobal => {
                of(extras.router_weights) * global * std::mem::replace(&mut offset, 1.0)
            }
        };
        let steps = self.operations.iter().map(|operation| match *operation {
            Operation::Multiply(source, to) => {
                let step = Step::multiply(operand(source), to);
                // The kernel holds router weights in the activation type.
                let narrow = to != ScalarType::FLOAT32;
                if narrow { step.with_operand_in(self.dtype) } else { step }
            }
            Operation::Add(source, to) => Step::add(operand(source), to),
            Operation::Round(to) => Step::round(to),
        });
        Chain { steps: steps.collect() }
    }
}
