//! The instructions of the kernels, as safe functions.
//!
//! Some have no stable intrinsic. Others must not be replaced: the loops are bound by the vector
//! pipes, while a load, or a move from a general register, uses another pipe; the compiler would turn
//! them into vector instructions. Products and loads are not `pure`, so that they keep the source's
//! order: early loads would exhaust the registers.

use std::arch::aarch64::*;
use std::arch::asm;

use super::cpu::{NeonDotprod, NeonI8mm};

/// Sixteen bytes.
pub(in crate::w4a8) type Bytes = int8x16_t;
/// Four int32.
pub(in crate::w4a8) type Ints = int32x4_t;
/// Four f32.
pub(in crate::w4a8) type Floats = float32x4_t;

/// Functions of vectors in registers only. They are always inlined, so that they become instructions
/// of their callers, whatever features those are compiled for.
macro_rules! neon {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) -> $out:ty { $body:expr })*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub(in crate::w4a8) fn $name($($arg: $ty),*) -> $out {
            // SAFETY: NEON is part of the target; only registers are accessed.
            unsafe { $body }
        }
    )*};
}

neon! {
    /// `x` in all four lanes.
    fn ints(x: i32) -> Ints { vdupq_n_s32(x) }
    /// `x` in all four lanes.
    fn floats(x: f32) -> Floats { vdupq_n_f32(x) }
    /// `x[i] + y[i]`, modulo 2^32.
    fn add_ints(x: Ints, y: Ints) -> Ints { vaddq_s32(x, y) }
    /// `x[i] · y[i]`, modulo 2^32.
    fn mul_ints(x: Ints, y: Ints) -> Ints { vmulq_s32(x, y) }
    /// `x[i] · y[i] + sum[i]`, modulo 2^32.
    fn mul_add_ints(x: Ints, y: Ints, sum: Ints) -> Ints { vmlaq_s32(sum, x, y) }
    /// `x[0] + x[1]`, `x[2] + x[3]`, then the same of `y`, modulo 2^32.
    fn add_pairs(x: Ints, y: Ints) -> Ints { vpaddq_s32(x, y) }
    /// `x[i] / 16`, rounded toward minus infinity.
    fn sixteenth(x: Ints) -> Ints { vshrq_n_s32::<4>(x) }
    /// The nearest floats.
    fn to_floats(x: Ints) -> Floats { vcvtq_f32_s32(x) }
    /// The same bits.
    fn as_floats(x: Ints) -> Floats { vreinterpretq_f32_s32(x) }
    /// The same bits.
    fn as_ints(x: Floats) -> Ints { vreinterpretq_s32_f32(x) }
    /// `x[i] + y[i]`.
    fn add(x: Floats, y: Floats) -> Floats { vaddq_f32(x, y) }
    /// `x[i] - y[i]`.
    fn sub(x: Floats, y: Floats) -> Floats { vsubq_f32(x, y) }
    /// `x[i] · y[i]`.
    fn mul(x: Floats, y: Floats) -> Floats { vmulq_f32(x, y) }
    /// `x[i] · y[i] + sum[i]`, rounded once.
    fn mul_add(x: Floats, y: Floats, sum: Floats) -> Floats { vfmaq_f32(sum, x, y) }
    /// Clamps to the finite range; NaN stays.
    fn clamp(x: Floats) -> Floats {
        vmaxq_f32(vminq_f32(x, vdupq_n_f32(f32::MAX)), vdupq_n_f32(f32::MIN))
    }
    /// 16·w of the low and of the high nibbles, as signed bytes.
    fn nibbles(codes: Bytes) -> [Bytes; 2] {
        [vshlq_n_s8::<4>(codes), vandq_s8(codes, vdupq_n_s8(0xf0u8 as i8))]
    }
    /// Four bf16, the first in the lowest bits.
    fn from_bf16(four: u64) -> Floats {
        vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(vcreate_u16(four))))
    }
    /// Eight bf16.
    fn eight_from_bf16(eight: Bytes) -> [Floats; 2] {{
        let eight = vreinterpretq_u16_s8(eight);
        [vmovl_u16(vget_low_u16(eight)), vmovl_high_u16(eight)]
            .map(|x| vreinterpretq_f32_u32(vshlq_n_u32::<16>(x)))
    }}
    /// The first four of each eight bytes of `x` and then of `y`, and the other four.
    fn words(x: Bytes, y: Bytes) -> [Bytes; 2] {{
        let (x, y) = (vreinterpretq_s32_s8(x), vreinterpretq_s32_s8(y));
        [vuzp1q_s32(x, y), vuzp2q_s32(x, y)].map(|x| vreinterpretq_s8_s32(x))
    }}
    /// Eight bytes, the first in the lowest bits, and eight zeros.
    fn eight_bytes(eight: u64) -> Bytes {
        vreinterpretq_s8_u64(vcombine_u64(vcreate_u64(eight), vcreate_u64(0)))
    }
    /// The first half of `x` in both halves, and the second half in both.
    fn spread(x: Floats) -> [Floats; 2] {{
        let x = vreinterpretq_f64_f32(x);
        [vdupq_laneq_f64::<0>(x), vdupq_laneq_f64::<1>(x)].map(|x| vreinterpretq_f32_f64(x))
    }}
    /// Each lane twice: the first half of `x`, and the second half.
    fn twice(x: Floats) -> [Floats; 2] { [vzip1q_f32(x, x), vzip2q_f32(x, x)] }
    /// Sixteen bytes as floats.
    fn float_bytes(bytes: [u8; 16]) -> Floats { vreinterpretq_f32_u8(vld1q_u8(bytes.as_ptr())) }
    /// The lanes of an array.
    fn int_lanes(x: [i32; 4]) -> Ints { vld1q_s32(x.as_ptr()) }
    /// The lanes of an array.
    fn from_lanes(x: [f32; 4]) -> Floats { vld1q_f32(x.as_ptr()) }
    /// The lanes as an array.
    fn lanes(x: Floats) -> [f32; 4] {{
        let mut lanes = [0.0; 4];
        vst1q_f32(lanes.as_mut_ptr(), x);
        lanes
    }}
}

