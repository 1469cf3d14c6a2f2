//! One row by pairs of columns, with eight codes of the row duplicated.
// Index loops with fixed bounds unroll, so that arrays become registers. Iterator chains do not
// always unroll.
#![allow(clippy::needless_range_loop)]

use super::cpu::NeonDotprod;
use super::lanes;
use super::ops::*;
use super::results::Results;
use super::sums::{Codes, NARROW, SPAN, STARTS, STARTS_OF_PAIRS, narrow, tail};
use crate::w4a8::packed::{CHUNK, PIECE};
use crate::w4a8::{Panel, Run};

/// Sums of `H` times four columns; as integers, two lanes for each column.
type Pairs<const H: usize> = [[Ints; 2]; H];

/// Passes the products of a panel with each block of `rhs` to `results`.
#[target_feature(enable = "neon,dotprod")]
pub(super) fn each_block(
    cpu: NeonDotprod,
    panel: Panel<'_>,
    rhs: Run<'_>,
    mut results: impl Results,
) {
    match (panel.rows(), rhs.layout.nr()) {
        (1, 4) => blocks::<1>(cpu, panel, rhs, &mut results),
        (1, _) => blocks::<2>(cpu, panel, rhs, &mut results),
        _ => lanes::each_block(cpu, panel, rhs, &mut results),
    }
}

/// Blocks of `H` times four columns.
#[inline(always)]
fn blocks<const H: usize>(
    cpu: NeonDotprod,
    panel: Panel<'_>,
    rhs: Run<'_>,
    results: &mut impl Results,
) {
    let layout = rhs.layout;
    let (zero, reciprocal) = (panel.negated_zero_points()[0], floats(panel.reciprocals()[0]));
    for (b, block) in rhs.bytes.chunks_exact(layout.block_bytes()).enumerate() {
        let codes = Codes::new(panel, layout, block);
        let mut y = [floats(0.0); H];
        if layout.is_channel_wise() {
            let (acc, tail) = (channel_sums::<H>(cpu, codes), tail(block, 3 * H));
            for h in 0..H {
                let (sums, scales) = (as_ints(float_bytes(tail[h])), float_bytes(tail[H + h]));
                let sum = mul_add_ints(sums, ints(zero), acc[h]);
                y[h] = mul(to_floats(sum), mul(scales, reciprocal));
            }
        } else {
            let a = match layout.padded_group() {
                CHUNK => group_wise::<H, true, false>(cpu, codes),
                ..=NARROW => group_wise::<H, false, false>(cpu, codes),
                _ => group_wise::<H, false, true>(cpu, codes),
            };
            let tail = tail(block, 2 * H);
            for h in 0..H {
                let sums = float_bytes(tail[h]);
                y[h] = mul(mul_add(sums, floats(zero as f32), a[h]), reciprocal);
            }
        }
        let biases = tail(block, H);
        for h in 0..H {
            // SAFETY: a panel has a row 0.
            unsafe { results.put(0, 4 * (b * H + h), y[h], float_bytes(biases[h])) };
        }
    }
}

/// `ONE`: groups of one chunk, the most common. `WIDE`: groups of more than [`NARROW`] k.
#[inline(always)]
fn group_wise<const H: usize, const ONE: bool, const WIDE: bool>(
    cpu: NeonDotprod,
    mut codes: Codes,
) -> [Floats; H] {
    let starts = reload(&STARTS);
    let mut a = [floats(0.0); H];
    for _ in 0..codes.groups {
        // SAFETY: `Codes` has checked the lengths: a group starts here, followed by the scales of
        // its columns, eight bytes for four.
        let (sums, scales) = unsafe {
            let sums = match WIDE {
                false => narrow_sums::<H, ONE>(cpu, &mut codes, starts),
                true => wide_sums::<H>(cpu, &mut codes),
            };
            let from = codes.w;
            codes.w = codes.w.add(8 * H);
            let scales = match H {
                1 => [from_bf16(word(from)); 2],
                _ => eight_from_bf16(load!(from, 0)),
            };
            (sums, scales)
        };
        for h in 0..H {
            a[h] = mul_add(sums[h], scales[h], a[h]);
        }
    }
    a
}

