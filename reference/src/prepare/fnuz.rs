//! e4m3fnuz, the FP8 type of MI300: the bits of e4m3fn represent half the value, and 0x80 is the
//! only NaN.
//!
//! Source: vLLM 0.21.0 `normalize_e4m3fn_to_e4m3fnuz` (`w8a8_utils.py`).

pub use crate::num::scalar::{e4m3fnuz_to_f32, f32_to_e4m3fnuz_rne_saturating};

/// Rewrites e4m3fn codes as e4m3fnuz codes of the same values under a doubled scale: −0 (0x80, NaN
/// in e4m3fnuz) becomes 0.
///
/// As upstream, this keeps the NaN codes 0x7f and 0xff, which represent ±240 in e4m3fnuz.
pub fn normalize_codes(codes: &mut [u8]) {
    for code in codes {
        if *code == 0x80 {
            *code = 0;
        }
    }
}

/// The scale for [`normalize_codes`]; infinite above half of f32's range.
pub fn normalize_scale(scale: f32) -> f32 {
    2.0 * scale
}
