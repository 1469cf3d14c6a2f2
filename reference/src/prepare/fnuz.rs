//! e4m3fnuz, the FP8 type of MI300: the bits of e4m3fn mean half as much, 0x80 is the only NaN.
//!
//! Source: vLLM 0.21.0 `normalize_e4m3fn_to_e4m3fnuz` (`w8a8_utils.py`).

pub use crate::num::scalar::{e4m3fnuz_to_f32, f32_to_e4m3fnuz_rne_saturating};

/// Rewrites e4m3fn codes as e4m3fnuz codes of the same numbers under a doubled scale: −0 (0x80,
/// NaN there) becomes 0.
///
/// The NaN codes 0x7f and 0xff are left, as upstream leaves them, and mean ±240 afterwards.
pub fn normalize_codes(codes: &mut [u8]) {
    for code in codes {
        if *code == 0x80 {
            *code = 0;
        }
    }
}

/// The scale that goes with [`normalize_codes`]; above half of f32's range it is infinite.
pub fn normalize_scale(scale: f32) -> f32 {
    2.0 * scale
}
