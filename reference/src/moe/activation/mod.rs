//! The activation between the two products of an expert: a row of `gate_up` to a row of
//! `activated`.
//!
//! Every kind is one [`Definition`]: value = F(gate), perhaps limited, times up, perhaps limited
//! and shifted. [`Chain`] names two computations; [`bound`] covers other implementations.
//!
//! | kind | F(g) | limits | times | columns |
//! | --- | --- | --- | --- | --- |
//! | `silu` | g / (1 + e^−g) | optional: g ≤ l, −l ≤ u ≤ l | u | gate, then up |
//! | `gelu` | ½·g · (1 + erf(g·√½)) | – | u | gate, then up |
//! | `gelu_tanh` | ½·g · (1 + tanh(√(2/π)·(g + 0.044715·g³))) | – | u | gate, then up |
//! | `relu2` | max(g, 0)² | – | u | gate, then up |
//! | `swigluoai` | g / (1 + e^−(α·g)), α = 1.702 | g ≤ l, −l ≤ u ≤ l, l = 7 | u + 1 | gate even, up odd |
//! | `swiglustep` | g / (1 + e^−g) | F ≤ l, −l ≤ u ≤ l, l = 7 | u | gate, then up |
//! | `…_no_mul` | as without the suffix | – | – | gate alone: N of w13 is I |
//!
//! # NaN, infinities, zeros
//!
//! A NaN gives NaN (bits 0x7FFF), also through a limit. (Upstream's limits return the other
//! operand: there, a NaN becomes the limit. [`Chain::Upstream`] follows upstream, and the bound
//! allows both.) A gate of −∞ gives NaN (−∞/∞, −∞ · 0) except in `relu2`, where it is zero; 0 · ∞
//! is NaN. A gate of −0 gives a value of −0 (`relu2`: +0), and products have the usual sign; +0 and
//! −0 are the same number to a bound. Upstream's `swigluoai` multiplies u + 1 with g first: a bf16
//! gate below −4·10^37 may give NaN.
//!
//! Source: vLLM 0.21.0 `fused_moe/activation.py`, `layers/activation.py` and the operators
//! `silu_and_mul`, `silu_and_mul_with_clamp`, `gelu_and_mul`, `gelu_tanh_and_mul` and
//! `swigluoai_and_mul`.

pub mod bound;
mod chain;
mod exact;

use super::Chain;
use crate::named::named;
use crate::num::array::{FloatView2, HalfArray2};
use crate::num::scalar::ScalarType;
use crate::{Error, Result};

/// The default limit of `swigluoai` and `swiglustep`.
pub const LIMIT: f32 = 7.0;
/// The factor inside `swigluoai`'s sigmoid.
pub const ALPHA: f32 = 1.702;

named! {
    /// The activations between the two products of a MoE layer, by upstream's names.
    Activation {
        /// SiLU of the gate times up.
        Silu "silu",
        /// GELU (erf) of the gate times up.
        Gelu "gelu",
        /// GELU (tanh) of the gate times up.
        GeluTanh "gelu_tanh",
        /// Squared ReLU.
        Relu2 "relu2",
        /// gpt-oss: clamped, gate and up interleaved.
        SwigluOai "swigluoai",
        /// Clamped SiLU of the gate times clamped up.
        SwigluStep "swiglustep",
        /// SiLU of the gate; there is no up.
        SiluNoMul "silu_no_mul",
        /// GELU (erf) of the gate; there is no up.
        GeluNoMul "gelu_no_mul",
        /// GELU (tanh) of the gate; there is no up.
        GeluTanhNoMul "gelu_tanh_no_mul",
        /// Squared ReLU of the gate; there is no up.
        Relu2NoMul "relu2_no_mul",
    }
}

impl Activation {
    /// Whether a gate is multiplied with an up projection: then N of w13 is 2I, else I.
    pub const fn is_gated(self) -> bool {
        !matches!(self, Self::SiluNoMul | Self::GeluNoMul | Self::GeluTanhNoMul | Self::Relu2NoMul)
    }
}

/// The function of the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    /// g / (1 + e^−(α·g)).
    Silu,
    /// ½·g · (1 + erf(g·√½)).
    Gelu,
    /// ½·g · (1 + tanh(√(2/π)·(g + 0.044715·g³))).
    GeluTanh,
    /// max(g, 0)².
    Relu2,
}

/// The positions of gate and up in a row of `gate_up`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Columns {
    /// I columns of gate, then I of up.
    Halves,
    /// Gate in the even columns, up in the odd ones.
    Interleaved,
    /// Only gate.
    Gate,
}

/// An activation with its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Definition {
    /// Function of the gate.
    pub function: Function,
    /// Factor inside [`Function::Silu`]'s exponential, positive; 1 for plain SiLU.
    pub alpha: f32,
    /// Upper limit of the gate.
    pub gate_limit: Option<f32>,
    /// Upper limit of F(gate).
    pub value_limit: Option<f32>,
    /// Limit of up on both sides.
    pub up_limit: Option<f32>,
    /// Added to up, after its limits; with 0 nothing is added.
    pub up_shift: f32,
    /// Row layout.
    pub columns: Columns,
    /// Whether gate and up are exchanged; false in all of upstream's kinds.
    pub exchanged: bool,
}

