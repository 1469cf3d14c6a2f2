//! Rows by pairs of columns, a row's eight codes beside themselves.
// Loops over indices of fixed bounds unroll, so that arrays become registers; chains of iterators
// do not always.
#![allow(clippy::needless_range_loop)]

use super::NeonDotprod;
use super::ops::*;
use super::results::Results;
use super::sums::{Codes, NARROW, SPAN, STARTS, STARTS_OF_PAIRS, narrow, tail};
use crate::layout::kleidi::{CHUNK, PIECE};
use crate::w4a8::{Panel, Run};

/// Sums of `M` rows by `H` times four columns. As integers, two lanes for each column.
type Pairs<const M: usize, const H: usize> = [[[Ints; 2]; H]; M];
type Quads<const M: usize, const H: usize> = [[Floats; H]; M];

/// Hands the products of a panel with each block of `rhs` to `results`.
#[target_feature(enable = "neon,dotprod")]
pub(super) fn each_block(
    cpu: NeonDotprod,
    panel: Panel<'_>,
    rhs: Run<'_>,
    mut results: impl Results,
) {
    let (rows, nr) = (panel.rows(), rhs.layout.nr());
    for (b, bytes) in rhs.bytes.chunks_exact(rhs.layout.block_bytes()).enumerate() {
        let codes = Codes::new(panel, rhs.layout, bytes);
        let block = Block { panel, rhs, codes, bytes, first: b * nr };
        let results = &mut results;
        match (rows, nr) {
            // The strides are constants of the loops.
            (1, 4) => part::<1, 1>(cpu, block, At { m: 0, rows: 1, n: 0, nr: 4 }, results),
            (1, _) => part::<1, 2>(cpu, block, At { m: 0, rows: 1, n: 0, nr: 8 }, results),
            (..) => several_rows(cpu, block, results),
        }
    }
}

/// A panel beside a block of a run.
#[derive(Clone, Copy)]
struct Block<'a> {
    panel: Panel<'a>,
    rhs: Run<'a>,
    codes: Codes,
    bytes: &'a [u8],
    /// The block's first column in the run.
    first: usize,
}

impl Block<'_> {
    /// −zero point and 1 / scale of row `m`.
    fn row_factors(&self, m: usize) -> (i32, f32) {
        (self.panel.negated_zero_points()[m], self.panel.reciprocals()[m])
    }
}

/// As many rows and columns at a time as there are registers for.
#[target_feature(enable = "neon,dotprod")]
fn several_rows(cpu: NeonDotprod, block: Block<'_>, results: &mut impl Results) {
    let (rows, nr) = (block.panel.rows(), block.rhs.layout.nr());
    for n in (0..nr).step_by(4) {
        for m in (0..rows).step_by(4) {
            let at = At { m, rows, n, nr };
            match rows - m {
                1 => part::<1, 1>(cpu, block, at, results),
                2 => part::<2, 1>(cpu, block, at, results),
                3 => part::<3, 1>(cpu, block, at, results),
                _ => part::<4, 1>(cpu, block, at, results),
            }
        }
    }
}

/// `M` rows by `H` times four columns.
#[inline(always)]
fn part<const M: usize, const H: usize>(
    cpu: NeonDotprod,
    block: Block<'_>,
    at: At,
    results: &mut impl Results,
) {
    let layout = block.rhs.layout;
    let y: Quads<M, H> = if layout.is_channel_wise() {
        channel_wise(cpu, block, at)
    } else {
        match layout.padded_group() {
            CHUNK => group_wise::<M, H, true, false>(cpu, block, at),
            ..=NARROW => group_wise::<M, H, false, false>(cpu, block, at),
            _ => group_wise::<M, H, false, true>(cpu, block, at),
        }
    };
    let biases = tail(block.bytes, at.nr / 4);
    for h in 0..H {
        let biases = float_bytes(biases[at.n / 4 + h]);
        for m in 0..M {
            // SAFETY: `at` is within the panel.
            unsafe { results.put(at.m + m, block.first + at.n + 4 * h, y[m][h], biases) };
        }
    }
}

/// The first row and column, of a panel of `rows` and a block of `nr`.
#[derive(Clone, Copy)]
struct At {
    m: usize,
    rows: usize,
    n: usize,
    nr: usize,
}

/// `ONE`: groups of one chunk, the commonest. `WIDE`: of more than [`NARROW`] k.
#[inline(always)]
fn group_wise<const M: usize, const H: usize, const ONE: bool, const WIDE: bool>(
    cpu: NeonDotprod,
    block: Block<'_>,
    at: At,
) -> Quads<M, H> {
    let mut codes = block.codes.at_column(at.n);
    let starts = reload(&STARTS);
    let mut a = [[floats(0.0); H]; M];
    for _ in 0..codes.groups {
        // SAFETY: by the lengths that `Codes` has checked, there is a group here.
        let sums: Quads<M, H> = unsafe {
            match WIDE {
                false => narrow_sums::<M, H, ONE>(cpu, &mut codes, at, starts),
                true => wide_sums(cpu, &mut codes, at),
            }
        };
        // SAFETY: behind the group are the scales of `at.nr` columns, eight bytes for four.
        let scales = unsafe {
            let from = codes.w.sub((PIECE - 2) * at.n);
            codes.w = codes.w.add(2 * at.nr);
            match H {
                1 => [from_bf16(word(from)); 2],
                _ => eight_from_bf16(load!(from, 0)),
            }
        };
        for h in 0..H {
            for m in 0..M {
                a[m][h] = mul_add(sums[m][h], scales[h], a[m][h]);
            }
        }
    }
    let sums = tail(block.bytes, 2 * at.nr / 4);
    for m in 0..M {
        let (zero, reciprocal) = block.row_factors(at.m + m);
        for h in 0..H {
            let sums = float_bytes(sums[at.n / 4 + h]);
            a[m][h] = mul(mul_add(sums, floats(zero as f32), a[m][h]), floats(reciprocal));
        }
    }
    a
}