/// 16·Σqw of all k.
#[inline(always)]
fn channel_sums<const H: usize>(cpu: NeonDotprod, mut codes: Codes) -> [Ints; H] {
    let (mut acc, mut sums, chunks) = ([[ints(0); 2]; H], [ints(0); H], codes.chunks);
    // SAFETY: `Codes` has checked the lengths: a group starts here.
    unsafe { add_codes(cpu, &mut acc, &mut codes, chunks) };
    for h in 0..H {
        sums[h] = add_pairs(acc[h][0], acc[h][1]);
    }
    sums
}

/// Σqw of a group of at most [`NARROW`] k.
///
/// # Safety
/// The group's codes can be read.
#[inline(always)]
unsafe fn narrow_sums<const H: usize, const ONE: bool>(
    cpu: NeonDotprod,
    codes: &mut Codes,
    starts: Ints,
) -> [Floats; H] {
    let chunks = if ONE { 1 } else { codes.chunks };
    let (mut acc, mut sums) = ([[ints(0); 2]; H], [floats(0.0); H]);
    for h in 0..H {
        acc[h] = [reload(&STARTS_OF_PAIRS), reload(&STARTS_OF_PAIRS)];
    }
    // SAFETY: guaranteed by the caller.
    unsafe { add_codes(cpu, &mut acc, codes, chunks) };
    for h in 0..H {
        sums[h] = narrow(add_pairs(acc[h][0], acc[h][1]), starts);
    }
    sums
}

/// Σqw of any group, modulo 2^32 before it becomes a float.
///
/// # Safety
/// The group's codes can be read.
#[inline(always)]
unsafe fn wide_sums<const H: usize>(cpu: NeonDotprod, codes: &mut Codes) -> [Floats; H] {
    let (mut total, mut sums) = ([ints(0); H], [floats(0.0); H]);
    let mut left = codes.chunks;
    while left > 0 {
        let (chunks, mut acc) = (left.min(SPAN), [[ints(0); 2]; H]);
        // SAFETY: guaranteed by the caller; `left` counts the remaining chunks.
        unsafe { add_codes(cpu, &mut acc, codes, chunks) };
        for h in 0..H {
            total[h] = add_ints(total[h], sixteenth(add_pairs(acc[h][0], acc[h][1])));
        }
        left -= chunks;
    }
    for h in 0..H {
        sums[h] = to_floats(total[h]);
    }
    sums
}

/// Adds 16·Σqw over `chunks` chunks (at least one) and advances `codes`.
///
/// # Safety
/// `codes` has `chunks` chunks left, of one row and `H` times four columns.
#[inline(always)]
unsafe fn add_codes<const H: usize>(
    cpu: NeonDotprod,
    acc: &mut Pairs<H>,
    codes: &mut Codes,
    chunks: usize,
) {
    let mut left = chunks;
    loop {
        for s in 0..2 {
            // SAFETY: guaranteed by the caller: segment `s` of two, pieces below four.
            unsafe {
                let from = codes.w.add(4 * H * s * PIECE);
                let low = broadcast(word(codes.q.add(s * PIECE)));
                let high = broadcast(word(codes.q.add((s + 2) * PIECE)));
                let quad = [nibbles(load!(from, 0)), nibbles(load!(from, 2 * PIECE))];
                let mut w = [quad; H];
                if H == 2 {
                    w[1] = [nibbles(load!(from, 4 * PIECE)), nibbles(load!(from, 6 * PIECE))];
                }
                for h in 0..H {
                    for c in 0..2 {
                        acc[h][c] = sdot(cpu, acc[h][c], w[h][c][0], low);
                        acc[h][c] = sdot(cpu, acc[h][c], w[h][c][1], high);
                    }
                }
            }
        }
        // SAFETY: the caller guarantees the chunk.
        unsafe {
            codes.q = codes.q.add(CHUNK);
            codes.w = codes.w.add(CHUNK / 2 * 4 * H);
        }
        left -= 1;
        if left == 0 {
            return;
        }
    }
}
