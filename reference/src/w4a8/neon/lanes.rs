//! Several rows by four columns, where each lane is a column: four codes of a row, adjacent in memory,
//! multiply four codes of each column.
// Index loops with fixed bounds unroll, so that arrays become registers. Iterator chains do not
// always unroll.
#![allow(clippy::needless_range_loop)]

use super::cpu::NeonDotprod;
use super::ops::*;
use super::results::Results;
use super::sums::{Codes, NARROW, SPAN, STARTS, narrow, tail, two_rows};
use crate::w4a8::packed::{CHUNK, PIECE};
use crate::w4a8::panel::for_rows;
use crate::w4a8::{Panel, Run};

/// Passes the products of a panel of two rows or more with each block of `rhs` to `results`.
#[target_feature(enable = "neon,dotprod")]
pub(super) fn each_block(
    cpu: NeonDotprod,
    panel: Panel<'_>,
    rhs: Run<'_>,
    results: &mut impl Results,
) {
    match rhs.layout.nr() {
        4 => for_rows!(2.., panel.rows(), blocks[4](cpu, panel, rhs, results)),
        _ => for_rows!(2.., panel.rows(), blocks[8](cpu, panel, rhs, results)),
    }
}

#[inline(always)]
fn blocks<const M: usize, const NR: usize>(
    cpu: NeonDotprod,
    panel: Panel<'_>,
    rhs: Run<'_>,
    results: &mut impl Results,
) {
    let (layout, quads) = (rhs.layout, NR / 4);
    let (zeros, reciprocals) = (panel.negated_zero_points(), panel.reciprocals());
    for (b, block) in rhs.bytes.chunks_exact(layout.block_bytes()).enumerate() {
        for quad in 0..quads {
            let codes = Codes::new(panel, layout, block).at_column(4 * quad);
            let mut y = [floats(0.0); M];
            if layout.is_channel_wise() {
                let acc = channel_sums::<M, NR>(cpu, codes);
                let tail = tail(block, 3 * quads);
                let sums = as_ints(float_bytes(tail[quad]));
                let scales = float_bytes(tail[quads + quad]);
                for m in 0..M {
                    let sum = mul_add_ints(sums, ints(zeros[m]), acc[m]);
                    y[m] = mul(to_floats(sum), mul(scales, floats(reciprocals[m])));
                }
            } else {
                let a = match layout.padded_group() {
                    CHUNK => group_wise::<M, NR, true, false>(cpu, codes, 4 * quad),
                    ..=NARROW => group_wise::<M, NR, false, false>(cpu, codes, 4 * quad),
                    _ => group_wise::<M, NR, false, true>(cpu, codes, 4 * quad),
                };
                let sums = float_bytes(tail(block, 2 * quads)[quad]);
                for m in 0..M {
                    let sum = mul_add(sums, floats(zeros[m] as f32), a[m]);
                    y[m] = mul(sum, floats(reciprocals[m]));
                }
            }
            let biases = float_bytes(tail(block, quads)[quad]);
            for m in 0..M {
                // SAFETY: the panel has `M` rows.
                unsafe { results.put(m, b * NR + 4 * quad, y[m], biases) };
            }
        }
    }
}

/// Four columns of the block, from `first` on. `ONE`: groups of one chunk, the most common. `WIDE`:
/// groups of more than [`NARROW`] k.
#[inline(always)]
fn group_wise<const M: usize, const NR: usize, const ONE: bool, const WIDE: bool>(
    cpu: NeonDotprod,
    mut codes: Codes,
    first: usize,
) -> [Floats; M] {
    let starts = reload(&STARTS);
    let mut a = [floats(0.0); M];
    for _ in 0..codes.groups {
        // SAFETY: `Codes` has checked the lengths: a group starts here, followed by the scales of
        // `NR` columns, of two bytes where a segment of a column has eight.
        let (sums, scales) = unsafe {
            let sums = match WIDE {
                false => narrow_sums::<M, NR, ONE>(cpu, &mut codes, starts),
                true => wide_sums::<M, NR>(cpu, &mut codes),
            };
            let scales = word(codes.w.sub((PIECE - 2) * first));
            codes.w = codes.w.add(2 * NR);
            (sums, from_bf16(scales))
        };
        for m in 0..M {
            a[m] = mul_add(sums[m], scales, a[m]);
        }
    }
    a
}

/// 16·Σqw of all k.
#[inline(always)]
fn channel_sums<const M: usize, const NR: usize>(cpu: NeonDotprod, mut codes: Codes) -> [Ints; M] {
    let (mut acc, chunks) = ([ints(0); M], codes.chunks);
    // SAFETY: `Codes` has checked the lengths: a group starts here.
    unsafe { add_codes::<M, NR>(cpu, &mut acc, &mut codes, chunks) };
    acc
}

