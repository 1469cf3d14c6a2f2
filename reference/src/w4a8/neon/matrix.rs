//! Pairs of rows by pairs of columns.

use std::arch::aarch64::*;
use std::array::from_fn;

use super::ops::{broadcast, smmla};
use super::sums::{NARROW, SPAN, four, load, narrow, nibbles, start, word};
use crate::layout::kleidi::{CHUNK, PIECE};
use crate::w4a8::{Blocks, Tile};

/// Up to eight rows by four columns: `[rows 2i, 2i + 1][columns 2j, 2j + 1]`, each 2 x 2 in a
/// vector. An odd last row has zeros beside it.
type Quad<T> = [[T; 2]; 4];

/// As [`Kernel::tile`](crate::w4a8::Kernel::tile).
#[target_feature(enable = "neon,i8mm")]
pub(super) fn tile(blocks: Blocks<'_>, tile: &mut Tile) {
    match (blocks.panel.rows(), blocks.rhs_layout.nr()) {
        (1, 4) => columns::<1, 4>(blocks, tile),
        (2, 4) => columns::<2, 4>(blocks, tile),
        (3, 4) => columns::<3, 4>(blocks, tile),
        (4, 4) => columns::<4, 4>(blocks, tile),
        (5, 4) => columns::<5, 4>(blocks, tile),
        (6, 4) => columns::<6, 4>(blocks, tile),
        (7, 4) => columns::<7, 4>(blocks, tile),
        (_, 4) => columns::<8, 4>(blocks, tile),
        (1, _) => columns::<1, 8>(blocks, tile),
        (2, _) => columns::<2, 8>(blocks, tile),
        (3, _) => columns::<3, 8>(blocks, tile),
        (4, _) => columns::<4, 8>(blocks, tile),
        (5, _) => columns::<5, 8>(blocks, tile),
        (6, _) => columns::<6, 8>(blocks, tile),
        (7, _) => columns::<7, 8>(blocks, tile),
        (..) => columns::<8, 8>(blocks, tile),
    }
}

/// The columns of a block, four at a time: more sums than for that do not fit into the registers.
#[target_feature(enable = "neon,i8mm")]
fn columns<const M: usize, const NR: usize>(blocks: Blocks<'_>, tile: &mut Tile) {
    let layout = blocks.rhs_layout;
    for first in (0..NR).step_by(4) {
        let y = if layout.is_channel_wise() {
            channel_wise::<M, NR>(blocks, first)
        } else if layout.padded_group() <= NARROW {
            group_wise::<M, NR, false>(blocks, first)
        } else {
            group_wise::<M, NR, true>(blocks, first)
        };
        for (i, [left, right]) in y.iter().enumerate().take(M.div_ceil(2)) {
            let (left, right) = (vreinterpretq_f64_f32(*left), vreinterpretq_f64_f32(*right));
            let rows = [vzip1q_f64(left, right), vzip2q_f64(left, right)];
            for (m, row) in rows.iter().enumerate() {
                let y: &mut [f32] = &mut tile[2 * i + m][first..first + 4];
                // SAFETY: the slice has the four floats.
                unsafe { vst1q_f32(y.as_mut_ptr(), vreinterpretq_f32_f64(*row)) };
            }
        }
    }
}

/// `WIDE`: groups of more than [`NARROW`] k.
#[target_feature(enable = "neon,i8mm")]
fn group_wise<const M: usize, const NR: usize, const WIDE: bool>(
    blocks: Blocks<'_>,
    first: usize,
) -> Quad<float32x4_t> {
    let layout = blocks.rhs_layout;
    let codes = layout.padded_group() / 2 * NR;
    let groups = blocks.rhs.chunks_exact(codes + 2 * NR);
    let activations = blocks.panel.codes().chunks_exact(layout.padded_group() * M);
    let mut a = [[vdupq_n_f32(0.0); 2]; 4];
    for (group, activations) in groups.zip(activations) {
        let sums = match WIDE {
            false => narrow_sums::<M, NR>(activations, &group[..codes], first),
            true => wide_sums::<M, NR>(activations, &group[..codes], first),
        };
        let scales = scales(word(&group[codes + 2 * first..]));
        for (a, sums) in a.iter_mut().zip(&sums).take(M.div_ceil(2)) {
            for h in 0..2 {
                a[h] = vfmaq_f32(a[h], sums[h], scales[h]);
            }
        }
    }
    let sums = columns_of(|n| f32::from_bits(blocks.tail_word(first + n)));
    for (i, a) in a.iter_mut().enumerate().take(M.div_ceil(2)) {
        let zeros = rows_of::<M>(i, |m| blocks.row_factors(m).0 as f32);
        let reciprocals = rows_of::<M>(i, |m| blocks.row_factors(m).1);
        for h in 0..2 {
            a[h] = vmulq_f32(vfmaq_f32(a[h], sums[h], zeros), reciprocals);
        }
    }
    a
}