#[inline(always)]
fn channel_wise<const M: usize, const H: usize>(
    cpu: NeonDotprod,
    block: Block<'_>,
    at: At,
) -> Quads<M, H> {
    let mut acc = [[[ints(0); 2]; H]; M];
    let mut codes = block.codes.at_column(at.n);
    let chunks = codes.chunks;
    // SAFETY: by the lengths that `Codes` has checked, there is a group here.
    unsafe { add_codes(cpu, &mut acc, &mut codes, at, chunks) };
    let (tail, mut y) = (tail(block.bytes, 3 * at.nr / 4), [[floats(0.0); H]; M]);
    for m in 0..M {
        let (zero, reciprocal) = block.row_factors(at.m + m);
        for h in 0..H {
            let sums = as_ints(float_bytes(tail[at.n / 4 + h]));
            let scales = float_bytes(tail[(at.nr + at.n) / 4 + h]);
            let sum = mul_add_ints(sums, ints(zero), add_pairs(acc[m][h][0], acc[m][h][1]));
            y[m][h] = mul(to_floats(sum), mul(scales, floats(reciprocal)));
        }
    }
    y
}

/// Σqw of a group of at most [`NARROW`] k.
///
/// # Safety
/// The group's codes can be read.
#[inline(always)]
unsafe fn narrow_sums<const M: usize, const H: usize, const ONE: bool>(
    cpu: NeonDotprod,
    codes: &mut Codes,
    at: At,
    starts: Ints,
) -> Quads<M, H> {
    let chunks = if ONE { 1 } else { codes.chunks };
    let (mut acc, mut sums) = ([[[ints(0); 2]; H]; M], [[floats(0.0); H]; M]);
    for m in 0..M {
        for h in 0..H {
            acc[m][h] = [reload(&STARTS_OF_PAIRS), reload(&STARTS_OF_PAIRS)];
        }
    }
    // SAFETY: by the caller.
    unsafe { add_codes(cpu, &mut acc, codes, at, chunks) };
    for m in 0..M {
        for h in 0..H {
            sums[m][h] = narrow(add_pairs(acc[m][h][0], acc[m][h][1]), starts);
        }
    }
    sums
}

/// Σqw of any group, modulo 2^32 before it becomes a float.
///
/// # Safety
/// The group's codes can be read.
#[inline(always)]
unsafe fn wide_sums<const M: usize, const H: usize>(
    cpu: NeonDotprod,
    codes: &mut Codes,
    at: At,
) -> Quads<M, H> {
    let (mut total, mut sums) = ([[ints(0); H]; M], [[floats(0.0); H]; M]);
    let mut left = codes.chunks;
    while left > 0 {
        let chunks = left.min(SPAN);
        let mut acc = [[[ints(0); 2]; H]; M];
        // SAFETY: by the caller; `left` counts what is left.
        unsafe { add_codes(cpu, &mut acc, codes, at, chunks) };
        for m in 0..M {
            for h in 0..H {
                let sum = add_pairs(acc[m][h][0], acc[m][h][1]);
                total[m][h] = add_ints(total[m][h], sixteenth(sum));
            }
        }
        left -= chunks;
    }
    for m in 0..M {
        for h in 0..H {
            sums[m][h] = to_floats(total[m][h]);
        }
    }
    sums
}

/// Adds 16·Σqw over `chunks` chunks (at least one), which `codes` moves past.
///
/// # Safety
/// There are so many chunks, of `at.rows` rows and `at.nr` columns, and what `at` says is in them.
#[inline(always)]
unsafe fn add_codes<const M: usize, const H: usize>(
    cpu: NeonDotprod,
    acc: &mut Pairs<M, H>,
    codes: &mut Codes,
    at: At,
    chunks: usize,
) {
    let mut left = chunks;
    loop {
        for s in 0..2 {
            // SAFETY: by the caller: segment `s` of two, pieces below four.
            unsafe {
                let from = codes.w.add(s * at.nr * PIECE);
                let q = |piece: usize, m: usize| {
                    broadcast(word(codes.q.add((piece * at.rows + at.m + m) * PIECE)))
                };
                let (mut low, mut high) = ([q(s, 0); M], [q(s + 2, 0); M]);
                for m in 1..M {
                    (low[m], high[m]) = (q(s, m), q(s + 2, m));
                }
                let quad = [nibbles(load!(from, 0)), nibbles(load!(from, 2 * PIECE))];
                let mut w = [quad; H];
                if H == 2 {
                    w[1] = [nibbles(load!(from, 4 * PIECE)), nibbles(load!(from, 6 * PIECE))];
                }
                for h in 0..H {
                    for m in 0..M {
                        for c in 0..2 {
                            let sum = sdot(cpu, acc[m][h][c], w[h][c][0], low[m]);
                            acc[m][h][c] = sdot(cpu, sum, w[h][c][1], high[m]);
                        }
                    }
                }
            }
        }
        // SAFETY: by the caller there was a chunk.
        unsafe {
            codes.q = codes.q.add(CHUNK * at.rows);
            codes.w = codes.w.add(CHUNK / 2 * at.nr);
        }
        left -= 1;
        if left == 0 {
            return;
        }
    }
}
