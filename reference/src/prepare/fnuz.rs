//! e4m3fnuz, the FP8 type of MI300: the bits of e4m3fn mean half as much, 0x80 is the only NaN.
//!
//! Source: vLLM 0.21.0 `normalize_e4m3fn_to_e4m3fnuz` (`w8a8_utils.py`).

use crate::num::scalar::{e4m3fn_to_f32, f32_to_e4m3fn_rne_saturating};

/// The value of an e4m3fnuz code, exactly: half of e4m3fn's, whose NaN codes 0x7f and 0xff are
/// ±240 here; 0x80 is NaN.
pub fn e4m3fnuz_to_f32(code: u8) -> f32 {
    match code {
        0x80 => f32::NAN,
        0x7f => 240.0,
        0xff => -240.0,
        _ => 0.5 * e4m3fn_to_f32(code),
    }
}

/// f32 to e4m3fnuz, to nearest even, limited to ±224 (upstream's limit; the type reaches 240).
/// Both zeros, and what rounds to them, become 0x00; NaN becomes 0x80.
pub fn f32_to_e4m3fnuz_rne_saturating(value: f32) -> u8 {
    if value.is_nan() {
        return 0x80;
    }
    // Doubling is exact up to the limit, and above it the limit decides.
    match f32_to_e4m3fn_rne_saturating(2.0 * value) {
        0x80 => 0,
        code => code,
    }
}

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
