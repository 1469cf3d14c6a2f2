//! Panels times runs with AVX-512 VNNI, blocks of eight columns.
//!
//! A segment of a block is a vector: eight columns of eight nibbles, each column a first and a second
//! word. The segments of two blocks become a vector of all first words and a vector of all second
//! words, once for all rows. A product then adds four k to each of sixteen columns, and a column's sum
//! is in one lane. The lanes have the order [`ORDER`] until the end; scales are permuted into it.
//!
//! A strip of four blocks is processed together, so that a word of a row, broadcast from memory,
//! serves 32 columns: eight rows need 16 integer accumulators. Their float sums would need the other
//! 16 registers. They are in memory instead, and each is read and written once per group. A row's
//! conversion and fused multiply-add are issued between the first products of the next group; at the
//! end of a group they would stall behind the products that they depend on.
//!
//! A sum starts from −8·Σq, which compensates for the 8 that was added to each weight.
// Index loops with fixed bounds unroll, so that arrays become registers. Iterator chains do not
// always unroll.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use crate::w4a8::packed::CHUNK;
use crate::w4a8::{Panel, Run};

/// Columns of a block.
pub(super) const NR: usize = 8;
/// Columns of two blocks: the lanes of a vector.
const LANES: usize = 2 * NR;
/// Bytes of a segment of a block: a vector.
pub(super) const SEGMENT: usize = 64;
/// Prefetch distance for weights in bytes of each block: a page, where the hardware prefetcher stops.
const AHEAD: usize = 4096;

/// Order of the columns in the lanes: pairs of columns of the two blocks alternate.
const ORDER: [i32; 16] = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15];

/// [`words`] of neighbouring columns: the first ones, the second ones.
pub(super) const FIRST: i32 = 0b10_00_10_00;
pub(super) const SECOND: i32 = 0b11_01_11_01;

/// Sums of `M` rows and `C` times sixteen columns.
type Sums<const M: usize, const C: usize> = [[__m512; C]; M];
/// Integer sums of a group.
type Ints<const M: usize, const C: usize> = [[__m512i; C]; M];
/// An address in each of two blocks.
pub(super) type Pair = [*const u8; 2];

/// Addresses of the next chunk.
#[derive(Clone, Copy)]
struct Cursor<const C: usize> {
    /// Weights of the strip's blocks.
    weights: [Pair; C],
    /// The panel's pieces, by words.
    words: *const i32,
    /// Start values of the next group's sums.
    starts: *const i32,
    /// Prefetch distance for weights.
    ahead: usize,
}

impl<const C: usize> Cursor<C> {
    /// Advances by `bytes` in each block.
    #[inline(always)]
    fn skip(&mut self, bytes: usize) {
        for pair in &mut self.weights {
            *pair = [pair[0].wrapping_add(bytes), pair[1].wrapping_add(bytes)];
        }
    }

    /// Prefetches a cache line of each block.
    // A call would spill all vectors.
    #[inline(always)]
    // The intrinsic is unsafe in Rust 1.89 and safe in later versions.
    #[allow(unused_unsafe)]
    fn fetch(&self, further: usize) {
        for pair in &self.weights {
            for at in pair {
                let at = at.wrapping_add(self.ahead + further).cast();
                // SAFETY: A prefetch reads nothing that the program sees; any address is allowed.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at) };
            }
        }
    }
}

/// [`Kernel::run`](crate::w4a8::Kernel::run) for panels of `M` rows and blocks of eight columns.
///
/// Panics if a slice is shorter than its layout requires.
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
pub(super) fn run<const M: usize>(panel: Panel<'_>, rhs: Run<'_>, y: &mut [f32], stride: usize) {
    let sizes = Sizes::checked::<M>(panel, rhs, y, stride);
    let strips = rhs.bytes.chunks(2 * LANES / NR * sizes.len);
    for (blocks, first) in strips.zip((0..rhs.columns).step_by(2 * LANES)) {
        let (columns, y) = ((rhs.columns - first).min(2 * LANES), y[first..].as_mut_ptr());
        // SAFETY: the assertions above check that every row of `y` holds `columns` values and that
        // `blocks` covers them.
        unsafe {
            match columns > LANES {
                true => strip::<M, 2>(panel, blocks, sizes, y, columns),
                false => strip::<M, 1>(panel, blocks, sizes, y, columns),
            }
        }
    }
}