/// Σqw of a group of at most [`NARROW`] k.
///
/// # Safety
/// The group's codes can be read.
#[inline(always)]
unsafe fn narrow_sums<const M: usize, const NR: usize, const ONE: bool>(
    cpu: NeonDotprod,
    codes: &mut Codes,
    starts: Ints,
) -> [Floats; M] {
    let chunks = if ONE { 1 } else { codes.chunks };
    let (mut acc, mut sums) = ([ints(0); M], [floats(0.0); M]);
    for m in 0..M {
        acc[m] = reload(&STARTS);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { add_codes::<M, NR>(cpu, &mut acc, codes, chunks) };
    for m in 0..M {
        sums[m] = narrow(acc[m], starts);
    }
    sums
}

/// Σqw of any group, modulo 2^32 before it becomes a float.
///
/// # Safety
/// The group's codes can be read.
#[inline(always)]
unsafe fn wide_sums<const M: usize, const NR: usize>(
    cpu: NeonDotprod,
    codes: &mut Codes,
) -> [Floats; M] {
    let (mut total, mut sums) = ([ints(0); M], [floats(0.0); M]);
    let mut left = codes.chunks;
    while left > 0 {
        let (chunks, mut acc) = (left.min(SPAN), [ints(0); M]);
        // SAFETY: guaranteed by the caller; `left` counts the remaining chunks.
        unsafe { add_codes::<M, NR>(cpu, &mut acc, codes, chunks) };
        for m in 0..M {
            total[m] = add_ints(total[m], sixteenth(acc[m]));
        }
        left -= chunks;
    }
    for m in 0..M {
        sums[m] = to_floats(total[m]);
    }
    sums
}

/// Adds 16·Σqw of four columns over `chunks` chunks (at least one) and advances `codes`.
///
/// # Safety
/// `codes` has `chunks` chunks left, of `M` rows and `NR` columns, and four columns.
#[inline(always)]
unsafe fn add_codes<const M: usize, const NR: usize>(
    cpu: NeonDotprod,
    acc: &mut [Ints; M],
    codes: &mut Codes,
    chunks: usize,
) {
    let mut left = chunks;
    loop {
        // SAFETY: the caller guarantees the chunk.
        unsafe {
            segment::<M, NR, 0>(cpu, acc, codes);
            segment::<M, NR, 1>(cpu, acc, codes);
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
/// There is a chunk of `M` rows and `NR` columns, and four columns.
#[inline(always)]
unsafe fn segment<const M: usize, const NR: usize, const S: usize>(
    cpu: NeonDotprod,
    acc: &mut [Ints; M],
    codes: &Codes,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (left, right) = (load!(codes.w, S * NR * PIECE), load!(codes.w, (S * NR + 2) * PIECE));
        // The first four k of a piece for four columns, and the other four.
        let [first, second] = words(left, right);
        let w = [nibbles(first), nibbles(second)];
        rows::<M, S, 0>(cpu, acc, codes.q, &w);
        if M > 2 {
            rows::<M, S, 1>(cpu, acc, codes.q, &w);
        }
        if M > 4 {
            rows::<M, S, 2>(cpu, acc, codes.q, &w);
        }
        if M > 6 {
            rows::<M, S, 3>(cpu, acc, codes.q, &w);
        }
    }
}

/// Adds the products of rows 2`I` and 2`I` + 1 in segment `S`.
///
/// # Safety
/// `q` is a chunk of `M` rows, and 2`I` is below `M`.
#[inline(always)]
unsafe fn rows<const M: usize, const S: usize, const I: usize>(
    cpu: NeonDotprod,
    acc: &mut [Ints; M],
    q: *const u8,
    w: &[[Bytes; 2]; 2],
) {
    // SAFETY: guaranteed by the caller.
    let q = unsafe { two_rows::<M, S, I>(q) };
    for half in 0..2 {
        acc[2 * I] = sdot_lane::<0>(cpu, acc[2 * I], w[0][half], q[half]);
        if 2 * I + 1 < M {
            acc[2 * I + 1] = sdot_lane::<2>(cpu, acc[2 * I + 1], w[0][half], q[half]);
        }
        acc[2 * I] = sdot_lane::<1>(cpu, acc[2 * I], w[1][half], q[half]);
        if 2 * I + 1 < M {
            acc[2 * I + 1] = sdot_lane::<3>(cpu, acc[2 * I + 1], w[1][half], q[half]);
        }
    }
}
