//! Instructions whose intrinsics are not stable, and the few that must stay as written.
//!
//! The loops are bound by the vector pipes. A load, or a move from a general register, takes
//! another pipe; a compiler that sees through them would trade them for vector instructions.

use std::arch::aarch64::*;
use std::arch::asm;

/// 2 x 2 sums of eight byte products each: `[a0·b0, a0·b1, a1·b0, a1·b1]`, where 0 and 1 are the
/// halves of `a` and of `b`, added to `sums` modulo 2^32.
#[inline]
#[target_feature(enable = "neon,i8mm")]
pub(super) fn smmla(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: reads and writes the named registers only; the CPU has i8mm, as the attribute says.
    unsafe {
        asm!(
            "smmla {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Four sums of four byte products each, added to `sums` modulo 2^32.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(super) fn sdot(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: reads and writes the named registers only; the CPU has dotprod, as the attribute
    // says.
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

/// `bits` twice, by way of a general register.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn broadcast(bits: u64) -> uint64x2_t {
    let both;
    // SAFETY: reads and writes the named registers only.
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

/// A copy of `constant` by a load each time, not by a vector move.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn reload(constant: &[i32; 4]) -> int32x4_t {
    let copy;
    // SAFETY: reads the 16 bytes that the reference is to. Not `pure`, so that it is not merged
    // with another.
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