#[target_feature(enable = "neon,i8mm")]
fn channel_wise<const M: usize, const NR: usize>(
    blocks: Blocks<'_>,
    first: usize,
) -> Quad<float32x4_t> {
    let mut acc = [[vdupq_n_s32(0); 2]; 4];
    add_codes::<M, NR>(&mut acc, blocks.activations(0), blocks.codes(0), first);
    let sums = columns_of(|n| f32::from_bits(blocks.tail_word(first + n)));
    let scales = columns_of(|n| f32::from_bits(blocks.tail_word(NR + first + n)));
    let mut y = [[vdupq_n_f32(0.0); 2]; 4];
    for (i, y) in y.iter_mut().enumerate().take(M.div_ceil(2)) {
        // Integers; they only travel as floats.
        let zeros = rows_of::<M>(i, |m| f32::from_bits(blocks.row_factors(m).0 as u32));
        let reciprocals = rows_of::<M>(i, |m| blocks.row_factors(m).1);
        for h in 0..2 {
            let sums = vreinterpretq_s32_f32(sums[h]);
            let acc = vmlaq_s32(acc[i][h], sums, vreinterpretq_s32_f32(zeros));
            y[h] = vmulq_f32(vcvtq_f32_s32(acc), vmulq_f32(scales[h], reciprocals));
        }
    }
    y
}

/// Σqw of a group of at most [`NARROW`] k.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn narrow_sums<const M: usize, const NR: usize>(
    activations: &[u8],
    codes: &[u8],
    first: usize,
) -> Quad<float32x4_t> {
    let mut acc: Quad<int32x4_t> = from_fn(|_| [start(), start()]);
    add_codes::<M, NR>(&mut acc, activations, codes, first);
    acc.map(|acc| acc.map(|acc| narrow(acc)))
}

/// Σqw of any group, modulo 2^32 before it becomes a float.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn wide_sums<const M: usize, const NR: usize>(
    activations: &[u8],
    codes: &[u8],
    first: usize,
) -> Quad<float32x4_t> {
    let mut total = [[vdupq_n_s32(0); 2]; 4];
    let spans = activations.chunks(SPAN * CHUNK * M);
    for (activations, codes) in spans.zip(codes.chunks(SPAN * CHUNK / 2 * NR)) {
        let mut acc = [[vdupq_n_s32(0); 2]; 4];
        add_codes::<M, NR>(&mut acc, activations, codes, first);
        for (total, acc) in total.as_flattened_mut().iter_mut().zip(acc.as_flattened()) {
            *total = vaddq_s32(*total, vshrq_n_s32::<4>(*acc));
        }
    }
    total.map(|total| total.map(|total| vcvtq_f32_s32(total)))
}

/// Adds 16·Σqw of columns `first` to `first` + 4: activations `[chunks][4][M][8]`, codes
/// `[chunks][2][NR][8]`.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn add_codes<const M: usize, const NR: usize>(
    acc: &mut Quad<int32x4_t>,
    activations: &[u8],
    codes: &[u8],
    first: usize,
) {
    let chunks = activations.chunks_exact(CHUNK * M).zip(codes.chunks_exact(CHUNK / 2 * NR));
    for (activations, codes) in chunks {
        for s in 0..2 {
            let segment = &codes[(s * NR + first) * PIECE..];
            let [low0, high0] = nibbles(load(segment));
            let [low1, high1] = nibbles(load(&segment[2 * PIECE..]));
            for (i, acc) in acc.iter_mut().enumerate().take(M.div_ceil(2)) {
                let q = pair::<M>(activations, s, i);
                acc[0] = smmla(acc[0], q, low0);
                acc[1] = smmla(acc[1], q, low1);
                let q = pair::<M>(activations, s + 2, i);
                acc[0] = smmla(acc[0], q, high0);
                acc[1] = smmla(acc[1], q, high1);
            }
        }
    }
}

/// Rows 2i and 2i + 1 of piece `piece`.
#[inline]
#[target_feature(enable = "neon")]
fn pair<const M: usize>(activations: &[u8], piece: usize, i: usize) -> int8x16_t {
    let rows = &activations[(piece * M + 2 * i) * PIECE..];
    if 2 * i + 1 < M {
        return load(rows);
    }
    vreinterpretq_s8_u64(vcombine_u64(vcreate_u64(word(rows)), vcreate_u64(0)))
}

/// bf16 scales of four columns as f32, `[d0, d1, d0, d1]` and `[d2, d3, d2, d3]`.
#[inline]
#[target_feature(enable = "neon")]
fn scales(all: u64) -> [float32x4_t; 2] {
    [all << 32, all].map(|two| {
        let wide = (two >> 16 & 0xffff_0000) | (two & 0xffff_0000_0000_0000);
        vreinterpretq_f32_u64(broadcast(wide))
    })
}

/// `[f(0), f(1), f(0), f(1)]` and the same of 2 and 3.
#[inline]
#[target_feature(enable = "neon")]
fn columns_of(f: impl Fn(usize) -> f32) -> [float32x4_t; 2] {
    [0, 2].map(|n| four([f(n), f(n + 1), f(n), f(n + 1)]))
}

/// `[f(2i), f(2i), f(2i + 1), f(2i + 1)]`, 0 for a row that is not there.
#[inline]
#[target_feature(enable = "neon")]
fn rows_of<const M: usize>(i: usize, f: impl Fn(usize) -> f32) -> float32x4_t {
    let next = if 2 * i + 1 < M { f(2 * i + 1) } else { 0.0 };
    four([f(2 * i), f(2 * i), next, next])
}
