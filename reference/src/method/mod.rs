//! Layers computed by a checkpoint's quantization method: the quantization of activations before
//! each product, the product itself, and the Mixture-of-Experts layer.
//!
//! | method | activations | product |
//! | --- | --- | --- |
//! | weight-only (FP8, MXFP8, MXFP4, NVFP4, integers) | [`Quantizer::None`] | 16 bits by dequantized weights |
//! | W8A8-FP8, tensor or channel scales | [`Quantizer::Fp8Tensor`], [`Quantizer::Fp8Token`] | e4m3 by e4m3 |
//! | W8A8-FP8, blocks | [`Quantizer::Fp8Group`] | e4m3 by e4m3, scales of both for each group |
//! | W8A8-int8 | [`Quantizer::Int8`] | int8 by int8 |
//! | W8A8-MXFP8 | [`Quantizer::Block`] | e4m3 by e4m3, powers of two |
//! | W4A4-NVFP4 | [`Quantizer::Block`] | e2m1 by e2m1, alpha |
//!
//! Every result is defined bit for bit under a named [`Arithmetic`]: [`Arithmetic::Exact`] is the
//! product of the quantized values rounded once; the others state an order of additions on an
//! emulated matrix unit. [`Product::compute`] and [`Product::define`] give the same bits and share
//! only the quantized rows and the hub's codes and scales: the former uses block sums and vector
//! loops, the latter adds one product after the other to a wide accumulator.
//!
//! Source: vLLM 0.21.0 `fused_moe/utils.py` (`moe_kernel_quantize_input`), `fused_moe/config.py`.

mod activations;
mod block_scaled;
mod compute;
mod definition;
mod exact;
mod layer;
mod product;
mod scheduled;

pub use activations::{Activations, Quantizer, Scales};
pub use layer::MethodLayer;
pub use product::{Arithmetic, Product, Promotion};
