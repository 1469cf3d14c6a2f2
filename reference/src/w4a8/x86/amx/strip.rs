//! A strip of sixteen columns, two blocks, times all rows of a batch.
// Index loops with fixed bounds unroll, so that arrays become registers.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::super::avx512::{
    FIRST, NR, Pair, SECOND, SEGMENT, finished, group_scales, order, tail, words,
};
use super::plan::{Batch, LAG, LONGEST_GROUP, Memory, Plan, STRETCH, TILE};
use super::unit::{COLUMNS, ROW_BYTES, ROWS, Unit};
use crate::w4a8::Run;
use crate::w4a8::packed::CHUNK;

/// [`Kernel::run_all`](crate::w4a8::Kernel::run_all) for a batch and blocks of eight columns.
///
/// Panics if a slice is shorter than its layout requires.
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
pub(super) fn run<U: Unit>(unit: U, batch: &Batch, rhs: Run<'_>, y: &mut [f32], stride: usize) {
    let plan = Plan::checked(batch, rhs, y, stride);
    let channel_wise = rhs.layout.is_channel_wise();
    let _tiles = unit.configure(plan.rows.height, plan.step);
    let mut memory = MaybeUninit::<Memory>::uninit();
    let memory = memory.as_mut_ptr();
    // SAFETY: the field is within the memory; zeros are valid integers.
    unsafe { (&raw mut (*memory).ring).write_bytes(0, 1) };
    let strips = rhs.bytes.chunks(COLUMNS / NR * plan.block);
    for (blocks, first) in strips.zip((0..rhs.columns).step_by(COLUMNS)) {
        let second = if blocks.len() > plan.block { plan.block } else { 0 };
        let pair = [blocks.as_ptr(), blocks[second..].as_ptr()];
        let columns = (rhs.columns - first).min(COLUMNS);
        // SAFETY: `Plan::checked` checked the lengths of rows, blocks and `y`. The functions write
        // what they read of the memory.
        unsafe {
            match (channel_wise, plan.rows.height > ROWS / 2) {
                (true, _) => channel_sums(unit, &plan, pair, memory),
                (false, true) => group_sums::<U, ROWS>(unit, &plan, pair, memory),
                (false, false) => group_sums::<U, { ROWS / 2 }>(unit, &plan, pair, memory),
            }
            for t in 0..plan.rows.tiles {
                for m in 0..plan.rows.height {
                    let row = plan.rows.row(t) + m;
                    let sums = (&raw const (*memory).sums[t]).cast::<u32>().add(m * COLUMNS);
                    let factors = (batch.negated_zero_points[row], batch.reciprocals[row]);
                    let sum = match channel_wise {
                        true => {
                            channel_result(_mm512_load_si512(sums.cast()), factors, pair, &plan)
                        }
                        false => group_result(_mm512_load_ps(sums.cast()), factors, pair, &plan),
                    };
                    let sum = finished(sum, tail(pair, plan.block - 4 * NR));
                    let mask = ((1u32 << columns) - 1) as __mmask16;
                    _mm512_mask_storeu_ps(y.as_mut_ptr().add(row * stride + first), mask, sum);
                }
            }
        }
    }
}

/// Decodes `chunks` chunks of both blocks: 16 times the weights, `[k / 4][16][4]`, columns in the order
/// of [`order`].
///
/// # Safety
/// The chunks can be read, and `to` has room for them.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
unsafe fn decode(pair: Pair, chunks: usize, to: *mut u8) {
    let upper = _mm512_set1_epi8(0xf0u8 as i8);
    for chunk in 0..chunks {
        for segment in 0..2 {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let at = (2 * chunk + segment) * SEGMENT;
                let a = _mm512_loadu_si512(pair[0].add(at).cast());
                let b = _mm512_loadu_si512(pair[1].add(at).cast());
                for word in 0..2 {
                    let bytes =
                        if word == 0 { words::<FIRST>(a, b) } else { words::<SECOND>(a, b) };
                    // Pieces `segment` and `segment` + 2, two words each.
                    let row = to.add((8 * chunk + 2 * segment + word) * ROW_BYTES);
                    let low = _mm512_and_si512(_mm512_slli_epi32::<4>(bytes), upper);
                    _mm512_store_si512(row.cast(), low);
                    let high = _mm512_and_si512(bytes, upper);
                    _mm512_store_si512(row.add(4 * ROW_BYTES).cast(), high);
                }
            }
        }
    }
}