/// Sizes of a run's blocks.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    /// Chunks of a group.
    pub(super) chunks: usize,
    /// Groups; 0 with channel scales.
    pub(super) groups: usize,
    /// Bytes of a block.
    pub(super) len: usize,
    /// Row stride of `y`.
    stride: usize,
}

impl Sizes {
    /// The sizes of `rhs`. Panics unless it has blocks of eight columns, the panel has `M` rows, and
    /// every slice has the length of its layout. Loads and stores rely on these checks.
    pub(super) fn checked<const M: usize>(
        panel: Panel<'_>,
        rhs: Run<'_>,
        y: &[f32],
        stride: usize,
    ) -> Self {
        let (layout, len) = (rhs.layout, rhs.layout.block_bytes());
        let (groups, chunks) = (layout.groups(), layout.padded_group() / CHUNK);
        let (channel_wise, group) = (layout.is_channel_wise(), layout.group_bytes());
        assert!(layout.nr() == NR && panel.rows() == M);
        assert!(panel.codes().len() >= groups * chunks * CHUNK * M);
        assert!(panel.starts().len() >= groups * M);
        assert!(group == chunks * 2 * SEGMENT + if channel_wise { 0 } else { 2 * NR });
        assert!(len >= groups * group + 8 * NR);
        assert!(rhs.bytes.len() == rhs.columns.div_ceil(NR) * len);
        assert!(y.len() >= stride.saturating_mul(M - 1).saturating_add(rhs.columns));
        Self { chunks, groups: if channel_wise { 0 } else { groups }, len, stride }
    }
}

/// The finished results of one to 2·`C` blocks, `columns` of them, to `y` `[M][stride]`.
///
/// # Safety
/// `sizes` describes blocks and panel, the panel has `M` rows, and `y` can be written.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
unsafe fn strip<const M: usize, const C: usize>(
    panel: Panel<'_>,
    blocks: &[u8],
    sizes: Sizes,
    y: *mut f32,
    columns: usize,
) {
    let last = blocks.len() / sizes.len - 1;
    // The last block replaces missing ones.
    let block = |i: usize| blocks[i.min(last) * sizes.len..].as_ptr();
    let mut weights = [[blocks.as_ptr(); 2]; C];
    for (c, pair) in weights.iter_mut().enumerate() {
        *pair = [block(2 * c), block(2 * c + 1)];
    }
    let mut at = Cursor {
        weights,
        words: panel.codes().as_ptr().cast(),
        starts: panel.starts().as_ptr(),
        ahead: AHEAD,
    };
    let mut sums = [[_mm512_setzero_ps(); C]; M];
    // SAFETY: guaranteed by the caller.
    unsafe {
        match sizes.groups {
            0 => channel_wise::<M, C>(panel, &mut at, sizes, &mut sums),
            _ => group_wise::<M, C>(panel, &mut at, sizes, &mut sums),
        }
    }
    for (c, pair) in weights.into_iter().enumerate() {
        // SAFETY: a block ends with the biases of its columns.
        let bias = unsafe { tail(pair, sizes.len - 4 * NR) };
        let columns = columns.saturating_sub(c * LANES).min(LANES);
        let mask = ((1u32 << columns) - 1) as __mmask16;
        for (m, sums) in sums.iter().enumerate() {
            let sum = finished(sums[c], bias);
            // SAFETY: the mask selects only existing columns.
            unsafe { _mm512_mask_storeu_ps(y.add(m * sizes.stride + c * LANES), mask, sum) };
        }
    }
}

