//! Panels times runs with AVX-512 VNNI, blocks of eight columns.
//!
//! A vector is a segment of a block: eight columns of eight nibbles. Two blocks go side by side, so
//! that a row's piece, broadcast from memory, serves sixteen columns, and the float steps fill a
//! vector. Eight rows take 16 integer and 8 float accumulators of the 32 registers.
//!
//! A column's sum is the sum of two 32-bit lanes. Both begin at −4·Σq, which takes back the 8 that
//! was added to each weight. A group ends with two shuffles and an addition, which leave the sixteen
//! columns in the order of [`ORDER`]; scales are brought into it, and the sums leave it at the end.

use std::arch::x86_64::*;

use crate::layout::kleidi::CHUNK;
use crate::w4a8::{Panel, Run};

/// Columns of a block.
const NR: usize = 8;
/// Bytes of a segment of a block: a vector.
const SEGMENT: usize = 64;
/// How far ahead weights are fetched, in bytes of each block: a page, where the processor's own
/// fetching ends.
const AHEAD: usize = 4096;

/// From columns in order to where [`pair_sums`] leaves them: 0 1 8 9 2 3 10 11 …
const ORDER: [i32; 16] = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15];

/// Two blocks, or twice the same where a run ends with one.
#[derive(Clone, Copy)]
struct Pair<'a> {
    a: &'a [u8],
    b: &'a [u8],
}

/// [`Kernel::run`](crate::w4a8::Kernel::run) for panels of `M` rows and blocks of eight columns.
///
/// Panics when a slice is shorter than its layout says.
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
pub(super) fn run<const M: usize>(panel: Panel<'_>, rhs: Run<'_>, y: &mut [f32], stride: usize) {
    let layout = rhs.layout;
    let len = layout.block_bytes();
    let chunks = layout.padded_group() / CHUNK;
    let (group, groups) = (layout.group_bytes(), layout.groups());
    // What the loads below rely on.
    assert!(layout.nr() == NR && panel.rows() == M);
    assert!(panel.codes().len() >= groups * chunks * CHUNK * M && panel.sums().len() >= groups * M);
    assert!(group >= chunks * 2 * SEGMENT && len >= groups * group + 8 * NR);
    for (i, blocks) in rhs.bytes.chunks(2 * len).enumerate() {
        let pair = Pair { a: &blocks[..len], b: &blocks[blocks.len() - len..] };
        let rest = (rhs.columns - 2 * NR * i).min(blocks.len() / len * NR).min(2 * NR);
        let mask = (u16::MAX as u32 >> (16 - rest)) as u16;
        let sums = match layout.is_channel_wise() {
            true => channel_wise::<M>(panel, pair, chunks),
            false => group_wise::<M>(panel, pair, chunks, group, groups),
        };
        let bias = tail(pair, len - 4 * NR);
        for (m, &sum) in sums.iter().enumerate() {
            let out = &mut y[m * stride + 2 * NR * i..][..rest];
            // The second operand is what a NaN leaves.
            let sum = _mm512_add_ps(sum, bias);
            let sum = _mm512_min_ps(_mm512_set1_ps(f32::MAX), sum);
            let sum = _mm512_max_ps(_mm512_set1_ps(f32::MIN), sum);
            // SAFETY: the mask lets through as many lanes as `out` has.
            unsafe { _mm512_mask_storeu_ps(out.as_mut_ptr(), mask, sum) };
        }
    }
}

/// Results without bias, columns in order.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
fn group_wise<const M: usize>(
    panel: Panel<'_>,
    pair: Pair<'_>,
    chunks: usize,
    group: usize,
    groups: usize,
) -> [__m512; M] {
    let mut a = [_mm512_setzero_ps(); M];
    for g in 0..groups {
        let sums = dots::<M>(panel, pair, g, g * group, chunks);
        let at = (g + 1) * group - 2 * NR;
        for block in [pair.a, pair.b] {
            prefetch(block[at..].as_ptr(), at, block.len());
        }
        let scales = scales(pair, at);
        for m in 0..M {
            a[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[m]), scales, a[m]);
        }
    }
    let sum = tail(pair, groups * group);
    for (m, a) in a.iter_mut().enumerate() {
        let zero = _mm512_set1_ps(panel.negated_zero_points()[m] as f32);
        let reciprocal = _mm512_set1_ps(panel.reciprocals()[m]);
        let ordered = _mm512_permutexvar_ps(order(), *a);
        *a = _mm512_mul_ps(_mm512_fmadd_ps(sum, zero, ordered), reciprocal);
    }
    a
}

/// Results without bias, columns in order.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
fn channel_wise<const M: usize>(panel: Panel<'_>, pair: Pair<'_>, chunks: usize) -> [__m512; M] {
    let dots = dots::<M>(panel, pair, 0, 0, chunks);
    let at = pair.a.len() - 12 * NR;
    let (sums, scales) = (_mm512_castps_si512(tail(pair, at)), tail(pair, at + 4 * NR));
    let mut out = [_mm512_setzero_ps(); M];
    for m in 0..M {
        let zero = _mm512_set1_epi32(panel.negated_zero_points()[m]);
        let dot = _mm512_slli_epi32::<4>(_mm512_permutexvar_epi32(order(), dots[m]));
        let sum = _mm512_add_epi32(dot, _mm512_mullo_epi32(zero, sums));
        let scale = _mm512_mul_ps(scales, _mm512_set1_ps(panel.reciprocals()[m]));
        out[m] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
    }
    out
}