/// 16 bytes of any alignment at `$from + $offset`, a constant.
///
/// A compiler would pair such loads; a pair costs more than two loads on CPUs that split 128-bit
/// pairs.
macro_rules! load {
    ($from:expr, $offset:expr) => {{
        let bytes: Bytes;
        std::arch::asm!(
            "ldr {bytes:q}, [{from}, #{offset}]",
            bytes = lateout(vreg) bytes,
            from = in(reg) $from,
            offset = const $offset,
            options(readonly, nostack, preserves_flags)
        );
        bytes
    }};
}
pub(in crate::w4a8) use load;

/// 8 bytes of any alignment, the first in the lowest bits.
///
/// # Safety
/// The 8 bytes can be read.
#[inline(always)]
pub(in crate::w4a8) unsafe fn word(bytes: *const u8) -> u64 {
    // SAFETY: guaranteed by the caller.
    unsafe { bytes.cast::<u64>().read_unaligned() }
}

/// `[a0·b0, a0·b1, a1·b0, a1·b1]`, each a sum of eight byte products, where 0 and 1 are the halves
/// of `a` and of `b`; added to `sums` modulo 2^32.
#[inline(always)]
pub(in crate::w4a8) fn smmla(_: NeonI8mm, mut sums: Ints, a: Bytes, b: Bytes) -> Ints {
    // SAFETY: the first argument proves that the CPU has the instruction; only registers are
    // accessed.
    unsafe {
        asm!(
            "smmla {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            options(nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// `a[i] + (sums[i] - starts[i]) · scales[i]`, as floats: the difference is rounded, then the fused
/// rest.
#[inline(always)]
pub(in crate::w4a8) fn add_scaled(
    mut a: Floats,
    sums: Ints,
    starts: Ints,
    scales: Floats,
) -> Floats {
    // SAFETY: NEON is part of the target; only registers are accessed.
    unsafe {
        asm!(
            "fsub {sums:v}.4s, {sums:v}.4s, {starts:v}.4s",
            "fmla {a:v}.4s, {sums:v}.4s, {scales:v}.4s",
            sums = inout(vreg) sums => _,
            a = inout(vreg) a,
            starts = in(vreg) starts,
            scales = in(vreg) scales,
            options(nomem, nostack, preserves_flags)
        );
    }
    a
}

/// Four sums of four byte products each, added to `sums` modulo 2^32.
#[inline(always)]
pub(in crate::w4a8) fn sdot(_: NeonDotprod, mut sums: Ints, a: Bytes, b: Bytes) -> Ints {
    // SAFETY: the first argument proves that the CPU has the instruction; only registers are
    // accessed.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Four sums of four byte products each, of `a` and lane `LANE` of `b`, added to `sums` modulo 2^32.
#[inline(always)]
pub(in crate::w4a8) fn sdot_lane<const LANE: usize>(
    _: NeonDotprod,
    mut sums: Ints,
    a: Bytes,
    b: Bytes,
) -> Ints {
    // SAFETY: the first argument proves that the CPU has the instruction; only registers are
    // accessed.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.4b[{lane}]",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            lane = const LANE,
            options(nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// The first halves of `x` and `y`, and the second halves. A compiler would use two instructions for
/// the first.
#[inline(always)]
pub(in crate::w4a8) fn halves(x: Floats, y: Floats) -> [Floats; 2] {
    let (first, second);
    // SAFETY: NEON is part of the target; only registers are accessed.
    unsafe {
        asm!(
            "zip1 {first:v}.2d, {x:v}.2d, {y:v}.2d",
            "zip2 {second:v}.2d, {x:v}.2d, {y:v}.2d",
            first = out(vreg) first,
            second = lateout(vreg) second,
            x = in(vreg) x,
            y = in(vreg) y,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    [first, second]
}

/// `bits` twice, through a general register.
#[inline(always)]
pub(in crate::w4a8) fn broadcast(bits: u64) -> Bytes {
    let both;
    // SAFETY: only registers are accessed.
    unsafe {
        asm!(
            "dup {both:v}.2d, {bits}",
            both = lateout(vreg) both,
            bits = in(reg) bits,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    both
}

/// A copy of `constant` by a load, not by a vector move.
#[inline(always)]
pub(in crate::w4a8) fn reload(constant: &[i32; 4]) -> Ints {
    let copy;
    // SAFETY: reads the 16 bytes of the array. It is not `pure`, because copies would be merged.
    unsafe {
        asm!(
            "ldr {copy:q}, [{from}]",
            copy = lateout(vreg) copy,
            from = in(reg) constant,
            options(readonly, nostack, preserves_flags)
        );
    }
    copy
}
