//! Panels times runs with AVX2, and with AVX-VNNI.
//!
//! A vector is four k of eight columns. Without byte dot products, its even and its odd bytes become
//! 16-bit factors, whose products are added in pairs.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use crate::layouts::int8::{Int8Tail, NR, PIECE};
use crate::w4a8::Panel;
use crate::w4a8::int8::Int8Run;

/// Columns of a vector.
const LANES: usize = NR / 2;

/// [`Kernel::run`](crate::w4a8::int8::Kernel::run) for panels of `M` rows, by a sum of products.
macro_rules! kernel {
    ($name:ident, $features:literal, $weights:ident, $add:ident) => {
        /// Panics if a slice is shorter than its layout requires.
        #[target_feature(enable = $features)]
        pub(super) fn $name<const M: usize>(
            panel: Panel<'_>,
            rhs: Int8Run<'_>,
            y: &mut [f32],
            stride: usize,
        ) {
            rhs.check(panel, y, stride, M);
            let pieces = rhs.layout.padded_k() / PIECE;
            let words = panel.codes().as_ptr().cast::<i32>();
            for (b, block) in rhs.bytes.chunks_exact(rhs.layout.block_bytes()).enumerate() {
                let (codes, tail) = block.split_at(rhs.layout.code_bytes());
                let mut sums = [[_mm256_setzero_si256(); 2]; M];
                for piece in 0..pieces {
                    for half in 0..2 {
                        let at = (piece * NR + half * LANES) * PIECE;
                        // SAFETY: a piece has two vectors, and `check` has checked that the panel has
                        // the pieces of `M` rows: words of eight k, two for each row.
                        unsafe {
                            let w = $weights(_mm256_loadu_si256(codes.as_ptr().add(at).cast()));
                            for m in 0..M {
                                let word = (piece / 2 * M + m) * 2 + piece % 2;
                                let q = _mm256_set1_epi32(words.add(word).read_unaligned());
                                sums[m][half] = $add(sums[m][half], q, w);
                            }
                        }
                    }
                }
                for m in 0..M {
                    for half in 0..2 {
                        let first = b * NR + half * LANES;
                        let columns = rhs.columns.saturating_sub(first).min(LANES);
                        let found = finish(sums[m][half], tail, half, panel.reciprocals()[m]);
                        if columns > 0 {
                            y[m * stride + first..][..columns].copy_from_slice(&found[..columns]);
                        }
                    }
                }
            }
        }
    };
}

kernel!(avx2, "avx2,fma", halves, add_halves);
kernel!(avx_vnni, "avx2,fma,avxvnni", whole, add_bytes);

/// Even and odd bytes, as signed 16-bit numbers.
#[inline]
#[target_feature(enable = "avx2")]
fn halves(w: __m256i) -> [__m256i; 2] {
    [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(w)), _mm256_srai_epi16::<8>(w)]
}

/// Adds the products of four k of each column. A pair of them is at most 2 · 255 · 128 in magnitude.
#[inline]
#[target_feature(enable = "avx2")]
fn add_halves(sum: __m256i, q: __m256i, [even, odd]: [__m256i; 2]) -> __m256i {
    let q_even = _mm256_and_si256(q, _mm256_set1_epi16(255));
    let q_odd = _mm256_srli_epi16::<8>(q);
    let products = _mm256_add_epi32(_mm256_madd_epi16(even, q_even), _mm256_madd_epi16(odd, q_odd));
    _mm256_add_epi32(sum, products)
}

#[inline]
#[target_feature(enable = "avx2")]
fn whole(w: __m256i) -> __m256i {
    w
}

/// As [`add_halves`].
#[inline]
#[target_feature(enable = "avx2,avxvnni")]
fn add_bytes(sum: __m256i, q: __m256i, w: __m256i) -> __m256i {
    _mm256_dpbusd_avx_epi32(sum, q, w)
}

/// The results of eight columns of a row with the scale `row`, of its sums with q + 128. Panics if the
/// block's tail is too short.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn finish(sum: __m256i, tail: &[u8], half: usize, row: f32) -> [f32; LANES] {
    let of = |what: Int8Tail| {
        let bytes = &tail[(what as usize * NR + half * LANES) * 4..][..4 * LANES];
        // SAFETY: the slice has the vector's bytes.
        unsafe { _mm256_loadu_ps(bytes.as_ptr().cast()) }
    };
    let sum = _mm256_add_epi32(sum, _mm256_castps_si256(of(Int8Tail::Correction)));
    let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), of(Int8Tail::Scale));
    let found = _mm256_fmadd_ps(scaled, _mm256_set1_ps(row), of(Int8Tail::Bias));
    let mut lanes = [0f32; LANES];
    // SAFETY: the array has the vector's bytes.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), found) };
    lanes
}