/// Σ q·w of group `g`, whose weights begin at byte `at` of each block; columns in [`ORDER`].
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
fn dots<const M: usize>(
    panel: Panel<'_>,
    pair: Pair<'_>,
    g: usize,
    at: usize,
    chunks: usize,
) -> [__m512i; M] {
    let mut acc = [[_mm512_setzero_si512(); 2]; M];
    for (m, acc) in acc.iter_mut().enumerate() {
        let start = _mm512_set1_epi32(panel.sums()[g * M + m].wrapping_mul(-4));
        *acc = [start; 2];
    }
    let len = pair.a.len();
    for c in 0..chunks {
        // SAFETY: `run` has asserted that blocks have the codes of `chunks` chunks in each group,
        // and the panel M rows of them.
        unsafe {
            let offset = at + c * 2 * SEGMENT;
            let (a, b) = (pair.a.as_ptr().add(offset), pair.b.as_ptr().add(offset));
            let pieces = panel.codes().as_ptr().add((g * chunks + c) * CHUNK * M).cast::<i64>();
            for at in [a, b, a.add(SEGMENT), b.add(SEGMENT)] {
                prefetch(at, offset, len);
            }
            for s in 0..2 {
                let mut a = _mm512_loadu_si512(a.add(s * SEGMENT).cast());
                let mut b = _mm512_loadu_si512(b.add(s * SEGMENT).cast());
                // Low nibbles, then high ones, 16 k further.
                for piece in [s, s + 2] {
                    let (w_a, w_b) = (plus_eight(a), plus_eight(b));
                    for (m, acc) in acc.iter_mut().enumerate() {
                        let q = _mm512_set1_epi64(pieces.add(piece * M + m).read_unaligned());
                        acc[0] = _mm512_dpbusd_epi32(acc[0], w_a, q);
                        acc[1] = _mm512_dpbusd_epi32(acc[1], w_b, q);
                    }
                    (a, b) = (_mm512_srli_epi32::<4>(a), _mm512_srli_epi32::<4>(b));
                }
            }
        }
    }
    let mut sums = [_mm512_setzero_si512(); M];
    for m in 0..M {
        sums[m] = pair_sums(acc[m]);
    }
    sums
}

/// Fetches what lies [`AHEAD`] of `at`, which is byte `offset` of a block of `len` bytes: in the same
/// block, or in the one after its neighbour, which is the next that is read at this place.
#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch(at: *const u8, offset: usize, len: usize) {
    let skip = if offset + AHEAD < len { 0 } else { len };
    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD + skip).cast());
}

/// The low nibbles with their top bits flipped: w + 8.
#[inline]
#[target_feature(enable = "avx512f")]
fn plus_eight(bytes: __m512i) -> __m512i {
    let flipped = _mm512_xor_si512(bytes, _mm512_set1_epi8(8));
    _mm512_and_si512(flipped, _mm512_set1_epi8(15))
}

/// Sums of neighbouring lanes: the first of each two in `acc[0]` … in [`ORDER`].
#[inline]
#[target_feature(enable = "avx512f")]
fn pair_sums(acc: [__m512i; 2]) -> __m512i {
    let (a, b) = (_mm512_castsi512_ps(acc[0]), _mm512_castsi512_ps(acc[1]));
    let first = _mm512_castps_si512(_mm512_shuffle_ps::<0x88>(a, b));
    let second = _mm512_castps_si512(_mm512_shuffle_ps::<0xdd>(a, b));
    _mm512_add_epi32(first, second)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn order() -> __m512i {
    // SAFETY: the constant has the vector's 64 bytes.
    unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) }
}

/// The bf16 scales at byte `at` of each block, as f32 in the order of [`pair_sums`].
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx2")]
fn scales(pair: Pair<'_>, at: usize) -> __m512 {
    let (a, b) = (&pair.a[at..][..2 * NR], &pair.b[at..][..2 * NR]);
    // SAFETY: 16 bytes each, by the line above.
    let (a, b) =
        unsafe { (_mm_loadu_si128(a.as_ptr().cast()), _mm_loadu_si128(b.as_ptr().cast())) };
    let (low, high) = (_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b));
    let bits = _mm512_cvtepu16_epi32(_mm256_set_m128i(high, low));
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
}

/// The eight words at byte `at` of each block, columns in order.
#[inline]
#[target_feature(enable = "avx512f,avx2")]
fn tail(pair: Pair<'_>, at: usize) -> __m512 {
    let (a, b) = (&pair.a[at..][..4 * NR], &pair.b[at..][..4 * NR]);
    // SAFETY: 32 bytes each, by the line above.
    let (a, b) =
        unsafe { (_mm256_loadu_si256(a.as_ptr().cast()), _mm256_loadu_si256(b.as_ptr().cast())) };
    _mm512_castsi512_ps(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b))
}
