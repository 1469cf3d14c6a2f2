//! One or two rows times runs with AVX-512 VNNI, blocks of eight columns with group scales.
//!
//! With so few rows, reading the weights takes longer than multiplying them. Some CPUs read one stream
//! fastest, others several: blocks are read one after the other, or four at a time. A segment is a
//! vector: eight columns of two words. A column's sum is that of two neighbouring lanes, and its float
//! sum is in the first of them.
// Index loops with fixed bounds unroll, so that arrays become registers.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::avx512::{NR, SEGMENT, Sizes, plus_eight};
use crate::w4a8::{Panel, Run};

/// The first lane of each column.
const FIRST: __mmask16 = 0x5555;
/// Swaps neighbouring lanes.
const SWAPPED: _MM_PERM_ENUM = 0b10_11_00_01;

/// [`Kernel::run`](crate::w4a8::Kernel::run) for panels of `M` rows, blocks of eight columns, and
/// group scales. `B` blocks are read at once.
///
/// Panics if a slice is shorter than its layout requires.
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
pub(super) fn run<const M: usize, const B: usize>(
    panel: Panel<'_>,
    rhs: Run<'_>,
    y: &mut [f32],
    stride: usize,
) {
    let sizes = Sizes::checked::<M>(panel, rhs, y, stride);
    assert!(sizes.groups > 0);
    let mut first = 0;
    let (at_once, rest) = rhs.bytes.split_at(rhs.bytes.len() / sizes.len / B * B * sizes.len);
    let some = at_once.chunks_exact(B * sizes.len).map(|blocks| (blocks, B));
    for (blocks, count) in some.chain(rest.chunks_exact(sizes.len).map(|block| (block, 1))) {
        let (block, y, columns) = (blocks.as_ptr(), y[first..].as_mut_ptr(), rhs.columns - first);
        // SAFETY: `Sizes::checked` has checked all lengths; the slice has `count` blocks, and `y` the
        // columns from `first` on.
        unsafe {
            match count == B {
                true => columns_of::<M, B>(panel, block, sizes, y, [columns, stride]),
                false => columns_of::<M, 1>(panel, block, sizes, y, [columns, stride]),
            }
        }
        first += count * NR;
    }
}

/// The finished results of `B` blocks, `columns` at most, to `y` `[M][stride]`.
///
/// # Safety
/// `sizes` describes the blocks and the panel, which has `M` rows, and `y` can be written.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
unsafe fn columns_of<const M: usize, const B: usize>(
    panel: Panel<'_>,
    block: *const u8,
    sizes: Sizes,
    y: *mut f32,
    [columns, stride]: [usize; 2],
) {
    let mut at = block;
    let mut pieces = panel.codes().as_ptr().cast::<i64>();
    let mut starts = panel.starts().as_ptr();
    let mut sums = [[_mm512_setzero_ps(); B]; M];
    for _ in 0..sizes.groups {
        // SAFETY: guaranteed by the caller: a start value of each row, chunks of two segments and of
        // four pieces of each row, and scales.
        unsafe {
            let mut acc = [[_mm512_setzero_si512(); B]; M];
            for m in 0..M {
                acc[m] = [_mm512_maskz_set1_epi32(FIRST, *starts.add(m)); B];
            }
            starts = starts.wrapping_add(M);
            for _ in 0..sizes.chunks {
                for segment in 0..2 {
                    let mut q = [[_mm512_setzero_si512(); 2]; M];
                    for m in 0..M {
                        let piece = |i: usize| pieces.add(i * M + m).read_unaligned();
                        q[m] = [
                            _mm512_set1_epi64(piece(segment)),
                            _mm512_set1_epi64(piece(segment + 2)),
                        ];
                    }
                    for b in 0..B {
                        let at = at.wrapping_add(b * sizes.len + segment * SEGMENT);
                        _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(ahead(B)).cast());
                        let bytes = _mm512_loadu_si512(at.cast());
                        let low = plus_eight(bytes);
                        let high = plus_eight(_mm512_srli_epi32::<4>(bytes));
                        for m in 0..M {
                            acc[m][b] = _mm512_dpbusd_epi32(acc[m][b], low, q[m][0]);
                            acc[m][b] = _mm512_dpbusd_epi32(acc[m][b], high, q[m][1]);
                        }
                    }
                }
                at = at.wrapping_add(2 * SEGMENT);
                pieces = pieces.wrapping_add(4 * M);
            }
            for b in 0..B {
                let scales = at.wrapping_add(b * sizes.len);
                let scales = _mm512_cvtepu16_epi64(_mm_loadu_si128(scales.cast()));
                let scales = _mm512_castsi512_ps(_mm512_slli_epi64::<16>(scales));
                for m in 0..M {
                    let acc = acc[m][b];
                    let acc = _mm512_add_epi32(acc, _mm512_shuffle_epi32::<SWAPPED>(acc));
                    sums[m][b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc), scales, sums[m][b]);
                }
            }
            at = at.wrapping_add(2 * NR);
        }
    }
    for b in 0..B {
        let mask = ((1u32 << columns.saturating_sub(b * NR).min(NR)) - 1) as __mmask8;
        let at = at.wrapping_add(b * sizes.len);
        // SAFETY: sums of the columns' weights come after the last group, then the biases.
        let (weights, bias) = unsafe {
            (_mm256_loadu_ps(at.cast()), _mm256_loadu_ps(at.wrapping_add(4 * NR).cast()))
        };
        for m in 0..M {
            let sum = _mm256_castsi256_ps(_mm512_cvtepi64_epi32(_mm512_castps_si512(sums[m][b])));
            let zero = _mm256_set1_ps(panel.negated_zero_points()[m] as f32);
            let sum = _mm256_fmadd_ps(weights, zero, sum);
            let sum = _mm256_mul_ps(sum, _mm256_set1_ps(panel.reciprocals()[m]));
            // `min` and `max` return the second operand if one is NaN, so a NaN stays.
            let sum = _mm256_add_ps(sum, bias);
            let sum = _mm256_min_ps(_mm256_set1_ps(f32::MAX), sum);
            let sum = _mm256_max_ps(_mm256_set1_ps(f32::MIN), sum);
            // SAFETY: the mask selects only the columns of row `m`.
            unsafe { _mm256_mask_storeu_ps(y.wrapping_add(m * stride + b * NR), mask, sum) };
        }
    }
}

/// Prefetch distance for weights, in bytes of each of `blocks` blocks that are read at once.
const fn ahead(blocks: usize) -> usize {
    if blocks == 1 { 8192 } else { 2048 }
}
