//! Pairs of rows by pairs of columns.
// Loops over indices of fixed bounds unroll, so that arrays become registers; chains of iterators
// do not always.
#![allow(clippy::needless_range_loop)]

use super::ops::*;
use super::sums::{Codes, NARROW, SPAN, STARTS, narrow, tail};
use super::{NeonI8mm, dot};
use crate::layout::kleidi::{CHUNK, PIECE};
use crate::w4a8::{Blocks, Panel, Run, Tile};

/// Up to eight rows by four columns: `[rows 2i, 2i + 1][columns 2j, 2j + 1]`, each 2 x 2 in a
/// vector. An odd last row has zeros beside it.
type Quad<T> = [[T; 2]; 4];

/// Hands each block of `rhs` to `done`, by its number and what
/// [`Kernel::tile`](crate::w4a8::Kernel::tile) gives for it.
#[target_feature(enable = "neon,dotprod,i8mm")]
pub(super) fn each_block(
    cpu: NeonI8mm,
    panel: Panel<'_>,
    rhs: Run<'_>,
    done: impl FnMut(usize, &Tile),
) {
    match (panel.rows(), rhs.layout.nr()) {
        (1, _) => dot::each_block(cpu.0, panel, rhs, done),
        (2, 4) => blocks::<2, 4>(cpu, panel, rhs, done),
        (3, 4) => blocks::<3, 4>(cpu, panel, rhs, done),
        (4, 4) => blocks::<4, 4>(cpu, panel, rhs, done),
        (5, 4) => blocks::<5, 4>(cpu, panel, rhs, done),
        (6, 4) => blocks::<6, 4>(cpu, panel, rhs, done),
        (7, 4) => blocks::<7, 4>(cpu, panel, rhs, done),
        (_, 4) => blocks::<8, 4>(cpu, panel, rhs, done),
        (2, _) => blocks::<2, 8>(cpu, panel, rhs, done),
        (3, _) => blocks::<3, 8>(cpu, panel, rhs, done),
        (4, _) => blocks::<4, 8>(cpu, panel, rhs, done),
        (5, _) => blocks::<5, 8>(cpu, panel, rhs, done),
        (6, _) => blocks::<6, 8>(cpu, panel, rhs, done),
        (7, _) => blocks::<7, 8>(cpu, panel, rhs, done),
        (..) => blocks::<8, 8>(cpu, panel, rhs, done),
    }
}

#[inline(always)]
fn blocks<const M: usize, const NR: usize>(
    cpu: NeonI8mm,
    panel: Panel<'_>,
    rhs: Run<'_>,
    mut done: impl FnMut(usize, &Tile),
) {
    let mut tile = Tile::default();
    for (b, block) in rhs.bytes.chunks_exact(rhs.layout.block_bytes()).enumerate() {
        let blocks = Blocks { panel, rhs_layout: rhs.layout, rhs: block };
        columns::<M, NR>(cpu, blocks, &mut tile);
        done(b, &tile);
    }
}

/// The columns of a block: four at a time where float sums stand beside the integer ones, since
/// there are no registers for more.
#[inline(always)]
fn columns<const M: usize, const NR: usize>(cpu: NeonI8mm, blocks: Blocks<'_>, tile: &mut Tile) {
    let layout = blocks.rhs_layout;
    if layout.is_channel_wise() {
        if NR == 4 {
            store::<M, 2>(channel_wise::<M, NR, 2>(cpu, blocks), 0, tile);
        } else {
            store::<M, 4>(channel_wise::<M, NR, 4>(cpu, blocks), 0, tile);
        }
        return;
    }
    for first in (0..NR).step_by(4) {
        let y = match layout.padded_group() {
            CHUNK => group_wise::<M, NR, true, false>(cpu, blocks, first),
            ..=NARROW => group_wise::<M, NR, false, false>(cpu, blocks, first),
            _ => group_wise::<M, NR, false, true>(cpu, blocks, first),
        };
        store::<M, 2>(y, first, tile);
    }
}

#[inline(always)]
fn store<const M: usize, const C: usize>(y: [[Floats; C]; 4], first: usize, tile: &mut Tile) {
    for i in 0..M.div_ceil(2) {
        for c in (0..C).step_by(2) {
            for (m, row) in halves(y[i][c], y[i][c + 1]).into_iter().enumerate() {
                tile[2 * i + m][first + 2 * c..first + 2 * c + 4].copy_from_slice(&lanes(row));
            }
        }
    }
}

