//! Panels times runs with AVX-512 VNNI.
//!
//! A vector is four k of a block's sixteen columns, so a column's sum is in one lane and a word of a
//! row is broadcast from memory. One or two rows read one block after another, because memory is
//! fastest as one stream; more rows process two blocks together, so that a broadcast serves 32
//! columns. Up to two rows keep two sums for each group, since products depend on each other.
// Index loops with fixed bounds unroll, so that arrays become registers. Iterator chains do not
// always unroll.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::TABLE;
use crate::layouts::e2m1::{CODE_BYTES, GROUP, GROUP_BYTES, NR};
use crate::w4a8::Panel;
use crate::w4a8::e2m1::E2m1Run;

/// Prefetch distance for weights, in bytes.
const AHEAD: usize = 8192;
/// Bytes of a vector.
const VECTOR: usize = 64;

/// Float sums of `M` rows and `C` blocks.
type Sums<const M: usize, const C: usize> = [[__m512; C]; M];

/// [`Kernel::run`](crate::w4a8::e2m1::Kernel::run) for panels of `M` rows.
///
/// Panics if a slice is shorter than its layout requires.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma")]
pub(super) fn run<const M: usize>(
    panel: Panel<'_>,
    rhs: E2m1Run<'_>,
    y: &mut [f32],
    stride: usize,
) {
    rhs.check(panel, y, stride, M);
    let (len, groups) = (rhs.layout.block_bytes(), rhs.layout.groups());
    let width = if M <= 2 { 1 } else { 2 };
    let strips = rhs.bytes.chunks(width * len).zip((0..rhs.columns).step_by(width * NR));
    for (blocks, first) in strips {
        let y = &mut y[first..];
        let columns = rhs.columns - first;
        // SAFETY: `check` has checked the lengths of panel, blocks and rows.
        unsafe {
            match blocks.len() > len {
                true => strip::<M, 2>(panel, blocks, [groups, len], y, [columns, stride]),
                false => strip::<M, 1>(panel, blocks, [groups, len], y, [columns, stride]),
            }
        }
    }
}

/// The results of `C` blocks to `y` `[M][stride]`, up to `columns` of them.
///
/// # Safety
/// `blocks` are `C` blocks of `len` bytes and `groups` groups, the panel has `M` rows and as many
/// groups, and every row of `y` has the columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma")]
unsafe fn strip<const M: usize, const C: usize>(
    panel: Panel<'_>,
    blocks: &[u8],
    [groups, len]: [usize; 2],
    y: &mut [f32],
    [columns, stride]: [usize; 2],
) {
    let mut weights = [blocks.as_ptr(); C];
    for c in 1..C {
        weights[c] = blocks[c * len..].as_ptr();
    }
    let mut words = panel.codes().as_ptr().cast::<i32>();
    let (mut starts, mut scales) = (panel.starts().as_ptr(), panel.scales().as_ptr());
    // SAFETY: the constant has the vector's bytes.
    let table = unsafe { _mm512_loadu_si512(TABLE.as_ptr().cast()) };
    let mut sums: Sums<M, C> = [[_mm512_setzero_ps(); C]; M];
    for _ in 0..groups {
        // SAFETY: the caller guarantees a group of each block, and of each row its codes, start and
        // scale.
        unsafe {
            let found = group::<M, C>(&weights, words, starts, table);
            for c in 0..C {
                let bytes = _mm_loadu_si128(weights[c].add(CODE_BYTES).cast());
                let bits = _mm512_slli_epi32::<23>(_mm512_cvtepu8_epi32(bytes));
                // 2^-127 is subnormal.
                let bits = _mm512_max_epu32(bits, _mm512_set1_epi32(1 << 22));
                let of_columns = _mm512_castsi512_ps(bits);
                for m in 0..M {
                    let factor = _mm512_mul_ps(of_columns, _mm512_set1_ps(*scales.add(m)));
                    let found = _mm512_cvtepi32_ps(found[m][c]);
                    sums[m][c] = _mm512_fmadd_ps(found, factor, sums[m][c]);
                }
                weights[c] = weights[c].wrapping_add(GROUP_BYTES);
            }
        }
        words = words.wrapping_add(GROUP / 4 * M);
        starts = starts.wrapping_add(M);
        scales = scales.wrapping_add(M);
    }
    for c in 0..C {
        let mask = ((1u32 << (columns - c * NR).min(NR)) - 1) as __mmask16;
        // SAFETY: biases follow the groups; the mask selects only existing columns.
        unsafe {
            let bias = _mm512_loadu_ps(weights[c].cast());
            for m in 0..M {
                let at = y.as_mut_ptr().add(m * stride + c * NR);
                _mm512_mask_storeu_ps(at, mask, _mm512_add_ps(sums[m][c], bias));
            }
        }
    }
}

/// The integer sums of a group.
///
/// # Safety
/// As [`strip`], for one group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma")]
unsafe fn group<const M: usize, const C: usize>(
    weights: &[*const u8; C],
    words: *const i32,
    starts: *const i32,
    table: __m512i,
) -> [[__m512i; C]; M] {
    let mask = _mm512_set1_epi8(15);
    let mut acc = [[_mm512_setzero_si512(); C]; M];
    let mut other = acc;
    // SAFETY: guaranteed by the caller.
    unsafe {
        for m in 0..M {
            acc[m] = [_mm512_set1_epi32(*starts.add(m)); C];
        }
        for piece in 0..4 {
            let mut w = [[_mm512_setzero_si512(); C]; 2];
            for c in 0..C {
                let at = weights[c].wrapping_add(piece * VECTOR);
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD).cast());
                let bytes = _mm512_loadu_si512(at.cast());
                let high = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask);
                w[0][c] = _mm512_shuffle_epi8(table, _mm512_and_si512(bytes, mask));
                w[1][c] = _mm512_shuffle_epi8(table, high);
            }
            for half in 0..2 {
                for m in 0..M {
                    // Words of eight k: two for each row.
                    let k = piece + 4 * half;
                    let word = words.add((k / 2 * M + m) * 2 + k % 2).read_unaligned();
                    let q = _mm512_set1_epi32(word);
                    for c in 0..C {
                        let sum =
                            if M <= 2 && half == 1 { &mut other[m][c] } else { &mut acc[m][c] };
                        *sum = _mm512_dpbusd_epi32(*sum, w[half][c], q);
                    }
                }
            }
        }
    }
    if M <= 2 {
        for m in 0..M {
            for c in 0..C {
                acc[m][c] = _mm512_add_epi32(acc[m][c], other[m][c]);
            }
        }
    }
    acc
}
