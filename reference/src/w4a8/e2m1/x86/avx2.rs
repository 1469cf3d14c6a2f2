//! Panels times runs with AVX2.
//!
//! A vector is four k of eight columns. Products are added in 16 bits: a pair is at most 24 · 127 · 2
//! in magnitude, and the sum of four of them is below 2^15.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::TABLE;
use crate::layouts::e2m1::{CODE_BYTES, GROUP, GROUP_BYTES, NR};
use crate::w4a8::Panel;
use crate::w4a8::e2m1::E2m1Run;

/// Columns of a vector.
const LANES: usize = NR / 2;
/// Bytes of a vector.
const VECTOR: usize = 32;

/// [`Kernel::run`](crate::w4a8::e2m1::Kernel::run) for panels of `M` rows.
///
/// Panics if a slice is shorter than its layout requires.
#[target_feature(enable = "avx2,fma")]
pub(super) fn run<const M: usize>(
    panel: Panel<'_>,
    rhs: E2m1Run<'_>,
    y: &mut [f32],
    stride: usize,
) {
    rhs.check(panel, y, stride, M);
    for (b, block) in rhs.bytes.chunks_exact(rhs.layout.block_bytes()).enumerate() {
        for half in 0..2 {
            let first = b * NR + half * LANES;
            let columns = rhs.columns.saturating_sub(first).min(LANES);
            // SAFETY: `check` has checked the lengths of panel and block.
            let sums = unsafe { columns_of::<M>(panel, block, rhs.layout.groups(), half) };
            for m in 0..M {
                let mut lanes = [0f32; LANES];
                // SAFETY: the array has the vector's bytes.
                unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), sums[m]) };
                if columns > 0 {
                    y[m * stride + first..][..columns].copy_from_slice(&lanes[..columns]);
                }
            }
        }
    }
}

/// The results of eight columns of a block.
///
/// # Safety
/// The block and the panel have `groups` groups, the panel has `M` rows, and `half` is below 2.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn columns_of<const M: usize>(
    panel: Panel<'_>,
    block: &[u8],
    groups: usize,
    half: usize,
) -> [__m256; M] {
    let mut at = block.as_ptr();
    let mut words = panel.codes().as_ptr().cast::<i32>();
    let (mut starts, mut scales) = (panel.starts().as_ptr(), panel.scales().as_ptr());
    // SAFETY: the constant has more bytes than the vector.
    let table = unsafe { _mm256_loadu_si256(TABLE.as_ptr().cast()) };
    let (mask, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    let mut sums = [_mm256_setzero_ps(); M];
    for _ in 0..groups {
        // SAFETY: the caller guarantees a group, and of each row its codes, start and scale.
        unsafe {
            let mut w = [[_mm256_setzero_si256(); 4]; 2];
            for piece in 0..4 {
                let from = at.add((2 * piece + half) * VECTOR);
                let bytes = _mm256_loadu_si256(from.cast());
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask);
                w[0][piece] = _mm256_shuffle_epi8(table, _mm256_and_si256(bytes, mask));
                w[1][piece] = _mm256_shuffle_epi8(table, high);
            }
            let bytes = _mm_loadl_epi64(at.add(CODE_BYTES + half * LANES).cast());
            let bits = _mm256_slli_epi32::<23>(_mm256_cvtepu8_epi32(bytes));
            // 2^-127 is subnormal.
            let bits = _mm256_max_epu32(bits, _mm256_set1_epi32(1 << 22));
            let of_columns = _mm256_castsi256_ps(bits);
            for m in 0..M {
                let mut acc = _mm256_set1_epi32(*starts.add(m));
                for nibble in 0..2 {
                    let mut pairs = _mm256_setzero_si256();
                    for piece in 0..4 {
                        // Words of eight k: two for each row.
                        let k = piece + 4 * nibble;
                        let word = words.add((k / 2 * M + m) * 2 + k % 2).read_unaligned();
                        let products =
                            _mm256_maddubs_epi16(w[nibble][piece], _mm256_set1_epi32(word));
                        pairs = _mm256_add_epi16(pairs, products);
                    }
                    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, ones));
                }
                let factor = _mm256_mul_ps(of_columns, _mm256_set1_ps(*scales.add(m)));
                sums[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc), factor, sums[m]);
            }
        }
        at = at.wrapping_add(GROUP_BYTES);
        words = words.wrapping_add(GROUP / 4 * M);
        starts = starts.wrapping_add(M);
        scales = scales.wrapping_add(M);
    }
    // SAFETY: sixteen biases follow the groups.
    let bias = unsafe { _mm256_loadu_ps(at.add(4 * LANES * half).cast()) };
    for sum in &mut sums {
        *sum = _mm256_add_ps(*sum, bias);
    }
    sums
}