impl Definition {
    /// Upstream's activation of this name, with its default parameters.
    pub fn new(activation: Activation) -> Self {
        use Activation as A;
        let plain = Self {
            function: Function::Silu,
            alpha: 1.0,
            gate_limit: None,
            value_limit: None,
            up_limit: None,
            up_shift: 0.0,
            columns: if activation.is_gated() { Columns::Halves } else { Columns::Gate },
            exchanged: false,
        };
        match activation {
            A::Silu | A::SiluNoMul => plain,
            A::Gelu | A::GeluNoMul => Self { function: Function::Gelu, ..plain },
            A::GeluTanh | A::GeluTanhNoMul => Self { function: Function::GeluTanh, ..plain },
            A::Relu2 | A::Relu2NoMul => Self { function: Function::Relu2, ..plain },
            A::SwigluOai => Self {
                alpha: ALPHA,
                gate_limit: Some(LIMIT),
                up_limit: Some(LIMIT),
                up_shift: 1.0,
                columns: Columns::Interleaved,
                ..plain
            },
            A::SwigluStep => Self { value_limit: Some(LIMIT), up_limit: Some(LIMIT), ..plain },
        }
    }

    /// Replaces the limit of a kind that has one; plain gated SiLU gets the limits of
    /// `silu_and_mul_with_clamp` (gate from above, up on both sides).
    pub fn with_limit(mut self, limit: f32) -> Self {
        match (self.gate_limit, self.value_limit) {
            (_, Some(_)) => self.value_limit = Some(limit),
            _ => self.gate_limit = Some(limit),
        }
        self.up_limit = Some(limit);
        self
    }

    /// Columns of a `gate_up` row of this many `activated` columns.
    pub fn width_in(&self, size_i: usize) -> usize {
        if self.columns == Columns::Gate { size_i } else { 2 * size_i }
    }

    /// Columns of gate and up (of gate alone: twice the same) for column `i` of `size_i`.
    pub fn places(&self, i: usize, size_i: usize) -> [usize; 2] {
        let [gate, up] = match self.columns {
            Columns::Halves => [i, size_i + i],
            Columns::Interleaved => [2 * i, 2 * i + 1],
            Columns::Gate => [i, i],
        };
        if self.exchanged { [up, gate] } else { [gate, up] }
    }

    /// Whether there is an up projection.
    pub fn is_gated(&self) -> bool {
        self.columns != Columns::Gate
    }

    /// Checks that α is positive, limits are not negative, and all parameters are finite.
    ///
    /// # Errors
    /// [`Error::Size`] naming the parameter.
    pub fn validate(&self) -> Result<()> {
        let refuse = |what: &str, found: f32, rule: &str| Err(Error::size(what, found, rule));
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            return refuse("alpha", self.alpha, "a positive finite number");
        }
        let limits = [self.gate_limit, self.value_limit, self.up_limit];
        if let Some(l) = limits.into_iter().flatten().find(|l| !(l.is_finite() && *l >= 0.0)) {
            return refuse("limit", l, "a finite number that is not negative");
        }
        if !self.up_shift.is_finite() {
            return refuse("up_shift", self.up_shift, "a finite number");
        }
        Ok(())
    }

    /// `activated` `[rows, I]` of `gate_up` `[rows, `[`width_in(I)`](Definition::width_in)`]`, f16 or
    /// bf16.
    ///
    /// # Errors
    /// [`Error::Shape`] when gate and up do not fill a row; [`Error::Unsupported`] for f32 and where
    /// upstream has no such operator; [`Error::Size`] as [`Definition::validate`].
    ///
    /// ```
    /// use marlinspike::moe::Chain;
    /// use marlinspike::moe::activation::{Activation, Definition};
    /// use marlinspike::num::element::bf16;
    /// use ndarray::array;
    ///
    /// // Two columns of gate, then two of up.
    /// let gate_up = array![[0.0f32, 20.0, 3.0, -1.0]].mapv(bf16::from_f32);
    /// let silu = Definition::new(Activation::Silu);
    /// let activated = silu.apply(gate_up.view(), Chain::Canonical)?.into_array::<bf16>()?;
    /// assert_eq!(activated, array![[0.0f32, -20.0]].mapv(bf16::from_f32));
    /// # Ok::<(), marlinspike::Error>(())
    /// ```
    pub fn apply<'a>(
        &self,
        gate_up: impl Into<FloatView2<'a>>,
        chain: Chain,
    ) -> Result<HalfArray2> {
        let gate_up = gate_up.into();
        let (ty, rows) = (gate_up.scalar_type(), gate_up.shape()[0]);
        let size_i = self.size_i(gate_up.shape())?;
        let activated = self.apply_bits(&gate_up.bits_of("gate_up", ty)?, ty, size_i, chain)?;
        HalfArray2::from_bits("activated", ty, [rows, size_i], activated)
    }

    /// I of `gate_up` of this shape.
    fn size_i(&self, gate_up: &[usize]) -> Result<usize> {
        let size_i = gate_up[1] / self.width_in(1);
        if size_i == 0 || self.width_in(size_i) != gate_up[1] {
            let rule = format!("columns in multiples of {}, 1 or more", self.width_in(1));
            return Err(Error::shape("gate_up", gate_up, rule));
        }
        Ok(size_i)
    }

    /// [`Definition::apply`] of bits of `ty`, row-major.
    pub(crate) fn apply_bits(
        &self,
        gate_up: &[u16],
        ty: ScalarType,
        size_i: usize,
        chain: Chain,
    ) -> Result<Vec<u16>> {
        self.validate()?;
        super::half_type(ty)?;
        let width = self.width_in(size_i);
        if width == 0 || !gate_up.len().is_multiple_of(width) {
            let rule = format!("rows of {width} columns");
            return Err(Error::shape("gate_up", &[gate_up.len()], rule));
        }
        let one = self.element(ty, chain)?;
        let mut out = Vec::with_capacity(gate_up.len() / width * size_i);
        for row in gate_up.chunks_exact(width) {
            for i in 0..size_i {
                let [gate, up] = self.places(i, size_i);
                let (gate, up) = (super::widen(ty, row[gate]), super::widen(ty, row[up]));
                out.push(super::narrow(ty, one(gate, up)));
            }
        }
        Ok(out)
    }
}
