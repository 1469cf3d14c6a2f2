//! Pairs of rows by pairs of columns.
// Index loops with fixed bounds unroll, so that arrays become registers. Iterator chains do not
// always unroll.
#![allow(clippy::needless_range_loop)]

use super::cpu::NeonI8mm;
use super::dot;
use super::ends::{self, Factors, Quad};
use super::ops::*;
use super::results::Results;
use super::sums::{Codes, NARROW, SPAN, STARTS, narrow, tail, two_rows};
use crate::w4a8::packed::{CHUNK, PIECE};
use crate::w4a8::panel::for_rows;
use crate::w4a8::{Panel, Run};

/// Passes the products of a panel with each block of `rhs` to `results`.
#[target_feature(enable = "neon,dotprod,i8mm")]
pub(super) fn each_block(cpu: NeonI8mm, panel: Panel<'_>, rhs: Run<'_>, results: impl Results) {
    match (panel.rows(), rhs.layout.nr()) {
        (1, _) => dot::each_block(cpu.dotprod(), panel, rhs, results),
        (rows, 4) => for_rows!(2.., rows, blocks[4](cpu, panel, rhs, results)),
        (rows, _) => for_rows!(2.., rows, blocks[8](cpu, panel, rhs, results)),
    }
}

#[inline(always)]
fn blocks<const M: usize, const NR: usize>(
    cpu: NeonI8mm,
    panel: Panel<'_>,
    rhs: Run<'_>,
    mut results: impl Results,
) {
    let layout = rhs.layout;
    let rows = Factors::of::<M>(panel, layout.is_channel_wise());
    for (b, block) in rhs.bytes.chunks_exact(layout.block_bytes()).enumerate() {
        let codes = Codes::new(panel, layout, block);
        match (layout.is_channel_wise(), NR) {
            (true, 4) => channel_wise::<M, NR, 2>(cpu, codes, block, b, &rows, &mut results),
            (true, _) => channel_wise::<M, NR, 4>(cpu, codes, block, b, &rows, &mut results),
            // Four columns at a time: float and integer sums fill the registers.
            _ => {
                for quad in 0..NR / 4 {
                    let a = match layout.padded_group() {
                        CHUNK => group_wise::<M, NR, true, false>(cpu, codes, 4 * quad),
                        ..=NARROW => group_wise::<M, NR, false, false>(cpu, codes, 4 * quad),
                        _ => group_wise::<M, NR, false, true>(cpu, codes, 4 * quad),
                    };
                    let tail = tail(block, 2 * NR / 4);
                    let y = ends::group_wise::<M>(a, float_bytes(tail[quad]), &rows);
                    let biases = float_bytes(tail[NR / 4 + quad]);
                    // SAFETY: the panel has `M` rows.
                    unsafe { ends::put::<M>(y, [0, b * NR + 4 * quad], biases, &mut results) };
                }
            }
        }
    }
}

/// `a` of four columns from `first` on. `ONE`: groups of one chunk, the most common. `WIDE`: groups of
/// more than [`NARROW`] k.
#[inline(always)]
fn group_wise<const M: usize, const NR: usize, const ONE: bool, const WIDE: bool>(
    cpu: NeonI8mm,
    codes: Codes,
    first: usize,
) -> Quad<Floats> {
    let mut codes = codes.at_column(first);
    let starts = reload(&STARTS);
    let mut a = [[floats(0.0); 2]; 4];
    for _ in 0..codes.groups {
        // SAFETY: `Codes` has checked the lengths: a group starts here, followed by the scales of
        // `NR` columns, eight bytes for four.
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
            for c in 0..2 {
                a[i][c] = mul_add(sums[i][c], scales[c], a[i][c]);
            }
        }
    }
    a
}

