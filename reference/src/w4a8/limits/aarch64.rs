//! aarch64. The instructions have no stable intrinsics, so a round of chains is one block of assembly.
#![allow(unsafe_code)]

use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

use super::{CHAINS, Instruction};

/// [`Instruction::run`].
pub(super) fn run(instruction: Instruction, rounds: u64) -> Option<[i32; CHAINS]> {
    match instruction {
        Instruction::Sdot => {
            // SAFETY: the feature that the function needs was detected.
            is_aarch64_feature_detected!("dotprod").then(|| unsafe { sdot(rounds) })
        }
        Instruction::Smmla => {
            // SAFETY: the feature that the function needs was detected.
            is_aarch64_feature_detected!("i8mm").then(|| unsafe { smmla(rounds) })
        }
        _ => None,
    }
}

macro_rules! chains {
    ($name:ident, $features:literal, $mnemonic:literal) => {
        #[target_feature(enable = $features)]
        fn $name(rounds: u64) -> [i32; CHAINS] {
            let (ones, threes) = (vdupq_n_s8(1), vdupq_n_s8(3));
            let mut x: [int32x4_t; CHAINS] = std::array::from_fn(|i| vdupq_n_s32(i as i32 + 1));
            for _ in 0..rounds {
                let [a, b, c, d, e, f, g, h, i, j, k, l] = &mut x;
                // SAFETY: the block accesses only registers, and the function's features include the
                // instruction.
                unsafe {
                    asm!(
                        concat!($mnemonic, " {a:v}.4s, {p:v}.16b, {q:v}.16b"),
                        concat!($mnemonic, " {b:v}.4s, {p:v}.16b, {q:v}.16b"),
                        concat!($mnemonic, " {c:v}.4s, {p:v}.16b, {q:v}.16b"),
                        concat!($mnemonic, " {d:v}.4s, {p:v}.16b, {q:v}.16b"),
                        concat!($mnemonic, " {e:v}.4s, {p:v}.16b, {q:v}.16b"),
                        concat!($mnemonic, " {f:v}.4s, {p:v}.16b, {q:v}.16b"),
                        concat!($mnemonic, " {g:v}.4s, {p:v}.16b, {q:v}.16b"),
                        concat!($mnemonic, " {h:v}.4s, {p:v}.16b, {q:v}.16b"),
                        concat!($mnemonic, " {i:v}.4s, {p:v}.16b, {q:v}.16b"),
                        concat!($mnemonic, " {j:v}.4s, {p:v}.16b, {q:v}.16b"),
                        concat!($mnemonic, " {k:v}.4s, {p:v}.16b, {q:v}.16b"),
                        concat!($mnemonic, " {l:v}.4s, {p:v}.16b, {q:v}.16b"),
                        a = inout(vreg) *a, b = inout(vreg) *b, c = inout(vreg) *c,
                        d = inout(vreg) *d, e = inout(vreg) *e, f = inout(vreg) *f,
                        g = inout(vreg) *g, h = inout(vreg) *h, i = inout(vreg) *i,
                        j = inout(vreg) *j, k = inout(vreg) *k, l = inout(vreg) *l,
                        p = in(vreg) ones, q = in(vreg) threes,
                        options(pure, nomem, nostack, preserves_flags),
                    );
                }
            }
            x.map(|x| vgetq_lane_s32::<0>(x))
        }
    };
}

chains!(sdot, "neon,dotprod", "sdot");
chains!(smmla, "neon,i8mm", "smmla");