/// The float sums of all groups, of tiles with at most `H` rows.
///
/// # Safety
/// The plan describes the blocks, which have group scales, and the rows.
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
unsafe fn group_sums<U: Unit, const H: usize>(
    unit: U,
    plan: &Plan,
    pair: Pair,
    memory: *mut Memory,
) {
    let stretch = (STRETCH / plan.group).max(1);
    let chunks = plan.group / CHUNK;
    // SAFETY: guaranteed by the caller; a stretch is at most `LONGEST_GROUP` k and `STRETCH / CHUNK`
    // groups. The pointers stay within `memory`.
    unsafe {
        let weights = (&raw mut (*memory).weights).cast::<u8>();
        let scales = (&raw mut (*memory).scales).cast::<f32>();
        for first in (0..plan.groups).step_by(stretch) {
            let count = stretch.min(plan.groups - first);
            for g in 0..count {
                let at = pair.map(|block| block.add((first + g) * plan.group_bytes));
                decode(at, chunks, weights.add(g * plan.group * COLUMNS));
                let found = group_scales(at.map(|at| at.add(plan.group_bytes - 2 * NR)));
                let found = _mm512_mul_ps(found, _mm512_set1_ps(1.0 / 16.0));
                _mm512_store_ps(scales.add(g * COLUMNS), found);
            }
            for t in 0..plan.rows.tiles {
                add_groups::<U, H>(unit, plan, [t, first, count], pair, memory);
            }
        }
    }
}

/// Adds groups `first` to `first + count`, which are decoded, to the float sums of tile `t`.
///
/// # Safety
/// As [`group_sums`].
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
unsafe fn add_groups<U: Unit, const H: usize>(
    unit: U,
    plan: &Plan,
    [t, first, count]: [usize; 3],
    pair: Pair,
    memory: *mut Memory,
) {
    // SAFETY: guaranteed by the caller. Rows past the tile's height are read of the ring, which is
    // zeroed, and their sums are not used.
    unsafe {
        let weights = (&raw const (*memory).weights).cast::<u8>();
        let scales = (&raw const (*memory).scales).cast::<f32>();
        let stored = (&raw mut (*memory).sums[t]).cast::<f32>();
        let ring = (&raw mut (*memory).ring).cast::<i32>();
        let mut sums = [_mm512_setzero_ps(); H];
        if first > 0 {
            for m in 0..H {
                sums[m] = _mm512_load_ps(stored.add(m * COLUMNS));
            }
        }
        let steps = plan.group / plan.step;
        let start = |g: usize| {
            let weights = weights.add(g * plan.group * COLUMNS);
            let operands = plan.operands::<1>(t, (first + g) * plan.group, weights, steps);
            unit.multiply::<1, false>(operands, ring.add(g % (LAG + 1) * TILE));
        };
        // What the next stretch decodes, shared by the tiles; after the last stretch, the next strip.
        let share = plan.group_bytes.div_ceil(plan.rows.tiles);
        let ahead = match first + count < plan.groups {
            true => count * plan.group_bytes,
            false => plan.block + (plan.block - first * plan.group_bytes),
        };
        let pair =
            pair.map(|block| block.wrapping_add(first * plan.group_bytes + ahead + t * share));
        for g in 0..LAG.min(count) {
            start(g);
        }
        for g in 0..count {
            if g + LAG < count {
                start(g + LAG);
            }
            for line in 0..share.div_ceil(ROW_BYTES) {
                let at = g * plan.group_bytes + line * ROW_BYTES;
                _mm_prefetch::<_MM_HINT_T1>(pair[0].wrapping_add(at).cast());
                _mm_prefetch::<_MM_HINT_T1>(pair[1].wrapping_add(at).cast());
            }
            let ints = ring.add(g % (LAG + 1) * TILE);
            let scales = _mm512_load_ps(scales.add(g * COLUMNS));
            for m in 0..H {
                let found = _mm512_cvtepi32_ps(_mm512_load_si512(ints.add(m * COLUMNS).cast()));
                sums[m] = _mm512_fmadd_ps(found, scales, sums[m]);
            }
        }
        for m in 0..H {
            _mm512_store_ps(stored.add(m * COLUMNS), sums[m]);
        }
    }
}

