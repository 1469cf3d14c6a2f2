//! Checkpoint bytes to [`crate::weight::Weight`], one file per format, and back.
//!
//! Each format is a struct of its tensors with two methods: `unpack` builds a weight, and its
//! inverse `pack` builds the tensors. Names, shapes and element types are checked first, then
//! invalid values; every error names the tensor.
//!
//! | format | weight | scales | more |
//! | --- | --- | --- | --- |
//! | [`gptq`] | `qweight` `[K/pack, N]` int32 | `scales` `[G, N]` | `qzeros` `[G, N/pack]`, `g_idx` `[K]` |
//! | [`awq`] | `qweight` `[K, N/pack]` int32 | `scales` `[G, N]` | `qzeros` `[G, N/pack]` |
//! | [`compressed_tensors`] | `weight_packed` `[N, K/pack]` int32, or `weight` `[N, K]` int8 | `weight_scale` `[N, G]` | `weight_zero_point`, `weight_shape`, `weight_g_idx` |
//! | [`fp8`] | `weight` `[N, K]` e4m3fn | `weight_scale`, `weight_scale_inv` | |
//! | [`mxfp8`] | `weight` `[N, K]` e4m3fn | `weight_scale` `[N, K/32]` e8m0 | |
//! | [`mxfp4`] | `weight` `[N, K/2]` uint8 | `weight_scale` `[N, K/32]` e8m0 | `blocks`, `scales` of gpt-oss |
//! | [`nvfp4`] | `weight` `[N, K/2]` uint8 | `weight_scale` `[N, K/16]` e4m3fn | a global scale |

pub mod awq;
pub mod compressed_tensors;
pub mod fp8;
pub mod gptq;
pub mod mx;
pub mod mxfp4;
pub mod mxfp8;
pub mod nvfp4;
mod parts;
mod values;
mod words;

pub use crate::num::scalar::float_type;
pub use values::expect_finite;
pub(crate) use values::unflatten;
pub use words::transpose_words;

/// Every Microscaling format, in the order in which messages list them.
pub static MX_FORMATS: [&mx::MxFormat; 2] = [&mxfp4::FORMAT, &mxfp8::FORMAT];
