//! MXFP4 weights times activations quantized to int8: the CPU path of gpt-oss.
//!
//! Weights are e2m1 with a UE8M0 scale for each 32 k ([`layouts::e2m1`](crate::layouts::e2m1)).
//! Every bit of the result is defined, by f32 operations that round to nearest even, without flushing:
//!
//! 1. Each group of 32 activations is quantized alone: d = max |x| / 127, q = x · (127 / max |x|) rounded
//!    to even. A group with max |x| below 2^-118 becomes zeros; a group with NaN or infinities makes
//!    the row's results NaN.
//! 2. A doubled e2m1 value is an integer, at most 12 in magnitude. S = Σ q · 2w over a group is
//!    therefore an exact integer below 2^16.
//! 3. a = fma(S, (d / 2) · 2^e, a) for ascending groups, from a = 0, where 2^e is the weight's scale.
//!    The product of the scales is rounded; it is exact unless it leaves the range of normal numbers.
//! 4. y = a + bias, rounded to the output's type.
//!
//! A scale for each group instead of each token costs one multiplication for each group and
//! output. It keeps an outlier's coarse steps within its group of 32, as ggml's Q8_0 does; see
//! docs/src/internals/mxfp4-cpu.md.
//!
//! A row's result depends only on that row and the weights, so batches may be split anywhere.

mod definition;
mod kernel;
mod linear;
mod moe;
#[cfg(target_arch = "aarch64")]
mod neon;
pub mod scalar;
#[cfg(target_arch = "x86_64")]
pub mod x86;

pub use super::quantize::{QuantizedGroups, quantize_groups};
pub use kernel::{E2m1Run, Kernel};
pub use linear::Linear;
pub use moe::E2m1Layer;
pub(super) use moe::ENGINE;

/// What kernels add to a doubled weight so that it is not negative.
const OFFSET: i32 = 12;

/// Doubled e2m1 values by code.
pub const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Bits of 2^(`scale` − 127) as f32; 2^-127 is subnormal.
fn scale_value(scale: u8) -> f32 {
    f32::from_bits((u32::from(scale) << 23).max(1 << 22))
}

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
