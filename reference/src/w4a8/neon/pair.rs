//! Two panels of eight rows by four columns: sixteen rows share the expansion of nibbles to bytes.
// Index loops with fixed bounds unroll, so that arrays become registers. Iterator chains do not
// always unroll.
#![allow(clippy::needless_range_loop)]

use super::cpu::NeonI8mm;
use super::ends::{self, Factors, Quad};
use super::matrix::{rows, weights};
use super::ops::*;
use super::results::Results;
use super::sums::{Codes, NARROW, STARTS, tail};
use crate::w4a8::packed::{CHUNK, PIECE, RhsLayout};
use crate::w4a8::{Panel, Run};

/// Rows of a panel.
const M: usize = 8;
/// Sixteen rows by four columns.
type Pair<T> = [Quad<T>; 2];
/// k after which the block's other columns are processed: so that the codes of sixteen rows stay in
/// the L1 cache.
const TURN: usize = 2048;

/// Whether [`each_block`] supports these panels.
pub(super) fn fits(panels: [Panel<'_>; 2], layout: RhsLayout) -> bool {
    panels.iter().all(|panel| panel.rows() == M)
        && (layout.is_channel_wise() || layout.padded_group() <= NARROW)
}

/// Passes the products of two panels with each block of `rhs` to `results`. Panics if they do not
/// fit.
#[target_feature(enable = "neon,dotprod,i8mm")]
pub(super) fn each_block(
    cpu: NeonI8mm,
    panels: [Panel<'_>; 2],
    rhs: Run<'_>,
    results: impl Results,
) {
    assert!(fits(panels, rhs.layout), "panels of eight rows, narrow groups");
    match rhs.layout.nr() {
        4 => blocks::<4, 1>(cpu, panels, rhs, results),
        _ => blocks::<8, 2>(cpu, panels, rhs, results),
    }
}

/// A block is `Q` times four columns.
#[inline(always)]
fn blocks<const NR: usize, const Q: usize>(
    cpu: NeonI8mm,
    panels: [Panel<'_>; 2],
    rhs: Run<'_>,
    mut results: impl Results,
) {
    let layout = rhs.layout;
    let [first, second] = panels;
    let whole = layout.is_channel_wise();
    let factors = [Factors::of::<M>(first, whole), Factors::of::<M>(second, whole)];
    for (b, block) in rhs.bytes.chunks_exact(layout.block_bytes()).enumerate() {
        let codes = PairCodes::new(panels, layout, block);
        let end = End { block, n: b * NR, factors: &factors, results: &mut results };
        match (whole, layout.padded_group()) {
            (true, _) => channel_wise::<NR, Q>(cpu, codes, end),
            (_, CHUNK) => group_wise::<NR, Q, true>(cpu, codes, end),
            _ => group_wise::<NR, Q, false>(cpu, codes, end),
        }
    }
}

/// The epilogue of a block's sums.
struct End<'a, R> {
    block: &'a [u8],
    /// The block's first column in the run.
    n: usize,
    factors: &'a [Factors; 2],
    results: &'a mut R,
}

/// `ONE`: groups of one chunk, the most common.
#[inline(always)]
fn group_wise<const NR: usize, const Q: usize, const ONE: bool>(
    cpu: NeonI8mm,
    mut codes: PairCodes,
    end: End<'_, impl Results>,
) {
    let mut all = [[[[floats(0.0); 2]; 4]; 2]; Q];
    let mut left = codes.groups;
    while left > 0 {
        let groups = left.min((TURN / CHUNK / codes.chunks).max(1));
        let from = codes;
        for quad in 0..Q {
            codes = from.moved(4 * quad as isize);
            // A local copy can stay in registers.
            let mut a = all[quad];
            // SAFETY: `Codes` has checked the lengths: `groups` groups are left.
            unsafe { add_groups::<NR, ONE>(cpu, &mut a, &mut codes, 4 * quad, groups) };
            all[quad] = a;
            codes = codes.moved(-4 * quad as isize);
        }
        left -= groups;
    }
    let tail = tail(end.block, 2 * Q);
    for quad in 0..Q {
        let (sums, biases) = (float_bytes(tail[quad]), float_bytes(tail[Q + quad]));
        for p in 0..2 {
            let y = ends::group_wise::<M>(all[quad][p], sums, &end.factors[p]);
            // SAFETY: each panel has `M` rows.
            unsafe { ends::put::<M>(y, [M * p, end.n + 4 * quad], biases, end.results) };
        }
    }
}

#[inline(always)]
fn channel_wise<const NR: usize, const Q: usize>(
    cpu: NeonI8mm,
    mut codes: PairCodes,
    end: End<'_, impl Results>,
) {
    let tail = tail(end.block, 3 * Q);
    let mut all = [[[[ints(0); 2]; 4]; 2]; Q];
    for quad in 0..Q {
        for p in 0..2 {
            let sums = float_bytes(tail[quad]);
            all[quad][p] = ends::channel_wise_starts::<M>(sums, &end.factors[p]);
        }
    }
    let mut left = codes.chunks;
    while left > 0 {
        let (chunks, from) = (left.min(TURN / CHUNK), codes);
        for quad in 0..Q {
            codes = from.moved(4 * quad as isize);
            // A local copy can stay in registers.
            let mut acc = all[quad];
            // SAFETY: `Codes` has checked the lengths: `chunks` chunks are left.
            unsafe { add_chunks::<NR>(cpu, &mut acc, &mut codes, chunks) };
            all[quad] = acc;
            codes = codes.moved(-4 * quad as isize);
        }
        left -= chunks;
    }
    for quad in 0..Q {
        let (scales, biases) = (float_bytes(tail[Q + quad]), float_bytes(tail[2 * Q + quad]));
        for p in 0..2 {
            let y = ends::channel_wise::<M>(all[quad][p], scales, &end.factors[p]);
            // SAFETY: each panel has `M` rows.
            unsafe { ends::put::<M>(y, [M * p, end.n + 4 * quad], biases, end.results) };
        }
    }
}

/// [`Codes`] of two panels and one block, from some column.
#[derive(Clone, Copy)]
struct PairCodes {
    q: [*const u8; 2],
    w: *const u8,
    chunks: usize,
    groups: usize,
}

impl PairCodes {
    /// Panics if the lengths are not those of the layout.
    #[inline(always)]
    fn new(panels: [Panel<'_>; 2], layout: RhsLayout, block: &[u8]) -> Self {
        let Codes { q, w, chunks, groups } = Codes::new(panels[0], layout, block);
        Self { q: [q, Codes::new(panels[1], layout, block).q], w, chunks, groups }
    }

    /// The weights from `columns` columns further on.
    #[inline(always)]
    fn moved(self, columns: isize) -> Self {
        Self { w: self.w.wrapping_offset(PIECE as isize * columns), ..self }
    }

    /// Advances past a chunk.
    ///
    /// # Safety
    /// A chunk is left.
    #[inline(always)]
    unsafe fn next<const NR: usize, const CHUNKS: usize>(&mut self) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            self.q = [self.q[0].add(CHUNKS * CHUNK * M), self.q[1].add(CHUNKS * CHUNK * M)];
            self.w = self.w.add(CHUNKS * CHUNK / 2 * NR);
        }
    }
}

/// Adds `groups` groups of four columns of the block, from `first` on, and advances past them.
///
/// # Safety
/// `groups` groups and four columns are left.
#[inline(always)]
unsafe fn add_groups<const NR: usize, const ONE: bool>(
    cpu: NeonI8mm,
    a: &mut Pair<Floats>,
    codes: &mut PairCodes,
    first: usize,
    groups: usize,
) {
    let starts = reload(&STARTS);
    for _ in 0..groups {
        // SAFETY: the caller guarantees a group, followed by the scales of `NR` columns, of two
        // bytes where a segment of a column has eight.
        unsafe {
            if ONE {
                let w = [weights::<NR, 2, 0>(codes.w), weights::<NR, 2, 1>(codes.w)];
                let scales = codes.w.add(CHUNK / 2 * NR).sub((PIECE - 2) * first);
                let scales = spread(from_bf16(word(scales)));
                chunk(cpu, &mut a[0], codes.q[0], &w, scales, starts);
                chunk(cpu, &mut a[1], codes.q[1], &w, scales, starts);
                codes.next::<NR, 1>();
            } else {
                let mut acc = [[[ints(0); 2]; 4]; 2];
                for p in 0..2 {
                    for i in 0..4 {
                        acc[p][i] = [reload(&STARTS), reload(&STARTS)];
                    }
                }
                let chunks = codes.chunks;
                add_chunks::<NR>(cpu, &mut acc, codes, chunks);
                let scales = spread(from_bf16(word(codes.w.sub((PIECE - 2) * first))));
                for p in 0..2 {
                    for i in 0..4 {
                        for c in 0..2 {
                            a[p][i][c] = add_scaled(a[p][i][c], acc[p][i][c], starts, scales[c]);
                        }
                    }
                }
            }
            codes.w = codes.w.add(2 * NR);
        }
    }
}

/// Adds a group of one chunk to a panel's sums.
///
/// # Safety
/// `q` is a chunk of `M` rows.
#[inline(always)]
unsafe fn chunk(
    cpu: NeonI8mm,
    a: &mut Quad<Floats>,
    q: *const u8,
    w: &[[[Bytes; 2]; 2]; 2],
    scales: [Floats; 2],
    starts: Ints,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        chunk_rows::<0>(cpu, &mut a[0], q, w, scales, starts);
        chunk_rows::<1>(cpu, &mut a[1], q, w, scales, starts);
        chunk_rows::<2>(cpu, &mut a[2], q, w, scales, starts);
        chunk_rows::<3>(cpu, &mut a[3], q, w, scales, starts);
    }
}

