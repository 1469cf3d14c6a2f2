//! Rows by pairs of columns, a row's eight codes beside themselves.

use std::arch::aarch64::*;

use super::ops::{broadcast, sdot};
use super::sums::{NARROW, SPAN, four, load, narrow, nibbles, start_of_pairs, word};
use crate::layout::kleidi::{CHUNK, PIECE};
use crate::w4a8::{Blocks, Tile};

/// Sums of `M` rows by `H` times four columns. As integers, two lanes for each column.
type Pairs<const M: usize, const H: usize> = [[[int32x4_t; 2]; H]; M];
type Quads<const M: usize, const H: usize> = [[float32x4_t; H]; M];

/// As [`Kernel::tile`](crate::w4a8::Kernel::tile).
#[target_feature(enable = "neon,dotprod")]
pub(super) fn tile(blocks: Blocks<'_>, tile: &mut Tile) {
    let rows = blocks.panel.rows();
    // As many sums as fit into the registers.
    for m in (0..rows).step_by(4) {
        for n in (0..blocks.rhs_layout.nr()).step_by(if rows <= 2 { 8 } else { 4 }) {
            match (rows - m, blocks.rhs_layout.nr()) {
                (1, 8) if rows == 1 => part::<1, 2>(blocks, m, n, tile),
                (2, 8) if rows == 2 => part::<2, 2>(blocks, m, n, tile),
                (1, _) => part::<1, 1>(blocks, m, n, tile),
                (2, _) => part::<2, 1>(blocks, m, n, tile),
                (3, _) => part::<3, 1>(blocks, m, n, tile),
                (..) => part::<4, 1>(blocks, m, n, tile),
            }
        }
    }
}

/// Rows from `m` by columns from `n`.
#[target_feature(enable = "neon,dotprod")]
fn part<const M: usize, const H: usize>(blocks: Blocks<'_>, m: usize, n: usize, tile: &mut Tile) {
    let layout = blocks.rhs_layout;
    let at = At { m, rows: blocks.panel.rows(), n, nr: layout.nr() };
    let y: Quads<M, H> = if layout.is_channel_wise() {
        channel_wise(blocks, at)
    } else if layout.padded_group() <= NARROW {
        group_wise::<M, H, false>(blocks, at)
    } else {
        group_wise::<M, H, true>(blocks, at)
    };
    for (row, tile) in y.iter().zip(&mut tile[m..]) {
        for (y, tile) in row.iter().zip(tile[n..].chunks_exact_mut(4)) {
            // SAFETY: the chunk has four floats.
            unsafe { vst1q_f32(tile.as_mut_ptr(), *y) };
        }
    }
}

/// Which rows of the panel and columns of the block.
#[derive(Clone, Copy)]
struct At {
    m: usize,
    rows: usize,
    n: usize,
    nr: usize,
}

/// `WIDE`: groups of more than [`NARROW`] k.
#[target_feature(enable = "neon,dotprod")]
fn group_wise<const M: usize, const H: usize, const WIDE: bool>(
    blocks: Blocks<'_>,
    at: At,
) -> Quads<M, H> {
    let group_rows = blocks.rhs_layout.padded_group();
    let codes = group_rows / 2 * at.nr;
    let groups = blocks.rhs.chunks_exact(codes + 2 * at.nr);
    let activations = blocks.panel.codes().chunks_exact(group_rows * at.rows);
    let mut a = [[vdupq_n_f32(0.0); H]; M];
    for (group, activations) in groups.zip(activations) {
        let sums: Quads<M, H> = match WIDE {
            false => narrow_sums(activations, &group[..codes], at),
            true => wide_sums(activations, &group[..codes], at),
        };
        for h in 0..H {
            let scales = vcreate_u16(word(&group[codes + 2 * (at.n + 4 * h)..]));
            let scales = vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(scales)));
            for (a, sums) in a.iter_mut().zip(&sums) {
                a[h] = vfmaq_f32(a[h], sums[h], scales);
            }
        }
    }
    for (m, a) in a.iter_mut().enumerate() {
        let (zero, reciprocal) = blocks.row_factors(at.m + m);
        for (h, a) in a.iter_mut().enumerate() {
            let sums = columns_of(blocks, at.n + 4 * h);
            *a = vmulq_n_f32(vfmaq_n_f32(*a, sums, zero as f32), reciprocal);
        }
    }
    a
}

