//! Panels times runs with AVX-512 VNNI, blocks of eight columns.
//!
//! A vector is a segment of a block: eight columns of eight nibbles, the first word and the second
//! word of each. Two blocks go side by side, so that a row's piece, broadcast from memory, serves
//! sixteen columns, and the float steps fill a vector. Eight rows take 16 integer and 8 float
//! accumulators of the 32 registers.
//!
//! The blocks' second words change places, for all rows at once: one vector has first words of block
//! a and second words of block b, the other the reverse. So a column's two sums stand in
//! neighbouring lanes of two accumulators, and a group ends with a rotation and an addition; moving
//! lanes takes ports that multiply. The sixteen columns stand in [`ORDER`] until the end; scales are
//! brought into it.
//!
//! Both sums of a column begin at −4·Σq, which takes back the 8 that was added to each weight.

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

/// Where each column stands among the lanes: the blocks' columns take turns.
const ORDER: [i32; 16] = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15];
/// Every second lane.
const ODD: __mmask16 = 0xaaaa;

/// Two blocks, or twice the same where a run ends with one.
#[derive(Clone, Copy)]
struct Pair<'a> {
    a: &'a [u8],
    b: &'a [u8],
}

/// Where the next chunk is read: the weights of both blocks, the panel's pieces and a group's
/// starts.
#[derive(Clone, Copy)]
struct Cursor {
    a: *const u8,
    b: *const u8,
    pieces: *const i64,
    starts: *const i32,
}

impl Cursor {
    fn new(panel: Panel<'_>, pair: Pair<'_>) -> Self {
        Self {
            a: pair.a.as_ptr(),
            b: pair.b.as_ptr(),
            pieces: panel.codes().as_ptr().cast(),
            starts: panel.starts().as_ptr(),
        }
    }

    /// `bytes` of each block further on.
    fn skip(&mut self, bytes: usize) {
        (self.a, self.b) = (self.a.wrapping_add(bytes), self.b.wrapping_add(bytes));
    }

    /// Fetches the line that lies `ahead` bytes further on in each block.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn fetch(&self, ahead: usize) {
        for at in [self.a, self.b] {
            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(ahead).cast());
        }
    }
}

/// How many of `count` parts of `bytes` each still have their [`AHEAD`] in the same block of `len`
/// bytes, and how far ahead that is; then the others, for which it is in the block after the
/// neighbour, which is the next that is read at this place.
fn parts(count: usize, bytes: usize, len: usize) -> [(usize, usize); 2] {
    let near = (len.saturating_sub(AHEAD) / bytes).min(count);
    [(near, AHEAD), (count - near, AHEAD + len)]
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
    assert!(
        panel.codes().len() >= groups * chunks * CHUNK * M && panel.starts().len() >= groups * M
    );
    let codes = chunks * 2 * SEGMENT;
    assert!(group == codes + if layout.is_channel_wise() { 0 } else { 2 * NR });
    assert!(len >= groups * group + 8 * NR);
    for (i, blocks) in rhs.bytes.chunks(2 * len).enumerate() {
        let pair = Pair { a: &blocks[..len], b: &blocks[blocks.len() - len..] };
        let rest = (rhs.columns - 2 * NR * i).min(blocks.len() / len * NR).min(2 * NR);
        let mask = (u16::MAX as u32 >> (16 - rest)) as u16;
        // SAFETY: the assertions above are what each of these asks for.
        let sums = unsafe {
            match (layout.is_channel_wise(), chunks) {
                (true, _) => channel_wise::<M>(panel, pair, chunks),
                // No loop over the chunks of the smallest groups.
                (_, 1) => group_wise::<M>(panel, pair, 1, groups),
                _ => group_wise::<M>(panel, pair, chunks, groups),
            }
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
///
/// # Safety
/// Blocks hold `groups` groups of `chunks` chunks and their scales, the panel `M` rows of them.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
unsafe fn group_wise<const M: usize>(
    panel: Panel<'_>,
    pair: Pair<'_>,
    chunks: usize,
    groups: usize,
) -> [__m512; M] {
    let bytes = chunks * 2 * SEGMENT + 2 * NR;
    let mut at = Cursor::new(panel, pair);
    let mut a = [_mm512_setzero_ps(); M];
    for (groups, ahead) in parts(groups, bytes, pair.a.len()) {
        for _ in 0..groups {
            // SAFETY: the caller's promise: groups times chunks, and scales after each group.
            let (acc, scales) = unsafe {
                let mut acc = begin::<M>(&mut at);
                add::<M>(&mut acc, &mut at, chunks, ahead);
                at.fetch(ahead);
                let scales = scales(at);
                at.skip(2 * NR);
                (acc, scales)
            };
            for (a, acc) in a.iter_mut().zip(acc) {
                *a = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole(acc)), scales, *a);
            }
        }
    }
    let sum = tail(pair, groups * bytes);
    for (m, a) in a.iter_mut().enumerate() {
        let zero = _mm512_set1_ps(panel.negated_zero_points()[m] as f32);
        let reciprocal = _mm512_set1_ps(panel.reciprocals()[m]);
        let ordered = _mm512_permutexvar_ps(order(), *a);
        *a = _mm512_mul_ps(_mm512_fmadd_ps(sum, zero, ordered), reciprocal);
    }
    a
}

/// Results without bias, columns in order.
///
/// # Safety
/// Blocks hold `chunks` chunks, the panel `M` rows of them.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
unsafe fn channel_wise<const M: usize>(
    panel: Panel<'_>,
    pair: Pair<'_>,
    chunks: usize,
) -> [__m512; M] {
    let mut at = Cursor::new(panel, pair);
    // SAFETY: the caller's promise, cut in two.
    let acc = unsafe {
        let mut acc = begin::<M>(&mut at);
        for (chunks, ahead) in parts(chunks, 2 * SEGMENT, pair.a.len()) {
            add::<M>(&mut acc, &mut at, chunks, ahead);
        }
        acc
    };
    let tail_at = pair.a.len() - 12 * NR;
    let (sums, scales) = (_mm512_castps_si512(tail(pair, tail_at)), tail(pair, tail_at + 4 * NR));
    let mut out = [_mm512_setzero_ps(); M];
    for m in 0..M {
        let zero = _mm512_set1_epi32(panel.negated_zero_points()[m]);
        let dot = _mm512_permutexvar_epi32(order(), whole(acc[m]));
        let sum = _mm512_add_epi32(_mm512_slli_epi32::<4>(dot), _mm512_mullo_epi32(zero, sums));
        let scale = _mm512_mul_ps(scales, _mm512_set1_ps(panel.reciprocals()[m]));
        out[m] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
    }
    out
}

/// Where a group's sums start.
///
/// # Safety
/// `at` has starts of `M` rows left.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn begin<const M: usize>(at: &mut Cursor) -> [[__m512i; 2]; M] {
    let mut acc = [[_mm512_setzero_si512(); 2]; M];
    for (m, acc) in acc.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *acc = [_mm512_set1_epi32(unsafe { *at.starts.add(m) }); 2];
    }
    at.starts = at.starts.wrapping_add(M);
    acc
}