/// Adds results without bias, columns in order, to `sums`, which are zero at the start.
///
/// # Safety
/// As [`strip`].
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
unsafe fn group_wise<const M: usize, const C: usize>(
    panel: Panel<'_>,
    at: &mut Cursor<C>,
    sizes: Sizes,
    sums: &mut Sums<M, C>,
) {
    let first = at.weights;
    let bytes = sizes.chunks * 2 * SEGMENT + 2 * NR;
    // The group before the first one is zero.
    let mut acc = [[_mm512_setzero_si512(); C]; M];
    let mut last = Group { scales: [_mm512_setzero_ps(); C], sums };
    for group in 0..sizes.groups {
        if (sizes.groups - group) * bytes < AHEAD {
            // The strip's other blocks precede the data that is read next.
            at.ahead = AHEAD + (2 * C - 1) * sizes.len;
        }
        // Opaque: compilers would otherwise keep float sums in registers and integers in memory.
        last.sums = std::hint::black_box(last.sums);
        // SAFETY: guaranteed by the caller: groups times chunks, and scales after each group.
        unsafe {
            add::<M, C, true>(&mut acc, at, last);
            for _ in 1..sizes.chunks {
                add::<M, C, false>(&mut acc, at, last);
            }
            at.fetch(0);
            for (scales, pair) in last.scales.iter_mut().zip(at.weights) {
                *scales = group_scales(pair);
            }
        }
        at.skip(2 * NR);
    }
    for c in 0..C {
        // SAFETY: sums of the columns' weights come after the last group.
        let weights = unsafe { tail(first[c], sizes.groups * bytes) };
        for m in 0..M {
            let zero = _mm512_set1_epi32(panel.negated_zero_points()[m]);
            let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[m][c]), last.scales[c], sums[m][c]);
            let sum = _mm512_permutexvar_ps(order(), sum);
            let sum = _mm512_fmadd_ps(weights, _mm512_cvtepi32_ps(zero), sum);
            sums[m][c] = _mm512_mul_ps(sum, _mm512_set1_ps(panel.reciprocals()[m]));
        }
    }
}

/// Results without bias, columns in order, to `out`.
///
/// # Safety
/// As [`strip`].
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
unsafe fn channel_wise<const M: usize, const C: usize>(
    panel: Panel<'_>,
    at: &mut Cursor<C>,
    sizes: Sizes,
    out: &mut Sums<M, C>,
) {
    let first = at.weights;
    let mut acc = [[_mm512_setzero_si512(); C]; M];
    // SAFETY: guaranteed by the caller; there is no previous group.
    unsafe {
        for (m, acc) in acc.iter_mut().enumerate() {
            *acc = [_mm512_set1_epi32(*at.starts.add(m)); C];
        }
        let none = Group { scales: [_mm512_setzero_ps(); C], sums: out };
        for chunk in 0..sizes.chunks {
            if (sizes.chunks - chunk) * 2 * SEGMENT < AHEAD {
                at.ahead = AHEAD + (2 * C - 1) * sizes.len;
            }
            add::<M, C, false>(&mut acc, at, none);
        }
    }
    for c in 0..C {
        // SAFETY: sums and scales of the columns come after the codes.
        let (sums, scales) = unsafe {
            let at = sizes.chunks * 2 * SEGMENT;
            (_mm512_castps_si512(tail(first[c], at)), tail(first[c], at + 4 * NR))
        };
        for m in 0..M {
            let zero = _mm512_set1_epi32(panel.negated_zero_points()[m]);
            let dot = _mm512_permutexvar_epi32(order(), acc[m][c]);
            let sum = _mm512_add_epi32(_mm512_slli_epi32::<4>(dot), _mm512_mullo_epi32(zero, sums));
            let scale = _mm512_mul_ps(scales, _mm512_set1_ps(panel.reciprocals()[m]));
            out[m][c] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
        }
    }
}

/// A group whose integers are complete.
#[derive(Clone, Copy)]
struct Group<const M: usize, const C: usize> {
    scales: [__m512; C],
    /// The float sums that it is added to.
    sums: *mut Sums<M, C>,
}

/// Adds the products of the next chunk. With `END`, the row's integers of `last` are added to the
/// float sums before its first product, and the next group begins.
///
/// This function and its callees are inlined into functions that enable the features; passed by
/// reference, the integers would be in memory.
///
/// # Safety
/// `at` has a chunk left, of 2·`C` blocks and of `M` rows; if a group begins, also its start values.
/// The CPU has the features.
#[inline(always)]
unsafe fn add<const M: usize, const C: usize, const END: bool>(
    acc: &mut Ints<M, C>,
    at: &mut Cursor<C>,
    last: Group<M, C>,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        add_segment::<M, C, 0, END>(acc, at, last);
        add_segment::<M, C, 1, false>(acc, at, last);
    }
    at.skip(2 * SEGMENT);
    at.words = at.words.wrapping_add(4 * 2 * M);
    if END {
        at.starts = at.starts.wrapping_add(M);
    }
}