#[target_feature(enable = "neon,dotprod")]
fn channel_wise<const M: usize, const H: usize>(blocks: Blocks<'_>, at: At) -> Quads<M, H> {
    let mut acc: Pairs<M, H> = [[[vdupq_n_s32(0); 2]; H]; M];
    add_codes(&mut acc, blocks.activations(0), blocks.codes(0), at);
    let mut y = [[vdupq_n_f32(0.0); H]; M];
    for (m, (y, acc)) in y.iter_mut().zip(&acc).enumerate() {
        let (zero, reciprocal) = blocks.row_factors(at.m + m);
        for h in 0..H {
            let sums = vreinterpretq_s32_f32(columns_of(blocks, at.n + 4 * h));
            let scales = columns_of(blocks, at.nr + at.n + 4 * h);
            let sum = vmlaq_n_s32(vpaddq_s32(acc[h][0], acc[h][1]), sums, zero);
            y[h] = vmulq_f32(vcvtq_f32_s32(sum), vmulq_n_f32(scales, reciprocal));
        }
    }
    y
}

/// Σqw of a group of at most [`NARROW`] k.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn narrow_sums<const M: usize, const H: usize>(
    activations: &[u8],
    codes: &[u8],
    at: At,
) -> Quads<M, H> {
    let mut acc: Pairs<M, H> = [[[vdupq_n_s32(0); 2]; H]; M];
    for acc in acc.as_flattened_mut() {
        *acc = [start_of_pairs(), start_of_pairs()];
    }
    add_codes(&mut acc, activations, codes, at);
    acc.map(|acc| acc.map(|acc| narrow(vpaddq_s32(acc[0], acc[1]))))
}

/// Σqw of any group, modulo 2^32 before it becomes a float.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn wide_sums<const M: usize, const H: usize>(
    activations: &[u8],
    codes: &[u8],
    at: At,
) -> Quads<M, H> {
    let mut total = [[vdupq_n_s32(0); H]; M];
    let spans = activations.chunks(SPAN * CHUNK * at.rows);
    for (activations, codes) in spans.zip(codes.chunks(SPAN * CHUNK / 2 * at.nr)) {
        let mut acc: Pairs<M, H> = [[[vdupq_n_s32(0); 2]; H]; M];
        add_codes(&mut acc, activations, codes, at);
        for (total, acc) in total.as_flattened_mut().iter_mut().zip(acc.as_flattened()) {
            *total = vaddq_s32(*total, vshrq_n_s32::<4>(vpaddq_s32(acc[0], acc[1])));
        }
    }
    total.map(|total| total.map(|total| vcvtq_f32_s32(total)))
}

/// Adds 16·Σqw: activations `[chunks][4][rows][8]`, codes `[chunks][2][nr][8]`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn add_codes<const M: usize, const H: usize>(
    acc: &mut Pairs<M, H>,
    activations: &[u8],
    codes: &[u8],
    at: At,
) {
    let chunks = activations.chunks_exact(CHUNK * at.rows);
    for (activations, codes) in chunks.zip(codes.chunks_exact(CHUNK / 2 * at.nr)) {
        for s in 0..2 {
            let q = |piece: usize, m: usize| {
                let eight = word(&activations[(piece * at.rows + at.m + m) * PIECE..]);
                vreinterpretq_s8_u64(broadcast(eight))
            };
            let segment = &codes[(s * at.nr + at.n) * PIECE..];
            for h in 0..H {
                let [low0, high0] = nibbles(load(&segment[4 * h * PIECE..]));
                let [low1, high1] = nibbles(load(&segment[(4 * h + 2) * PIECE..]));
                for (m, acc) in acc.iter_mut().enumerate() {
                    let (low, high) = (q(s, m), q(s + 2, m));
                    acc[h][0] = sdot(acc[h][0], low0, low);
                    acc[h][1] = sdot(acc[h][1], low1, low);
                    acc[h][0] = sdot(acc[h][0], high0, high);
                    acc[h][1] = sdot(acc[h][1], high1, high);
                }
            }
        }
    }
}

/// Words `at` to `at` + 4 behind the codes.
#[inline]
#[target_feature(enable = "neon")]
fn columns_of(blocks: Blocks<'_>, at: usize) -> float32x4_t {
    four([0, 1, 2, 3].map(|n| f32::from_bits(blocks.tail_word(at + n))))
}