/// Adds rows 2`I` and 2`I` + 1 of a group of one chunk.
///
/// # Safety
/// `q` is a chunk of `M` rows.
#[inline(always)]
unsafe fn chunk_rows<const I: usize>(
    cpu: NeonI8mm,
    a: &mut [Floats; 2],
    q: *const u8,
    w: &[[[Bytes; 2]; 2]; 2],
    scales: [Floats; 2],
    starts: Ints,
) {
    let mut acc = [reload(&STARTS), reload(&STARTS)];
    // SAFETY: guaranteed by the caller.
    unsafe {
        rows::<M, 2, 0, I>(cpu, &mut acc, q, &w[0]);
        rows::<M, 2, 1, I>(cpu, &mut acc, q, &w[1]);
    }
    for c in 0..2 {
        a[c] = add_scaled(a[c], acc[c], starts, scales[c]);
    }
}

/// Adds 16·Σqw of four columns over `chunks` chunks (at least one) and advances past them.
///
/// # Safety
/// `chunks` chunks and four columns are left.
#[inline(always)]
unsafe fn add_chunks<const NR: usize>(
    cpu: NeonI8mm,
    acc: &mut Pair<Ints>,
    codes: &mut PairCodes,
    chunks: usize,
) {
    for _ in 0..chunks / 2 {
        // SAFETY: the caller guarantees two chunks.
        unsafe {
            segment::<NR, 0, 0>(cpu, acc, *codes);
            segment::<NR, 1, 1>(cpu, acc, *codes);
            segment::<NR, 2, 4>(cpu, acc, *codes);
            segment::<NR, 3, 5>(cpu, acc, *codes);
            codes.next::<NR, 2>();
        }
    }
    if !chunks.is_multiple_of(2) {
        // SAFETY: the caller guarantees the chunk.
        unsafe {
            segment::<NR, 0, 0>(cpu, acc, *codes);
            segment::<NR, 1, 1>(cpu, acc, *codes);
            codes.next::<NR, 1>();
        }
    }
}

/// Adds the products of segment `S` of a chunk.
///
/// # Safety
/// A chunk and four columns are left.
#[inline(always)]
unsafe fn segment<const NR: usize, const W: usize, const S: usize>(
    cpu: NeonI8mm,
    acc: &mut Pair<Ints>,
    codes: PairCodes,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let w = weights::<NR, 2, W>(codes.w);
        panel::<S>(cpu, &mut acc[0], codes.q[0], &w);
        panel::<S>(cpu, &mut acc[1], codes.q[1], &w);
    }
}

/// Adds a panel's part of segment `S`.
///
/// # Safety
/// `q` is a chunk of `M` rows.
#[inline(always)]
unsafe fn panel<const S: usize>(
    cpu: NeonI8mm,
    acc: &mut Quad<Ints>,
    q: *const u8,
    w: &[[Bytes; 2]; 2],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        rows::<M, 2, S, 0>(cpu, &mut acc[0], q, w);
        rows::<M, 2, S, 1>(cpu, &mut acc[1], q, w);
        rows::<M, 2, S, 2>(cpu, &mut acc[2], q, w);
        rows::<M, 2, S, 3>(cpu, &mut acc[3], q, w);
    }
}
