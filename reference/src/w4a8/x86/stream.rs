//! One or two rows times runs with AVX-512 VNNI, blocks of eight columns with group scales.
//!
//! With so few rows, reading the weights takes longer than multiplying them, and memory is fastest as
//! one stream. Blocks are therefore read one after the other, not four at a time. A segment is a
//! vector: eight columns of two words. A column's sum is that of two neighbouring lanes, and its float
//! sum is in the first of them.

use std::arch::x86_64::*;

use super::avx512::{NR, SEGMENT, Sizes, plus_eight};
use crate::w4a8::{Panel, Run};

/// Prefetch distance for weights, in bytes.
const AHEAD: usize = 8192;
/// The first lane of each column.
const FIRST: __mmask16 = 0x5555;
/// Swaps neighbouring lanes.
const SWAPPED: _MM_PERM_ENUM = 0b10_11_00_01;

/// [`Kernel::run`](crate::w4a8::Kernel::run) for panels of `M` rows, blocks of eight columns, and
/// group scales.
///
/// Panics if a slice is shorter than its layout requires.
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
pub(super) fn run<const M: usize>(panel: Panel<'_>, rhs: Run<'_>, y: &mut [f32], stride: usize) {
    let sizes = Sizes::checked::<M>(panel, rhs, y, stride);
    assert!(sizes.groups > 0);
    for (block, first) in rhs.bytes.chunks_exact(sizes.len).zip((0..rhs.columns).step_by(NR)) {
        let mask = ((1u32 << (rhs.columns - first).min(NR)) - 1) as __mmask8;
        // SAFETY: `Sizes::checked` has checked all lengths.
        let sums = unsafe { columns::<M>(panel, block, sizes) };
        for (m, sum) in sums.into_iter().enumerate() {
            // SAFETY: the mask selects only the columns of row `m`.
            unsafe { _mm256_mask_storeu_ps(y.as_mut_ptr().add(m * stride + first), mask, sum) };
        }
    }
}

/// The finished results of a block.
///
/// # Safety
/// `sizes` describes the block and the panel, which has `M` rows.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
unsafe fn columns<const M: usize>(panel: Panel<'_>, block: &[u8], sizes: Sizes) -> [__m256; M] {
    let mut at = block.as_ptr();
    let mut pieces = panel.codes().as_ptr().cast::<i64>();
    let mut starts = panel.starts().as_ptr();
    let mut sums = [_mm512_setzero_ps(); M];
    for _ in 0..sizes.groups {
        // SAFETY: guaranteed by the caller: a start value of each row, chunks of two segments and of
        // four pieces of each row, and scales.
        unsafe {
            let mut acc = [_mm512_setzero_si512(); M];
            for (m, acc) in acc.iter_mut().enumerate() {
                *acc = _mm512_maskz_set1_epi32(FIRST, *starts.add(m));
            }
            starts = starts.wrapping_add(M);
            for _ in 0..sizes.chunks {
                for segment in 0..2 {
                    let ahead = at.wrapping_add(AHEAD + segment * SEGMENT);
                    _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                    let bytes = _mm512_loadu_si512(at.add(segment * SEGMENT).cast());
                    let low = plus_eight(bytes);
                    let high = plus_eight(_mm512_srli_epi32::<4>(bytes));
                    for (m, acc) in acc.iter_mut().enumerate() {
                        let piece = |i: usize| pieces.add(i * M + m).read_unaligned();
                        let [q, q2] = [piece(segment), piece(segment + 2)];
                        *acc = _mm512_dpbusd_epi32(*acc, low, _mm512_set1_epi64(q));
                        *acc = _mm512_dpbusd_epi32(*acc, high, _mm512_set1_epi64(q2));
                    }
                }
                at = at.wrapping_add(2 * SEGMENT);
                pieces = pieces.wrapping_add(4 * M);
            }
            let scales = _mm512_cvtepu16_epi64(_mm_loadu_si128(at.cast()));
            let scales = _mm512_castsi512_ps(_mm512_slli_epi64::<16>(scales));
            at = at.wrapping_add(2 * NR);
            for (sum, acc) in sums.iter_mut().zip(acc) {
                let acc = _mm512_add_epi32(acc, _mm512_shuffle_epi32::<SWAPPED>(acc));
                *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc), scales, *sum);
            }
        }
    }
    // SAFETY: sums of the columns' weights come after the last group, then the biases.
    let (weights, bias) =
        unsafe { (_mm256_loadu_ps(at.cast()), _mm256_loadu_ps(at.wrapping_add(4 * NR).cast())) };
    let mut out = [_mm256_setzero_ps(); M];
    for (m, out) in out.iter_mut().enumerate() {
        let sum = _mm256_castsi256_ps(_mm512_cvtepi64_epi32(_mm512_castps_si512(sums[m])));
        let zero = _mm256_set1_ps(panel.negated_zero_points()[m] as f32);
        let sum = _mm256_fmadd_ps(weights, zero, sum);
        let sum = _mm256_mul_ps(sum, _mm256_set1_ps(panel.reciprocals()[m]));
        // `min` and `max` return the second operand if one is NaN, so a NaN stays.
        let sum = _mm256_add_ps(sum, bias);
        let sum = _mm256_min_ps(_mm256_set1_ps(f32::MAX), sum);
        *out = _mm256_max_ps(_mm256_set1_ps(f32::MIN), sum);
    }
    out
}
