//! e4m3fn activations with a scale for each group of k of a row.

use super::{Quantized, absmax, finite_rows, matrix};
use crate::num::array::FloatView2;
use crate::num::element::E4m3fn;
use crate::{Error, Result};

/// e4m3fn's largest value.
const MAX: f32 = 448.0;

/// The f32 operations of a kernel that quantizes groups to e4m3fn. m is the group's largest magnitude,
/// every operation is rounded once, and codes saturate and round to nearest even.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Fp8GroupRule {
    /// scale = max(m, 1e-10) / 448, q = x / scale. The CUDA operator `per_token_group_fp8_quant` of vLLM 0.21.0,
    /// SGLang's `sgl_per_token_group_quant_8bit`. A UE8M0 scale is at least 1e-10 before it is rounded up.
    #[default]
    Quotient,
    /// As [`Self::Quotient`], with q = x · fl(1 / scale): the same operator of vLLM 0.33.0.
    ScaleInverse,
    /// scale = max(m, 1e-10) · fl(1 / 448), q = x / scale: a Triton kernel, compiled for a constant 448.
    Reciprocal,
    /// scale = max(m, 1e-10) · fl(1 / 448), q = x · fl(448 / max(m, 1e-10)): SGLang's second kernel.
    Inverse,
    /// As [`Self::Inverse`], with max(m, 1e-4): DeepEP's low-latency dispatch.
    DeepEp,
    /// scale = max(m, 1e-4) / 448, q = x · fl(1 / scale): DeepGEMM's `per_token_cast_to_fp8`.
    DeepGemm,
}

impl Fp8GroupRule {
    /// Every rule with its name.
    pub const NAMED: &'static [(&'static str, Self)] = &[
        ("quotient", Self::Quotient),
        ("scale_inverse", Self::ScaleInverse),
        ("reciprocal", Self::Reciprocal),
        ("inverse", Self::Inverse),
        ("deep_ep", Self::DeepEp),
        ("deep_gemm", Self::DeepGemm),
    ];

    /// The rule's operations.
    pub fn operations(self) -> Fp8GroupOperations {
        let (least, scale, code) = match self {
            Self::Quotient => (1e-10, ScaleBy::Quotient, CodeBy::Quotient),
            Self::ScaleInverse => (1e-10, ScaleBy::Quotient, CodeBy::ScaleReciprocal),
            Self::Reciprocal => (1e-10, ScaleBy::Reciprocal, CodeBy::Quotient),
            Self::Inverse => (1e-10, ScaleBy::Reciprocal, CodeBy::MaxReciprocal),
            Self::DeepEp => (1e-4, ScaleBy::Reciprocal, CodeBy::MaxReciprocal),
            Self::DeepGemm => (1e-4, ScaleBy::Quotient, CodeBy::ScaleReciprocal),
        };
        let least_ue8m0 = match self {
            Self::Quotient | Self::ScaleInverse => 1e-10,
            _ => 0.0,
        };
        Fp8GroupOperations { least, least_ue8m0, scale, code }
    }
}

/// The operations of a [`Fp8GroupRule`], of which a kernel may have another mixture by mistake.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fp8GroupOperations {
    /// The least magnitude that a group counts as.
    pub least: f32,
    /// The least scale before it is rounded up to a power of two.
    pub least_ue8m0: f32,
    /// How a magnitude becomes a scale.
    pub scale: ScaleBy,
    /// How a value becomes a code.
    pub code: CodeBy,
}

/// How the largest magnitude m of a group becomes its scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleBy {
    /// m / 448.
    Quotient,
    /// m · fl(1 / 448).
    Reciprocal,
}

/// How a value x becomes a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeBy {
    /// x / scale.
    Quotient,
    /// x · fl(1 / scale).
    ScaleReciprocal,
    /// x · fl(448 / m).
    MaxReciprocal,
}

impl Fp8GroupOperations {
    /// The scale of a group whose largest magnitude is `max`, and the factor or divisor of its values.
    fn scale(self, max: f32, ue8m0: bool) -> (f32, Code) {
        let max = max.max(self.least);
        let scale = match self.scale {
            ScaleBy::Quotient => max / MAX,
            ScaleBy::Reciprocal => max * (1.0 / MAX),
        };
        if ue8m0 {
            let scale = ceil_to_ue8m0(scale.max(self.least_ue8m0));
            // A quotient by a power of two and a product with its inverse are the same.
            return (scale, Code::Divided(scale));
        }
        let code = match self.code {
            CodeBy::Quotient => Code::Divided(scale),
            CodeBy::ScaleReciprocal => Code::Multiplied(1.0 / scale),
            CodeBy::MaxReciprocal => Code::Multiplied(MAX / max),
        };
        (scale, code)
    }