/// Block `b`, all `C` pairs of columns at a time.
#[inline(always)]
fn channel_wise<const M: usize, const NR: usize, const C: usize>(
    cpu: NeonI8mm,
    mut codes: Codes,
    block: &[u8],
    b: usize,
    rows: &Factors,
    results: &mut impl Results,
) {
    let (tail, chunks) = (tail(block, 3 * NR / 4), codes.chunks);
    let left = ends::channel_wise_starts::<M>(float_bytes(tail[0]), rows);
    let right = ends::channel_wise_starts::<M>(float_bytes(tail[NR / 4 - 1]), rows);
    let mut acc = [[ints(0); C]; 4];
    for i in 0..4 {
        for c in 0..C {
            acc[i][c] = if c < 2 { left[i][c] } else { right[i][c - 2] };
        }
    }
    // SAFETY: `Codes` has checked the lengths: a group starts here.
    unsafe { add_codes::<M, NR, C>(cpu, &mut acc, &mut codes, chunks) };
    // Written out, because a loop would not unroll.
    channel_wise_end::<M, NR, C, 0>(&acc, tail, b, rows, results);
    if C == 4 {
        channel_wise_end::<M, NR, C, 1>(&acc, tail, b, rows, results);
    }
}

/// Pairs of columns 2`Q` and 2`Q` + 1 of block `b`.
#[inline(always)]
fn channel_wise_end<const M: usize, const NR: usize, const C: usize, const Q: usize>(
    acc: &[[Ints; C]; 4],
    tail: &[[u8; 16]],
    b: usize,
    rows: &Factors,
    results: &mut impl Results,
) {
    let (scales, biases) = (float_bytes(tail[NR / 4 + Q]), float_bytes(tail[2 * NR / 4 + Q]));
    let mut quad = [[ints(0); 2]; 4];
    for i in 0..4 {
        quad[i] = [acc[i][2 * Q], acc[i][2 * Q + 1]];
    }
    let y = ends::channel_wise::<M>(quad, scales, rows);
    // SAFETY: the panel has `M` rows.
    unsafe { ends::put::<M>(y, [0, b * NR + 4 * Q], biases, results) };
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
    // SAFETY: guaranteed by the caller.
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
        // SAFETY: guaranteed by the caller; `left` counts the remaining chunks.
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

/// Adds 16·Σqw of `C` pairs of columns over `chunks` chunks (at least one) and advances `codes`.
///
/// # Safety
/// `codes` has `chunks` chunks left, of `M` rows and `NR` columns, and `C` pairs of columns.
#[inline(always)]
unsafe fn add_codes<const M: usize, const NR: usize, const C: usize>(
    cpu: NeonI8mm,
    acc: &mut [[Ints; C]; 4],
    codes: &mut Codes,
    chunks: usize,
) {
    let mut left = chunks;
    loop {
        // SAFETY: the caller guarantees the chunk.
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

/// Adds the products of segment `S` of a chunk: pieces `S` and `S` + 2.
///
/// # Safety
/// There is a chunk of `M` rows and `NR` columns, and `C` pairs of columns.
#[inline(always)]
unsafe fn segment<const M: usize, const NR: usize, const C: usize, const S: usize>(
    cpu: NeonI8mm,
    acc: &mut [[Ints; C]; 4],
    codes: &Codes,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let w = weights::<NR, C, S>(codes.w);
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

/// `C` pairs of columns of segment `S` of a chunk: pieces `S` and `S` + 2.
///
/// # Safety
/// There is a chunk of `NR` columns with at least 2·`C` of them left.
#[inline(always)]
pub(super) unsafe fn weights<const NR: usize, const C: usize, const S: usize>(
    w: *const u8,
) -> [[Bytes; 2]; C] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut pairs = [nibbles(load!(w, S * NR * PIECE)); C];
        pairs[1] = nibbles(load!(w, (S * NR + 2) * PIECE));
        if C == 4 {
            pairs[2] = nibbles(load!(w, (S * NR + 4) * PIECE));
            pairs[3] = nibbles(load!(w, (S * NR + 6) * PIECE));
        }
        pairs
    }
}

/// Adds the products of rows 2`I` and 2`I` + 1 in segment `S`; a missing row is zeros.
///
/// # Safety
/// `q` is a chunk of `M` rows, and 2`I` is below `M`.
#[inline(always)]
pub(super) unsafe fn rows<const M: usize, const C: usize, const S: usize, const I: usize>(
    cpu: NeonI8mm,
    acc: &mut [Ints; C],
    q: *const u8,
    w: &[[Bytes; 2]; C],
) {
    // SAFETY: guaranteed by the caller.
    let q = unsafe { two_rows::<M, S, I>(q) };
    for half in 0..2 {
        for c in 0..C {
            acc[c] = smmla(cpu, acc[c], q[half], w[c][half]);
        }
    }
}
