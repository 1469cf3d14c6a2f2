//! Int8 weights times activations quantized to int8 per token: W8A8-int8 on CPUs.
//!
//! Weights have a scale for each column ([`layouts::int8`](crate::layouts::int8)). Every bit of the
//! result is defined, by f32 operations that round to nearest even, without flushing:
//!
//! 1. A row of activations is quantized with one scale and no zero point ([`quantize_tokens`]): by
//!    `dynamic_scaled_int8_quant` in linear layers, by `per_token_quant_int8` in experts.
//! 2. S = Σ q · w over all k is an exact integer, below 2^31 in magnitude because K is below 2^17.
//! 3. y = fma(float(S) · scale of the column, scale of the row, bias): the order of CUTLASS's epilogue
//!    ([`Int8Epilogue::Cutlass`](crate::products::Int8Epilogue)). Without a bias it is 0.
//! 4. y is rounded to the output's type. In experts, the rows of w2 are multiplied by the router weights
//!    and added in f32 after that, in the order of experts.
//!
//! A row's result depends only on that row and the weights, so batches may be split anywhere.

mod kernel;
mod linear;
mod moe;
#[cfg(target_arch = "aarch64")]
mod neon;
pub mod scalar;
#[cfg(target_arch = "x86_64")]
pub mod x86;

pub use super::quantize::{QuantizedTokens, quantize_tokens};
pub use kernel::{Int8Run, Kernel};
pub(super) use linear::LINEAR;
pub use linear::Linear;
pub(super) use moe::ENGINE;
pub use moe::Int8Layer;

/// Every kernel that this CPU supports, slowest first.
pub fn kernels() -> Vec<Box<dyn Kernel>> {
    #[allow(unused_mut, reason = "there are more on some CPUs")]
    let mut all: Vec<Box<dyn Kernel>> = vec![Box::new(scalar::Scalar)];
    #[cfg(target_arch = "x86_64")]
    all.extend(x86::kernels());
    #[cfg(target_arch = "aarch64")]
    all.extend(neon::kernels());
    all
}

/// The fastest kernel that this CPU supports.
pub fn fastest() -> Box<dyn Kernel> {
    kernels().pop().unwrap_or_else(|| Box::new(scalar::Scalar))
}
