//! The product in loops that compilers vectorize.
//!
//! A code product is at most 1024 in magnitude. An int16 lane (one per byte of a segment, for the
//! products of its low and high nibble) therefore holds the products of seven chunks, four per chunk,
//! before it is widened.

use super::panel::for_rows;
use super::scalar::{channel_wise, group_wise_end};
use super::{Blocks, Kernel, MAX_NR, Tile};
use crate::w4a8::packed::PIECE;

/// Chunks between two widenings: 7 · 4 · 1024 is below 2^15.
const CHUNKS: usize = 7;

/// The kernel for any CPU.
#[derive(Debug, Clone, Copy)]
pub struct Portable(());

impl Kernel for Portable {
    fn new() -> Option<Self> {
        Some(Self(()))
    }

    fn name(&self) -> &'static str {
        "portable"
    }

    fn tile(&self, blocks: Blocks<'_>, tile: &mut Tile) {
        match blocks.rhs_layout.nr() {
            4 => for_rows!(blocks.panel.rows(), body[32](blocks, tile)),
            _ => for_rows!(blocks.panel.rows(), body[64](blocks, tile)),
        }
    }
}

/// `LANES`: eight for each column of a block.
fn body<const M: usize, const LANES: usize>(blocks: Blocks<'_>, tile: &mut Tile) {
    finish_tile::<M>(blocks, tile, |g, sums| group::<M, LANES>(blocks, g, sums));
}

/// Everything except the integer sums of a group, which `dots` returns in the upper left corner of a
/// tile of zeros.
#[inline(always)]
pub(super) fn finish_tile<const M: usize>(
    blocks: Blocks<'_>,
    tile: &mut Tile,
    dots: impl Fn(usize, &mut [[i32; MAX_NR]; M]),
) {
    let nr = blocks.rhs_layout.nr();
    if blocks.rhs_layout.is_channel_wise() {
        let mut sums = [[0i32; MAX_NR]; M];
        dots(0, &mut sums);
        for (m, sums) in sums.iter().enumerate() {
            let (zero, reciprocal) = blocks.row_factors(m);
            for n in 0..nr {
                let scale = f32::from_bits(blocks.tail_word(nr + n));
                let sum = blocks.tail_word(n) as i32;
                tile[m][n] = channel_wise(sums[n], sum, scale, zero, reciprocal);
            }
        }
        return;
    }
    let mut a = [[0f32; MAX_NR]; M];
    for g in 0..blocks.rhs_layout.groups() {
        let mut scales = [0f32; MAX_NR];
        for (n, scale) in scales.iter_mut().enumerate().take(nr) {
            *scale = blocks.group_scale(g, n);
        }
        let mut sums = [[0i32; MAX_NR]; M];
        dots(g, &mut sums);
        for (a, sums) in a.iter_mut().zip(&sums) {
            for n in 0..MAX_NR {
                a[n] = (sums[n] as f32).mul_add(scales[n], a[n]);
            }
        }
    }
    for (m, a) in a.iter().enumerate() {
        let (zero, reciprocal) = blocks.row_factors(m);
        for n in 0..nr {
            let sum = f32::from_bits(blocks.tail_word(n));
            tile[m][n] = group_wise_end(a[n], sum, zero, reciprocal);
        }
    }
}

#[inline(always)]
fn group<const M: usize, const LANES: usize>(
    blocks: Blocks<'_>,
    g: usize,
    sums: &mut [[i32; MAX_NR]; M],
) {
    let codes = blocks.codes(g).chunks(CHUNKS * 2 * LANES);
    let activations = blocks.activations(g).chunks(CHUNKS * 4 * M * PIECE);
    for (codes, activations) in codes.zip(activations) {
        let mut lanes = [[0i16; LANES]; M];
        let chunks = codes.chunks_exact(2 * LANES).zip(activations.chunks_exact(4 * M * PIECE));
        for (codes, activations) in chunks {
            for s in 0..2 {
                // Decode nibbles once for all rows, then loop with constant lengths.
                let (mut low, mut high) = ([0i16; LANES], [0i16; LANES]);
                for (i, &byte) in codes[s * LANES..][..LANES].iter().enumerate() {
                    low[i] = i16::from((byte << 4) as i8 >> 4);
                    high[i] = i16::from(byte as i8 >> 4);
                }
                for (m, lanes) in lanes.iter_mut().enumerate() {
                    let q_low = piece(activations, s * M + m);
                    let q_high = piece(activations, (s + 2) * M + m);
                    for n in (0..LANES).step_by(PIECE) {
                        for j in 0..PIECE {
                            lanes[n + j] += q_low[j] * low[n + j] + q_high[j] * high[n + j];
                        }
                    }
                }
            }
        }
        for (sums, lanes) in sums.iter_mut().zip(&lanes) {
            for (sum, lanes) in sums.iter_mut().zip(lanes.chunks_exact(PIECE)) {
                let part = lanes.iter().fold(0i32, |sum, &x| sum + i32::from(x));
                *sum = sum.wrapping_add(part);
            }
        }
    }
}

/// Piece `i` of packed activations.
#[inline(always)]
fn piece(activations: &[u8], i: usize) -> [i16; PIECE] {
    let bytes = &activations[i * PIECE..][..PIECE];
    std::array::from_fn(|j| i16::from(bytes[j] as i8))
}