/// Segment `S` of a chunk: pieces `S` and `S` + 2.
///
/// # Safety
/// As [`add`].
#[inline(always)]
unsafe fn add_segment<const M: usize, const C: usize, const S: usize, const END: bool>(
    acc: &mut Ints<M, C>,
    at: &Cursor<C>,
    last: Group<M, C>,
) {
    // SAFETY: the caller guarantees the segment of each block, four pieces and a start value of each
    // row, and float sums.
    unsafe {
        at.fetch(S * SEGMENT);
        for word in 0..2 {
            let mut low = [_mm512_setzero_si512(); C];
            let mut high = low;
            for c in 0..C {
                let a = _mm512_loadu_si512(at.weights[c][0].add(S * SEGMENT).cast());
                let b = _mm512_loadu_si512(at.weights[c][1].add(S * SEGMENT).cast());
                let bytes = if word == 0 { words::<FIRST>(a, b) } else { words::<SECOND>(a, b) };
                low[c] = plus_eight(bytes);
                high[c] = plus_eight(_mm512_srli_epi32::<4>(bytes));
            }
            for nibble in 0..2 {
                let w = if nibble == 0 { low } else { high };
                for m in 0..M {
                    if END && word == 0 && nibble == 0 {
                        for c in 0..C {
                            let sum = &raw mut (*last.sums)[m][c];
                            let found = _mm512_cvtepi32_ps(acc[m][c]);
                            *sum = _mm512_fmadd_ps(found, last.scales[c], *sum);
                        }
                        acc[m] = [_mm512_set1_epi32(*at.starts.add(m)); C];
                    }
                    let piece = S + 2 * nibble;
                    let q = at.words.add(2 * (piece * M + m) + word).read_unaligned();
                    for c in 0..C {
                        acc[m][c] = _mm512_dpbusd_epi32(acc[m][c], w[c], _mm512_set1_epi32(q));
                    }
                }
            }
        }
    }
}

/// The sum with its bias, clamped to the finite range.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn finished(sum: __m512, bias: __m512) -> __m512 {
    // `min` and `max` return the second operand if one is NaN, so a NaN stays.
    let sum = _mm512_add_ps(sum, bias);
    let sum = _mm512_min_ps(_mm512_set1_ps(f32::MAX), sum);
    _mm512_max_ps(_mm512_set1_ps(f32::MIN), sum)
}

/// Two words of each 128 bits of `a`, then two of `b`, by index.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn words<const INDICES: i32>(a: __m512i, b: __m512i) -> __m512i {
    let (a, b) = (_mm512_castsi512_ps(a), _mm512_castsi512_ps(b));
    _mm512_castps_si512(_mm512_shuffle_ps::<INDICES>(a, b))
}

/// The low nibbles with their top bit flipped: w + 8.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn plus_eight(bytes: __m512i) -> __m512i {
    let flipped = _mm512_xor_si512(bytes, _mm512_set1_epi8(8));
    _mm512_and_si512(flipped, _mm512_set1_epi8(15))
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn order() -> __m512i {
    // SAFETY: the constant has the vector's 64 bytes.
    unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) }
}

/// The bf16 scales at `pair`, as f32 in the order of [`ORDER`].
///
/// # Safety
/// 16 bytes can be read of either block.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx2")]
pub(super) unsafe fn group_scales(pair: Pair) -> __m512 {
    // SAFETY: guaranteed by the caller.
    let [a, b] = unsafe { [_mm_loadu_si128(pair[0].cast()), _mm_loadu_si128(pair[1].cast())] };
    let (low, high) = (_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b));
    let bits = _mm512_cvtepu16_epi32(_mm256_set_m128i(high, low));
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
}

/// The eight words at `offset` bytes from each address, columns in order.
///
/// # Safety
/// They can be read.
#[inline]
#[target_feature(enable = "avx512f,avx2")]
pub(super) unsafe fn tail(pair: Pair, offset: usize) -> __m512 {
    // SAFETY: guaranteed by the caller.
    let [a, b] = unsafe {
        [
            _mm256_loadu_si256(pair[0].wrapping_add(offset).cast()),
            _mm256_loadu_si256(pair[1].wrapping_add(offset).cast()),
        ]
    };
    _mm512_castsi512_ps(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b))
}