/// Adds the products of the next `chunks` chunks, and fetches what lies `ahead` of them.
///
/// # Safety
/// `at` has as many chunks left, of two blocks and of `M` rows.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2")]
unsafe fn add<const M: usize>(
    acc: &mut [[__m512i; 2]; M],
    at: &mut Cursor,
    chunks: usize,
    ahead: usize,
) {
    for _ in 0..chunks {
        at.fetch(ahead);
        at.fetch(ahead + SEGMENT);
        for s in 0..2 {
            // SAFETY: the caller's promise: two segments of either block.
            let [a, b] = unsafe {
                [
                    _mm512_loadu_si512(at.a.add(s * SEGMENT).cast()),
                    _mm512_loadu_si512(at.b.add(s * SEGMENT).cast()),
                ]
            };
            let bytes = [_mm512_mask_mov_epi32(a, ODD, b), _mm512_mask_mov_epi32(b, ODD, a)];
            for nibble in 0..2 {
                let w = match nibble {
                    0 => [plus_eight(bytes[0]), plus_eight(bytes[1])],
                    _ => [
                        plus_eight(_mm512_srli_epi32::<4>(bytes[0])),
                        plus_eight(_mm512_srli_epi32::<4>(bytes[1])),
                    ],
                };
                for (m, acc) in acc.iter_mut().enumerate() {
                    // SAFETY: the caller's promise: four pieces of each row.
                    let piece = unsafe { at.pieces.add((s + 2 * nibble) * M + m).read_unaligned() };
                    let q = _mm512_set1_epi64(piece);
                    acc[0] = _mm512_dpbusd_epi32(acc[0], w[0], q);
                    acc[1] = _mm512_dpbusd_epi32(acc[1], w[1], q);
                }
            }
        }
        at.skip(2 * SEGMENT);
        at.pieces = at.pieces.wrapping_add(4 * M);
    }
}

/// The low nibbles with their top bits flipped: w + 8.
#[inline]
#[target_feature(enable = "avx512f")]
fn plus_eight(bytes: __m512i) -> __m512i {
    let flipped = _mm512_xor_si512(bytes, _mm512_set1_epi8(8));
    _mm512_and_si512(flipped, _mm512_set1_epi8(15))
}

/// Both halves of the columns' sums, in [`ORDER`].
#[inline]
#[target_feature(enable = "avx512f")]
fn whole(acc: [__m512i; 2]) -> __m512i {
    _mm512_add_epi32(acc[0], _mm512_rol_epi64::<32>(acc[1]))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn order() -> __m512i {
    // SAFETY: the constant has the vector's 64 bytes.
    unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) }
}

/// The bf16 scales at `at`, as f32 in the order of [`ORDER`].
///
/// # Safety
/// 16 bytes can be read of either block.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx2")]
unsafe fn scales(at: Cursor) -> __m512 {
    // SAFETY: the caller's promise.
    let (a, b) = unsafe { (_mm_loadu_si128(at.a.cast()), _mm_loadu_si128(at.b.cast())) };
    let (low, high) = (_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b));
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
