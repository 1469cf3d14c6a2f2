//! The Marlin kernel format, as upstream's operators lay it out (vLLM 0.21.0
//! `gptq_marlin_repack`, `marlin_utils.py`, `marlin_utils_fp8.py`, `marlin_utils_fp4.py`).

mod e4m3;
mod float;
mod kernel;
mod options;
pub(super) mod positions;
mod prepare;
mod repack;
mod restore;
mod scales;
mod simd;
mod tile;
mod weight;
mod zeros;

pub use e4m3::{e4m3_scale_factor, e4m3_scales, e4m3_scales_inverse, kernel_global_scale};
pub use float::{
    e8m0_scales, fp8_exponent_bias, int4_to_fp8_asymmetric, int4_to_fp8_scales,
    int4_to_fp8_symmetric,
};
pub use options::{InputDtype, Options};
pub use prepare::{Prepared, in_dtype, prepare};
pub(crate) use prepare::{kernel_codes, to_dtype};
pub use restore::Stored;
pub(crate) use scales::half_codec;
pub use scales::{
    GROUPED, Int8Scales, SINGLE, ScaleLayout, ScalePermutation, process_int8_scales,
    process_int8_scales_with,
};
pub(crate) use tile::evens_first;
pub use tile::{Activations, TileMap};
pub use weight::WeightLayout;
pub use zeros::ZeroPointLayout;

/// K must be a multiple of this for upstream's dense kernel.
pub const MIN_THREAD_K: usize = 128;
/// N must be a multiple of this.
pub const MIN_THREAD_N: usize = 64;
