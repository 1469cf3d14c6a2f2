//! e4m3fnuz, the FP8 type of MI300: the bits of e4m3fn mean half as much, 0x80 is the only NaN.

use super::convert_fp8::{e4m3fn_to_f32, f32_to_e4m3fn_rne_saturating};

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

/// f32 to e4m3fnuz, to nearest even, limited to ±240. Both zeros, and what rounds to them, become 0x00;
/// NaN becomes 0x80.
pub fn f32_to_e4m3fnuz_rne_saturating_240(value: f32) -> u8 {
    // 232 is the middle of 224 and 240, whose code is odd.
    match value.abs() > 232.0 {
        true if value < 0.0 => 0xff,
        true => 0x7f,
        false => f32_to_e4m3fnuz_rne_saturating(value),
    }
}
