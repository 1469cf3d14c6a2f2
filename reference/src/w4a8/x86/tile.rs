//! One block at a time: for blocks of four columns, and for CPUs without AVX-512 VNNI.

use std::arch::x86_64::*;

use crate::w4a8::packed::PIECE;
use crate::w4a8::portable::finish_tile;
use crate::w4a8::{Blocks, MAX_NR, Tile};

/// The eight codes of piece `piece` and row `m` of `M`, as an integer to broadcast.
#[inline(always)]
fn piece<const M: usize>(activations: &[u8], piece: usize, m: usize) -> i64 {
    let mut bytes = [0; PIECE];
    bytes.copy_from_slice(&activations[(piece * M + m) * PIECE..][..PIECE]);
    i64::from_le_bytes(bytes)
}

#[target_feature(enable = "avx2")]
fn load256(bytes: &[u8]) -> __m256i {
    assert!(bytes.len() >= 32);
    // SAFETY: 32 bytes can be read, by the assertion; the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx2")]
fn store256(values: __m256i) -> [i32; 8] {
    let mut out = [0; 8];
    // SAFETY: the array has the vector's 32 bytes; the store needs no alignment.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), values) };
    out
}

/// Low and high nibbles with their top bit flipped: w + 8.
#[target_feature(enable = "avx2")]
fn shifted256(bytes: __m256i) -> [__m256i; 2] {
    let (bytes, mask) =
        (_mm256_xor_si256(bytes, _mm256_set1_epi8(0x88u8 as i8)), _mm256_set1_epi8(15));
    let high = _mm256_srli_epi16::<4>(bytes);
    [_mm256_and_si256(bytes, mask), _mm256_and_si256(high, mask)]
}

/// `N` times four columns.
#[target_feature(enable = "avx2,fma")]
pub(super) fn avx2<const M: usize, const N: usize>(blocks: Blocks<'_>, tile: &mut Tile) {
    let ones = _mm256_set1_epi16(1);
    finish_tile::<M>(blocks, tile, |g, sums: &mut [[i32; MAX_NR]; M]| {
        let mut acc = [[_mm256_setzero_si256(); N]; M];
        let chunks = blocks.codes(g).chunks_exact(64 * N);
        for (codes, activations) in chunks.zip(blocks.activations(g).chunks_exact(32 * M)) {
            for h in 0..N {
                let [low0, high0] = shifted256(load256(&codes[32 * h..]));
                let [low1, high1] = shifted256(load256(&codes[32 * (N + h)..]));
                for (m, acc) in acc.iter_mut().enumerate() {
                    // A sum of two products is below 15 · 128 · 2 in magnitude, and four of
                    // them are below 2^14, so nothing saturates.
                    let pairs = |w, p| {
                        let q = _mm256_set1_epi64x(piece::<M>(activations, p, m));
                        _mm256_maddubs_epi16(w, q)
                    };
                    let sum = _mm256_add_epi16(
                        _mm256_add_epi16(pairs(low0, 0), pairs(low1, 1)),
                        _mm256_add_epi16(pairs(high0, 2), pairs(high1, 3)),
                    );
                    acc[h] = _mm256_add_epi32(acc[h], _mm256_madd_epi16(sum, ones));
                }
            }
        }
        take_off_eight(blocks, g, &acc, sums);
    });
}

#[target_feature(enable = "avx512f")]
fn load512(bytes: &[u8]) -> __m512i {
    assert!(bytes.len() >= 64);
    // SAFETY: 64 bytes can be read, by the assertion; the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// As [`shifted256`].
#[target_feature(enable = "avx512f")]
fn shifted512(bytes: __m512i) -> [__m512i; 2] {
    let bytes = _mm512_xor_si512(bytes, _mm512_set1_epi8(0x88u8 as i8));
    // A shift of 32-bit lanes needs only AVX-512F; the mask clears bits that crossed a byte.
    let (high, mask) = (_mm512_srli_epi32::<4>(bytes), _mm512_set1_epi8(15));
    [_mm512_and_si512(bytes, mask), _mm512_and_si512(high, mask)]
}

/// `N` times four columns, by byte dot products.
#[target_feature(enable = "avx2,fma,avxvnni")]
pub(super) fn avx_vnni<const M: usize, const N: usize>(blocks: Blocks<'_>, tile: &mut Tile) {
    finish_tile::<M>(blocks, tile, |g, sums: &mut [[i32; MAX_NR]; M]| {
        let mut acc = [[_mm256_setzero_si256(); N]; M];
        let chunks = blocks.codes(g).chunks_exact(64 * N);
        for (codes, activations) in chunks.zip(blocks.activations(g).chunks_exact(32 * M)) {
            for h in 0..N {
                for s in 0..2 {
                    let [low, high] = shifted256(load256(&codes[32 * (s * N + h)..]));
                    for (m, acc) in acc.iter_mut().enumerate() {
                        let q = _mm256_set1_epi64x(piece::<M>(activations, s, m));
                        acc[h] = _mm256_dpbusd_avx_epi32(acc[h], low, q);
                        let q = _mm256_set1_epi64x(piece::<M>(activations, s + 2, m));
                        acc[h] = _mm256_dpbusd_avx_epi32(acc[h], high, q);
                    }
                }
            }
        }
        take_off_eight(blocks, g, &acc, sums);
    });
}

/// The sums of neighbouring lanes, minus 8·Σq.
#[inline]
#[target_feature(enable = "avx2")]
fn take_off_eight<const M: usize, const N: usize>(
    blocks: Blocks<'_>,
    g: usize,
    acc: &[[__m256i; N]; M],
    sums: &mut [[i32; MAX_NR]; M],
) {
    let starts = blocks.starts(g);
    for m in 0..M {
        for h in 0..N {
            let lanes = store256(acc[m][h]);
            for (n, pair) in lanes.chunks_exact(2).enumerate() {
                let sum = pair[0].wrapping_add(pair[1]);
                sums[m][4 * h + n] = sum.wrapping_add(starts[m]);
            }
        }
    }
}

/// Sums of the two halves of each 64 bits.
#[target_feature(enable = "avx512f,avx2")]
fn pair_sums(acc: __m512i) -> [i32; 8] {
    let sums = _mm512_add_epi32(acc, _mm512_srli_epi64::<32>(acc));
    store256(_mm512_cvtepi64_epi32(sums))
}

/// Four columns: a vector holds both segments of a chunk.
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
pub(super) fn avx512_narrow<const M: usize>(blocks: Blocks<'_>, tile: &mut Tile) {
    finish_tile::<M>(blocks, tile, |g, sums: &mut [[i32; MAX_NR]; M]| {
        let mut acc = [_mm512_setzero_si512(); M];
        let chunks = blocks.codes(g).chunks_exact(64);
        for (codes, activations) in chunks.zip(blocks.activations(g).chunks_exact(32 * M)) {
            let [low, high] = shifted512(load512(codes));
            for (m, acc) in acc.iter_mut().enumerate() {
                let q = |p| {
                    let first = _mm256_set1_epi64x(piece::<M>(activations, p, m));
                    let second = _mm256_set1_epi64x(piece::<M>(activations, p + 1, m));
                    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second)
                };
                *acc = _mm512_dpbusd_epi32(*acc, low, q(0));
                *acc = _mm512_dpbusd_epi32(*acc, high, q(2));
            }
        }
        let starts = blocks.starts(g);
        for m in 0..M {
            let halves = pair_sums(acc[m]);
            for n in 0..4 {
                let sum = halves[n].wrapping_add(halves[n + 4]);
                sums[m][n] = sum.wrapping_add(starts[m]);
            }
        }
    });
}
