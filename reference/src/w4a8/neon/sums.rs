//! From integer sums of code products to floats.

use std::arch::aarch64::*;

use super::ops::reload;
use crate::layout::kleidi::CHUNK;

/// The most k of a group whose sums are floats by their bits: 256 · 16 · 128 · 8 = 2^22.
pub(super) const NARROW: usize = 256;
/// Chunks whose sums of 16·q·w stay within 32 bits: 2^16 k of at most 2^14 each.
pub(super) const SPAN: usize = (1 << 16) / CHUNK;
/// The bits of 1.5·2^19, whose last place is 2^-4.
const START: i32 = 0x4940_0000;

/// Where a narrow group's sums begin.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn start() -> int32x4_t {
    reload(&[START; 4])
}

/// The same for pairs of lanes that are added to each other in the end.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn start_of_pairs() -> int32x4_t {
    reload(&[START, 0, START, 0])
}

/// Σqw of a narrow group, from its start plus 16·Σqw.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn narrow(sums: int32x4_t) -> float32x4_t {
    let start = vreinterpretq_f32_s32(vdupq_n_s32(START));
    vsubq_f32(vreinterpretq_f32_s32(sums), start)
}

/// 16 bytes.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn load(bytes: &[u8]) -> int8x16_t {
    assert!(bytes.len() >= 16);
    // SAFETY: 16 bytes can be read, by the assertion; the load needs no alignment.
    unsafe { vld1q_s8(bytes.as_ptr().cast()) }
}

/// 8 bytes, as an integer.
#[inline(always)]
pub(super) fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(word)
}

/// 16·w of the low and of the high nibbles.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn nibbles(bytes: int8x16_t) -> [int8x16_t; 2] {
    [vshlq_n_s8::<4>(bytes), vandq_s8(bytes, vdupq_n_s8(0xf0u8 as i8))]
}

/// A vector of four lanes.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn four(lanes: [f32; 4]) -> float32x4_t {
    // SAFETY: the array has the vector's 16 bytes.
    unsafe { vld1q_f32(lanes.as_ptr()) }
}
