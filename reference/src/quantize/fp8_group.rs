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
    /// scale = max(m, 1e-10) / 448, q = x / scale. vLLM's CUDA operator `per_token_group_fp8_quant`, SGLang's
    /// `sgl_per_token_group_quant_8bit`. A UE8M0 scale is at least 1e-10 before it is rounded up.
    #[default]
    Quotient,
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
        ("reciprocal", Self::Reciprocal),
        ("inverse", Self::Inverse),
        ("deep_ep", Self::DeepEp),
        ("deep_gemm", Self::DeepGemm),
    ];

    /// The scale of a group whose largest magnitude is `max`, and the factor or divisor of its values.
    fn scale(self, max: f32, ue8m0: bool) -> (f32, Code) {
        let least = if matches!(self, Self::DeepGemm | Self::DeepEp) { 1e-4 } else { 1e-10 };
        let max = max.max(least);
        let scale = match self {
            Self::Quotient | Self::DeepGemm => max / MAX,
            Self::Reciprocal | Self::Inverse | Self::DeepEp => max * (1.0 / MAX),
        };
        if ue8m0 {
            let least = if self == Self::Quotient { 1e-10 } else { 0.0 };
            let scale = ceil_to_ue8m0(scale.max(least));
            // A quotient by a power of two and a product with its inverse are the same.
            return (scale, Code::Divided(scale));
        }
        let code = match self {
            Self::Quotient | Self::Reciprocal => Code::Divided(scale),
            Self::Inverse | Self::DeepEp => Code::Multiplied(MAX / max),
            Self::DeepGemm => Code::Multiplied(1.0 / scale),
        };
        (scale, code)
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
    if group == 0 {
        return Err(Error::size("group of the activations", group, "1 or more"));
    }
    let x = x.into();
    let (rows, (x, _)) = (x.shape()[0], finite_rows(&x, group)?);
    let (mut codes, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    for values in x.chunks_exact(group) {
        let (scale, code) = rule.scale(absmax(values), ue8m0);
        codes.extend(values.iter().map(|v| {
            E4m3fn::from_f32_rne_saturating(match code {
                Code::Divided(by) => v / by,
                Code::Multiplied(by) => v * by,
            })
        }));
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
