//! gpt-oss's experts as checkpoints store them: MXFP4 weights times f32 activations. A converted
//! folder's experts quantize activations to int8 instead.
//!
//! A weight is e2m1 times a power of two for each 32 values along K, which f32 holds exactly. A
//! product is therefore [`Dense`](crate::ops::dense::Dense)'s on the expanded weights, to the bit.

mod product;

use std::borrow::Cow;

use marlinspike::moe::activation::Definition;
use marlinspike::moe::layer::Routed;

use super::Workspaces;
use super::stack::{ExpertStack, each_expert};
use crate::error::{GenerateError, Result};
use crate::ops::swiglu_oai;
use crate::weights::Weights;
use product::{BLOCK, Matrix};

/// Matrices of all experts: `[E, N, K]`.
#[derive(Debug)]
struct Matrices<'f> {
    /// Two codes in a byte, `[E, N, K / 2]`.
    codes: Cow<'f, [u8]>,
    /// e8m0, `[E, N, K / 32]`.
    scales: Cow<'f, [u8]>,
    /// `[E, N]`.
    bias: Vec<f32>,
    size_n: usize,
    size_k: usize,
}

impl<'f> Matrices<'f> {
    fn load(
        weights: &Weights<'_, 'f>,
        name: &str,
        num_experts: usize,
        [size_n, size_k]: [usize; 2],
    ) -> Result<Self> {
        if !size_k.is_multiple_of(BLOCK) {
            let expected = format!("a multiple of {BLOCK}");
            return Err(marlinspike::Error::size(format!("{name}: K"), size_k, expected).into());
        }
        let blocks = size_k / BLOCK;
        let shape = [num_experts, size_n, blocks, BLOCK / 2];
        let codes = weights.bytes(&format!("{name}_blocks"), &shape)?;
        let scales = weights.bytes(&format!("{name}_scales"), &shape[..3])?;
        let bias = weights.matrix(&format!("{name}_bias"), [num_experts, size_n])?;
        Ok(Self { codes, scales, bias, size_n, size_k })
    }

    /// `out` `[M, N]` of `x` `[M, K]` and expert `e`.
    fn forward(&self, e: usize, x: &[f32], out: &mut Vec<f32>) {
        out.clear();
        out.resize(x.len() / self.size_k * self.size_n, 0.0);
        let values = self.size_n * self.size_k;
        let codes = &self.codes[e * values / 2..][..values / 2];
        let scales = &self.scales[e * values / BLOCK..][..values / BLOCK];
        let bias = &self.bias[e * self.size_n..][..self.size_n];
        Matrix { codes, scales, bias, size_k: self.size_k }.forward(x, out);
    }
}

/// The experts of a layer, as gpt-oss checkpoints store them.
#[derive(Debug)]
pub(super) struct StoredExperts<'f> {
    /// Rows of gate and up alternate.
    w13: Matrices<'f>,
    w2: Matrices<'f>,
    num_experts: usize,
    alpha: f32,
    limit: f32,
}

impl<'f> StoredExperts<'f> {
    pub(super) fn load(
        weights: &Weights<'_, 'f>,
        module: &str,
        (num_experts, hidden, width): (usize, usize, usize),
        activation: Definition,
    ) -> Result<Self> {
        let Some(limit) = activation.gate_limit.filter(|_| activation.up_shift == 1.0) else {
            let (found, expected) = (format!("{activation:?}"), "swigluoai with a limit");
            return Err(GenerateError::config("hidden_act", found, expected));
        };
        let matrices = |name: &str, shape| {
            Matrices::load(weights, &format!("{module}.{name}"), num_experts, shape)
        };
        let w13 = matrices("gate_up_proj", [2 * width, hidden])?;
        let w2 = matrices("down_proj", [hidden, width])?;
        Ok(Self { w13, w2, num_experts, alpha: activation.alpha, limit })
    }
}

impl ExpertStack for StoredExperts<'_> {
    fn forward(
        &self,
        x: &[f32],
        routed: Routed<'_>,
        out: &mut [f32],
        _: &mut Workspaces,
    ) -> Result<()> {
        let (mut gate_up, mut activated) = (Vec::new(), Vec::new());
        each_expert(self.num_experts, x, routed, out, |e, x, down| {
            self.w13.forward(e, x, &mut gate_up);
            activated.clear();
            activated.resize(gate_up.len() / 2, 0.0);
            swiglu_oai(&gate_up, [self.alpha, self.limit], &mut activated);
            self.w2.forward(e, &activated, down);
            Ok(())
        })
    }
}