    /// The scale and the codes of a group that may have infinities and NaN: a NaN does not count for the
    /// scale, and what no quotient has, `fminf(fmaxf(v, -448), 448)`, becomes the code of -448.
    pub(crate) fn of_group(self, x: &[f32], ue8m0: bool) -> (f32, Vec<E4m3fn>) {
        let max = absmax(x);
        if max.is_finite() {
            let (scale, mut codes) = self.quantize(max, ue8m0, x);
            let nan = x.iter().zip(&mut codes).filter(|(v, _)| v.is_nan());
            nan.for_each(|(_, code)| *code = E4m3fn::from_bits(0xfe));
            return (scale, codes);
        }
        let code = |v: &f32| match v.is_finite() {
            true => E4m3fn::from_bits(if v.is_sign_negative() { 0x80 } else { 0 }),
            false => E4m3fn::from_bits(0xfe),
        };
        (f32::INFINITY, x.iter().map(code).collect())
    }

    /// The scale of a group whose largest magnitude is `max`, and the codes of `values` in it.
    pub(crate) fn quantize(self, max: f32, ue8m0: bool, values: &[f32]) -> (f32, Vec<E4m3fn>) {
        let (scale, code) = self.scale(max, ue8m0);
        let code = |v: &f32| {
            E4m3fn::from_f32_rne_saturating(match code {
                Code::Divided(by) => v / by,
                Code::Multiplied(by) => v * by,
            })
        };
        (scale, values.iter().map(code).collect())
    }
}

/// How a value becomes a code.
#[derive(Clone, Copy)]
enum Code {
    Divided(f32),
    Multiplied(f32),
}

/// The smallest power of two that is not below a positive `scale`, from 2^-126 to 2^127.
///
/// Upstream: `ceil_to_ue8m0` of DeepGEMM; `exp2(ceil(log2(scale)))` in other kernels.
pub fn ceil_to_ue8m0(scale: f32) -> f32 {
    let bits = scale.to_bits() & 0x7fff_ffff;
    let exponent = (bits >> 23) + u32::from(bits & 0x7f_ffff != 0);
    f32::from_bits(exponent.clamp(1, 254) << 23)
}

/// e4m3fn codes, and a scale for each `group` values of a row, by `rule`; with `ue8m0` the scales are
/// rounded up to powers of two ([`ceil_to_ue8m0`]). Scales are `[rows, cols / group]`.
///
/// # Errors
/// [`Error::Size`]: not rows of whole groups; [`Error::Value`]: not finite.
pub fn per_group_fp8_with<'a>(
    x: impl Into<FloatView2<'a>>,
    group: usize,
    rule: Fp8GroupRule,
    ue8m0: bool,
) -> Result<Quantized<E4m3fn>> {
    per_group_fp8_by(x, group, rule.operations(), ue8m0)
}

/// [`per_group_fp8_with`] by any mixture of `operations`.
///
/// # Errors
/// As [`per_group_fp8_with`].
pub fn per_group_fp8_by<'a>(
    x: impl Into<FloatView2<'a>>,
    group: usize,
    operations: Fp8GroupOperations,
    ue8m0: bool,
) -> Result<Quantized<E4m3fn>> {
    if group == 0 {
        return Err(Error::size("group of the activations", group, "1 or more"));
    }
    let x = x.into();
    let (rows, (x, _)) = (x.shape()[0], finite_rows(&x, group)?);
    let (mut codes, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    for values in x.chunks_exact(group) {
        let (scale, own) = operations.quantize(absmax(values), ue8m0, values);
        codes.extend(own);
        scales.push(scale);
    }
    Ok(Quantized { codes: matrix(rows, codes), scales: matrix(rows, scales) })
}

/// [`per_group_fp8_with`] by [`Fp8GroupRule::Reciprocal`], with scales that are not rounded.
///
/// Upstream: `per_token_group_quant_fp8` (vLLM 0.21.0, its Triton kernel, which multiplies with the
/// rounded reciprocal), for weights in blocks.
///
/// # Errors
/// As [`per_group_fp8_with`].
pub fn per_group_fp8<'a>(x: impl Into<FloatView2<'a>>, group: usize) -> Result<Quantized<E4m3fn>> {
    per_group_fp8_with(x, group, Fp8GroupRule::Reciprocal, false)
}
