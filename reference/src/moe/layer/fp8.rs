//! The layer whose weights and activations are e4m3fn (W8A8): activations get one static scale, or one
//! for each row, before either product.
//!
//! Source: vLLM 0.21.0 `moe_kernel_quantize_input` with `static_scaled_fp8_quant` and
//! `dynamic_per_token_scaled_fp8_quant`.

use super::{Arithmetic, Layer, Routed, Rows, quantize_rows};
use crate::moe::widen;
use crate::scalar::{ScalarType, f32_to_e4m3fn_rne_saturating};
use crate::{Error, Result};

/// Where the scales of activations come from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fp8Activations {
    /// Each row's own: [`crate::quantize::per_token_fp8`].
    PerToken,
    /// One for all that enters w13, one for all that enters w2: q = e4m3(x · fl(1 / scale)), limited to
    /// ±448. As upstream's `fmin` and `fmax` have it, infinities become ±448 and a NaN 448.
    Static {
        /// Of x.
        w13: f32,
        /// Of `activated`.
        w2: f32,
    },
}

/// Quantized rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8Rows {
    /// `[rows, cols]` e4m3fn.
    pub codes: Vec<u8>,
    /// One for each row, equal where it is static.
    pub scales: Vec<f32>,
}

/// A layer of e4m3fn weights, with scales for the whole matrix or for each column.
#[derive(Debug, Clone, Copy)]
pub struct Fp8Layer<'w> {
    /// Everything but the scales of activations; its `input_dtype` is not read.
    pub layer: Layer<'w>,
    /// The scales of activations.
    pub activations: Fp8Activations,
}

/// The stages of the layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8Stages {
    /// x, quantized: `[M, H]`.
    pub a1q: Fp8Rows,
    /// `[M·top_k, N of w13]`, bits of the layer's `dtype`.
    pub gate_up: Vec<u16>,
    /// `[M·top_k, I]`.
    pub activated: Vec<u16>,
    /// `activated`, quantized.
    pub a2q: Fp8Rows,
    /// `[M·top_k, H]`.
    pub down: Vec<u16>,
    /// `[M, H]`.
    pub y: Vec<u16>,
}

impl Fp8Layer<'_> {
    /// Computes the layer of `x` `[M, H]`, bits of `dtype`.
    ///
    /// # Errors
    /// As [`Layer::forward`]; [`Error::Size`] for a static scale that is not positive and finite.
    pub fn forward(&self, x: &[u16], routed: Routed<'_>, how: &Arithmetic) -> Result<Fp8Stages> {
        let a1q = self.quantize_x(x)?;
        let gate_up = self.gate_up(&a1q, routed, how)?;
        let activated = self.layer.activate(&gate_up, how.chain)?;
        let a2q = self.quantize_activated(&activated)?;
        let down = self.down(&a2q, routed, how)?;
        let y = self.layer.sum(&down, routed.top_k, how.chain)?;
        Ok(Fp8Stages { a1q, gate_up, activated, a2q, down, y })
    }

    /// `a1q` of `x` `[M, H]`.
    ///
    /// # Errors
    /// As [`Fp8Layer::forward`].
    pub fn quantize_x(&self, x: &[u16]) -> Result<Fp8Rows> {
        let scale = match self.activations {
            Fp8Activations::PerToken => None,
            Fp8Activations::Static { w13, .. } => Some(w13),
        };
        self.quantize(x, self.layer.hidden_size(), scale)
    }

    /// `a2q` of `activated` `[M·top_k, I]`.
    ///
    /// # Errors
    /// As [`Fp8Layer::forward`].
    pub fn quantize_activated(&self, activated: &[u16]) -> Result<Fp8Rows> {
        let scale = match self.activations {
            Fp8Activations::PerToken => None,
            Fp8Activations::Static { w2, .. } => Some(w2),
        };
        self.quantize(activated, self.layer.intermediate_size(), scale)
    }

    /// `gate_up` of `a1q`.
    ///
    /// # Errors
    /// As [`Fp8Layer::forward`].
    pub fn gate_up(&self, a1q: &Fp8Rows, routed: Routed<'_>, how: &Arithmetic) -> Result<Vec<u16>> {
        self.layer.validate()?;
        let experts = self.layer.local_experts(routed)?;
        let router = self.layer.router_weight_on_input.then_some(routed.topk_weights);
        let rows = a1q.rows().repeated(self.layer.hidden_size(), routed.top_k);
        self.layer.multiply(&rows, 0, &experts, router, &how.w13)
    }

    /// `down` of `a2q`.
    ///
    /// # Errors
    /// As [`Fp8Layer::forward`].
    pub fn down(&self, a2q: &Fp8Rows, routed: Routed<'_>, how: &Arithmetic) -> Result<Vec<u16>> {
        self.layer.validate()?;
        let experts = self.layer.local_experts(routed)?;
        let router = (!self.layer.router_weight_on_input).then_some(routed.topk_weights);
        self.layer.multiply(&a2q.rows(), 1, &experts, router, &how.w2)
    }

    fn quantize(&self, x: &[u16], cols: usize, scale: Option<f32>) -> Result<Fp8Rows> {
        let dtype = self.layer.dtype;
        let Some(scale) = scale else {
            let rows = quantize_rows(x, dtype, Some(ScalarType::FLOAT8_E4M3FN), cols, 1.0)?;
            let codes = rows.codes.iter().map(|&c| c as u8).collect();
            return Ok(Fp8Rows { codes, scales: rows.scales.unwrap_or_default() });
        };
        if !(scale.is_finite() && scale > 0.0) {
            return Err(Error::size("scale of activations", scale, "a positive finite number"));
        }
        if cols == 0 || !x.len().is_multiple_of(cols) {
            return Err(Error::shape("activations", &[x.len()], format!("rows of {cols}")));
        }
        let reciprocal = 1.0 / scale;
        let code = |&bits: &u16| {
            let scaled = widen(dtype, bits) * reciprocal;
            let limited = if scaled.is_nan() { 448.0 } else { scaled.clamp(-448.0, 448.0) };
            f32_to_e4m3fn_rne_saturating(limited)
        };
        Ok(Fp8Rows { codes: x.iter().map(code).collect(), scales: vec![scale; x.len() / cols] })
    }
}

impl Fp8Rows {
    fn rows(&self) -> Rows {
        let codes = self.codes.iter().map(|&c| c.into()).collect();
        Rows { codes, scales: Some(self.scales.clone()) }
    }
}