/// `ONE`: groups of one chunk, the commonest. `WIDE`: of more than [`NARROW`] k.
#[inline(always)]
fn group_wise<const M: usize, const NR: usize, const ONE: bool, const WIDE: bool>(
    cpu: NeonI8mm,
    blocks: Blocks<'_>,
    first: usize,
) -> Quad<Floats> {
    let mut codes = Codes::first_group(blocks, first);
    let starts = reload(&STARTS);
    let mut a = [[floats(0.0); 2]; 4];
    for _ in 0..blocks.rhs_layout.groups() {
        // SAFETY: by the lengths that `first_group` has checked, there is a group here, and behind
        // it the scales of `NR` columns, eight bytes for four.
        let (sums, scales) = unsafe {
            let sums = match WIDE {
                false => narrow_sums::<M, NR, ONE>(cpu, &mut codes, starts),
                true => wide_sums::<M, NR>(cpu, &mut codes),
            };
            let scales = word(codes.w.sub((PIECE - 2) * first));
            codes.w = codes.w.add(2 * NR);
            (sums, spread(from_bf16(scales)))
        };
        for i in 0..M.div_ceil(2) {
            for h in 0..2 {
                a[i][h] = mul_add(sums[i][h], scales[h], a[i][h]);
            }
        }
    }
    let sums = spread(tail(blocks, first));
    let zeros = by_row::<M>(|m| blocks.panel.negated_zero_points()[m] as f32);
    let reciprocals = by_row::<M>(|m| blocks.panel.reciprocals()[m]);
    for i in 0..M.div_ceil(2) {
        for h in 0..2 {
            a[i][h] = mul(mul_add(sums[h], zeros[i], a[i][h]), reciprocals[i]);
        }
    }
    a
}

/// All `C` pairs of columns.
#[inline(always)]
fn channel_wise<const M: usize, const NR: usize, const C: usize>(
    cpu: NeonI8mm,
    blocks: Blocks<'_>,
) -> [[Floats; C]; 4] {
    let mut acc = [[ints(0); C]; 4];
    let mut codes = Codes::first_group(blocks, 0);
    let chunks = codes.chunks;
    // SAFETY: by the lengths that `first_group` has checked, there is a group here.
    unsafe { add_codes::<M, NR, C>(cpu, &mut acc, &mut codes, chunks) };
    // Integers; they only travel as floats.
    let zeros = by_row::<M>(|m| f32::from_bits(blocks.panel.negated_zero_points()[m] as u32));
    let reciprocals = by_row::<M>(|m| blocks.panel.reciprocals()[m]);
    let mut y = [[floats(0.0); C]; 4];
    for quad in 0..C / 2 {
        let sums = spread(tail(blocks, 4 * quad));
        let scales = spread(tail(blocks, NR + 4 * quad));
        for i in 0..M.div_ceil(2) {
            for h in 0..2 {
                let c = 2 * quad + h;
                let sum = mul_add_ints(as_ints(sums[h]), as_ints(zeros[i]), acc[i][c]);
                y[i][c] = mul(to_floats(sum), mul(scales[h], reciprocals[i]));
            }
        }
    }
    y
}

/// Σqw of a group of at most [`NARROW`] k.
///
/// # Safety
/// The group's codes can be read.
#[inline(always)]
unsafe fn narrow_sums<const M: usize, const NR: usize, const ONE: bool>(
    cpu: NeonI8mm,
    codes: &mut Codes,
    starts: Ints,
) -> Quad<Floats> {
    let chunks = if ONE { 1 } else { codes.chunks };
    let (mut acc, mut sums) = ([[ints(0); 2]; 4], [[floats(0.0); 2]; 4]);
    for i in 0..M.div_ceil(2) {
        acc[i] = [reload(&STARTS), reload(&STARTS)];
    }
    // SAFETY: by the caller.
    unsafe { add_codes::<M, NR, 2>(cpu, &mut acc, codes, chunks) };
    for i in 0..M.div_ceil(2) {
        sums[i] = [narrow(acc[i][0], starts), narrow(acc[i][1], starts)];
    }
    sums
}

