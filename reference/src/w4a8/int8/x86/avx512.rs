//! Panels times runs with AVX-512 VNNI.
//!
//! A vector is four k of a block's sixteen columns, so a column's sum is in one lane and a word of a
//! row is broadcast from memory. With few rows, several sums hide the latency of products: of several
//! blocks, or of several pieces of k.
// Index loops with fixed bounds unroll, so that arrays become registers. Iterator chains do not
// always unroll.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use crate::layouts::int8::{NR, PIECE};
use crate::w4a8::Panel;
use crate::w4a8::int8::Int8Run;

/// Bytes of a vector.
const VECTOR: usize = NR * PIECE;
/// Prefetch distance for weights, in bytes of each block that is read at once.
const AHEAD: usize = 4096;

/// [`run`] with two blocks at once.
#[target_feature(enable = "avx512f,avx512vnni,avx2,fma")]
pub(super) fn pairs<const M: usize>(
    panel: Panel<'_>,
    rhs: Int8Run<'_>,
    y: &mut [f32],
    stride: usize,
) {
    run::<M, 2, 1>(panel, rhs, y, stride);
}

/// [`Kernel::run`](crate::w4a8::int8::Kernel::run) for panels of `M` rows: `C` blocks at once, `U` sums of
/// each row and block.
///
/// Panics if a slice is shorter than its layout requires.
#[target_feature(enable = "avx512f,avx512vnni,avx2,fma")]
pub(super) fn run<const M: usize, const C: usize, const U: usize>(
    panel: Panel<'_>,
    rhs: Int8Run<'_>,
    y: &mut [f32],
    stride: usize,
) {
    rhs.check(panel, y, stride, M);
    let (len, pieces) = (rhs.layout.block_bytes(), rhs.layout.padded_k() / PIECE);
    let mut first = 0;
    while first < rhs.columns {
        let blocks = &rhs.bytes[first / NR * len..];
        let (y, columns) = (&mut y[first..], rhs.columns - first);
        // SAFETY: `check` has checked the lengths of panel, blocks and rows; pieces are a multiple of 16.
        unsafe {
            match blocks.len() >= C * len {
                true => {
                    strip::<M, C, U>(panel, blocks, [pieces, len], y, [columns, stride]);
                    first += C * NR;
                }
                false => {
                    strip::<M, 1, U>(panel, blocks, [pieces, len], y, [columns, stride]);
                    first += NR;
                }
            }
        }
    }
}

/// The results of `C` blocks to `y` `[M][stride]`, up to `columns` of them.
///
/// # Safety
/// `blocks` begin with `C` blocks of `len` bytes and `pieces` pieces, a multiple of `U`; the panel has
/// `M` rows and as many pieces, and every row of `y` has the columns.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni,avx2,fma")]
unsafe fn strip<const M: usize, const C: usize, const U: usize>(
    panel: Panel<'_>,
    blocks: &[u8],
    [pieces, len]: [usize; 2],
    y: &mut [f32],
    [columns, stride]: [usize; 2],
) {
    let mut weights = [blocks.as_ptr(); C];
    for c in 1..C {
        weights[c] = blocks[c * len..].as_ptr();
    }
    let words = panel.codes().as_ptr().cast::<i32>();
    let mut sums = [[[_mm512_setzero_si512(); U]; C]; M];
    for first in (0..pieces).step_by(U) {
        for u in 0..U {
            let piece = first + u;
            let mut w = [_mm512_setzero_si512(); C];
            for c in 0..C {
                // SAFETY: the caller guarantees the block's pieces.
                w[c] = unsafe { _mm512_loadu_si512(weights[c].cast()) };
                _mm_prefetch::<_MM_HINT_T0>(weights[c].wrapping_add(AHEAD).cast());
                weights[c] = weights[c].wrapping_add(VECTOR);
            }
            for m in 0..M {
                // Words of eight k: two for each row.
                let at = (piece / 2 * M + m) * 2 + piece % 2;
                // SAFETY: the caller guarantees the rows' pieces.
                let q = _mm512_set1_epi32(unsafe { words.add(at).read_unaligned() });
                for c in 0..C {
                    sums[m][c][u] = _mm512_dpbusd_epi32(sums[m][c][u], q, w[c]);
                }
            }
        }
    }
    for c in 0..C {
        let mask = ((1u32 << (columns - c * NR).min(NR)) - 1) as __mmask16;
        // SAFETY: three vectors follow the codes.
        let tail = unsafe { Tail::new(weights[c]) };
        for m in 0..M {
            let mut sum = sums[m][c][0];
            for u in 1..U {
                sum = _mm512_add_epi32(sum, sums[m][c][u]);
            }
            let y = y.as_mut_ptr().wrapping_add(m * stride + c * NR);
            // SAFETY: the mask selects only existing columns.
            unsafe { _mm512_mask_storeu_ps(y, mask, tail.result(sum, panel.reciprocals()[m])) };
        }
    }
}

/// What follows the codes of a block.
#[derive(Clone, Copy)]
pub(super) struct Tail {
    correction: __m512i,
    scales: __m512,
    biases: __m512,
}

impl Tail {
    /// # Safety
    /// Three vectors can be read.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn new(at: *const u8) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe {
            Self {
                correction: _mm512_loadu_si512(at.cast()),
                scales: _mm512_loadu_ps(at.add(VECTOR).cast()),
                biases: _mm512_loadu_ps(at.add(2 * VECTOR).cast()),
            }
        }
    }

    /// The results of a row with the scale `row`, of its sums with q + 128.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn result(self, sum: __m512i, row: f32) -> __m512 {
        self.signed(_mm512_add_epi32(sum, self.correction), row)
    }

    /// The results of a row with the scale `row`, of its sums.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn signed(self, sum: __m512i, row: f32) -> __m512 {
        let scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), self.scales);
        _mm512_fmadd_ps(scaled, _mm512_set1_ps(row), self.biases)
    }
}