/// The integer sums of all k.
///
/// # Safety
/// The plan describes the blocks, which have channel scales, and the rows.
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
unsafe fn channel_sums<U: Unit>(unit: U, plan: &Plan, pair: Pair, memory: *mut Memory) {
    // SAFETY: guaranteed by the caller; the pointers stay within `memory`.
    unsafe {
        let weights = (&raw mut (*memory).weights).cast::<u8>();
        let sums = (&raw mut (*memory).sums).cast::<i32>();
        for k in (0..plan.group).step_by(LONGEST_GROUP) {
            let size = LONGEST_GROUP.min(plan.group - k);
            decode(pair.map(|block| block.add(k * NR / 2)), size / CHUNK, weights);
            let steps = size / plan.step;
            let mut t = 0;
            while t < plan.rows.tiles {
                let sums = sums.add(t * TILE);
                macro_rules! multiply {
                    ($n:literal) => {{
                        let operands = plan.operands::<$n>(t, k, weights, steps);
                        match k {
                            0 => unit.multiply::<$n, false>(operands, sums),
                            _ => unit.multiply::<$n, true>(operands, sums),
                        }
                        $n
                    }};
                }
                // Several tiles, because products of one tile wait for each other.
                t += match plan.rows.tiles - t {
                    4.. => multiply!(4),
                    2.. => multiply!(2),
                    _ => multiply!(1),
                };
            }
        }
    }
}

/// The result without bias, columns in order, of the sums of a row with these factors.
///
/// # Safety
/// The plan describes the blocks, which have group scales.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
unsafe fn group_result(
    sum: __m512,
    (zero, reciprocal): (i32, f32),
    pair: Pair,
    plan: &Plan,
) -> __m512 {
    // SAFETY: sums of the columns' weights come after the last group.
    let weights = unsafe { tail(pair, plan.groups * plan.group_bytes) };
    let sum = _mm512_permutexvar_ps(order(), sum);
    let sum = _mm512_fmadd_ps(weights, _mm512_cvtepi32_ps(_mm512_set1_epi32(zero)), sum);
    _mm512_mul_ps(sum, _mm512_set1_ps(reciprocal))
}

/// As [`group_result`], of 16 times the integer sums of a row.
///
/// # Safety
/// The plan describes the blocks, which have channel scales.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni,avx2,fma")]
unsafe fn channel_result(
    dot: __m512i,
    (zero, reciprocal): (i32, f32),
    pair: Pair,
    plan: &Plan,
) -> __m512 {
    // SAFETY: sums and scales of the columns come after the codes.
    let (sums, scales) = unsafe {
        let at = plan.group_bytes;
        (_mm512_castps_si512(tail(pair, at)), tail(pair, at + 4 * NR))
    };
    let dot = _mm512_permutexvar_epi32(order(), dot);
    let sum = _mm512_add_epi32(dot, _mm512_mullo_epi32(_mm512_set1_epi32(zero), sums));
    let scale = _mm512_mul_ps(scales, _mm512_set1_ps(reciprocal));
    _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale)
}