/// Σqw of any group, modulo 2^32 before it becomes a float.
///
/// # Safety
/// The group's codes can be read.
#[inline(always)]
unsafe fn wide_sums<const M: usize, const NR: usize>(
    cpu: NeonI8mm,
    codes: &mut Codes,
) -> Quad<Floats> {
    let (mut total, mut sums) = ([[ints(0); 2]; 4], [[floats(0.0); 2]; 4]);
    let mut left = codes.chunks;
    while left > 0 {
        let chunks = left.min(SPAN);
        let mut acc = [[ints(0); 2]; 4];
        // SAFETY: by the caller; `left` counts what is left.
        unsafe { add_codes::<M, NR, 2>(cpu, &mut acc, codes, chunks) };
        for i in 0..M.div_ceil(2) {
            for h in 0..2 {
                total[i][h] = add_ints(total[i][h], sixteenth(acc[i][h]));
            }
        }
        left -= chunks;
    }
    for i in 0..M.div_ceil(2) {
        sums[i] = [to_floats(total[i][0]), to_floats(total[i][1])];
    }
    sums
}

/// Adds 16·Σqw of `C` pairs of columns, over `chunks` chunks (at least one), which `codes` moves
/// past.
///
/// # Safety
/// There are so many chunks, of `M` rows and `NR` columns, and `C` pairs of columns.
#[inline(always)]
unsafe fn add_codes<const M: usize, const NR: usize, const C: usize>(
    cpu: NeonI8mm,
    acc: &mut [[Ints; C]; 4],
    codes: &mut Codes,
    chunks: usize,
) {
    let mut left = chunks;
    loop {
        // SAFETY: by the caller there is a chunk.
        unsafe {
            segment::<M, NR, C, 0>(cpu, acc, codes);
            segment::<M, NR, C, 1>(cpu, acc, codes);
            codes.q = codes.q.add(CHUNK * M);
            codes.w = codes.w.add(CHUNK / 2 * NR);
        }
        left -= 1;
        if left == 0 {
            return;
        }
    }
}

/// Adds what segment `S` of a chunk holds: pieces `S` and `S` + 2.
///
/// # Safety
/// There is a chunk of `M` rows and `NR` columns, and `C` pairs of columns.
#[inline(always)]
unsafe fn segment<const M: usize, const NR: usize, const C: usize, const S: usize>(
    cpu: NeonI8mm,
    acc: &mut [[Ints; C]; 4],
    codes: &Codes,
) {
    // SAFETY: by the caller.
    unsafe {
        let mut w = [nibbles(load!(codes.w, S * NR * PIECE)); C];
        w[1] = nibbles(load!(codes.w, (S * NR + 2) * PIECE));
        if C == 4 {
            w[2] = nibbles(load!(codes.w, (S * NR + 4) * PIECE));
            w[3] = nibbles(load!(codes.w, (S * NR + 6) * PIECE));
        }
        rows::<M, C, S, 0>(cpu, &mut acc[0], codes.q, &w);
        if M > 2 {
            rows::<M, C, S, 1>(cpu, &mut acc[1], codes.q, &w);
        }
        if M > 4 {
            rows::<M, C, S, 2>(cpu, &mut acc[2], codes.q, &w);
        }
        if M > 6 {
            rows::<M, C, S, 3>(cpu, &mut acc[3], codes.q, &w);
        }
    }
}

/// Rows 2`I` and 2`I` + 1; zeros for a row that is not there.
///
/// # Safety
/// `q` is a chunk of `M` rows, of which row 2`I` is one.
#[inline(always)]
unsafe fn rows<const M: usize, const C: usize, const S: usize, const I: usize>(
    cpu: NeonI8mm,
    acc: &mut [Ints; C],
    q: *const u8,
    w: &[[Bytes; 2]; C],
) {
    // SAFETY: by the caller; a last row that has none beside it is read alone.
    let q = unsafe {
        match 2 * I + 1 < M {
            true => [load!(q, (S * M + 2 * I) * PIECE), load!(q, ((S + 2) * M + 2 * I) * PIECE)],
            false => [
                eight_bytes(word(q.add((S * M + 2 * I) * PIECE))),
                eight_bytes(word(q.add(((S + 2) * M + 2 * I) * PIECE))),
            ],
        }
    };
    for half in 0..2 {
        for c in 0..C {
            acc[c] = smmla(cpu, acc[c], q[half], w[c][half]);
        }
    }
}

/// `f` of rows 2i and 2i + 1, each twice; 0 for rows that are not there.
#[inline(always)]
fn by_row<const M: usize>(f: impl Fn(usize) -> f32) -> [Floats; 4] {
    let mut rows = [[0.0; 4]; 2];
    for m in 0..M {
        rows[m / 4][m % 4] = f(m);
    }
    let ([a, b], [c, d]) = (twice(from_lanes(rows[0])), twice(from_lanes(rows[1])));
    [a, b, c, d]
}
