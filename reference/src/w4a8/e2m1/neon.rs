//! MXFP4 weights on aarch64, four columns of a block at a time.
//!
//! A table look-up turns a code into 2w, so sums need no correction. With dot products, a vector of
//! weights is four k of four columns, and a row's codes multiply by lanes. With matrix products, two
//! such vectors are interleaved before the look-up, into eight k of two columns.
#![allow(unsafe_code)]
// Index loops with fixed bounds unroll, so that arrays become registers. Iterator chains do not
// always unroll.
#![allow(clippy::needless_range_loop)]

use std::arch::aarch64::*;

use super::DOUBLED;
use super::kernel::{E2m1Run, Kernel};
use crate::layouts::e2m1::{CODE_BYTES, GROUP, GROUP_BYTES, NR};
use crate::w4a8::Panel;
use crate::w4a8::neon::ops::{
    Bytes, Floats, Ints, add, floats, from_lanes, halves, ints, lanes, mul, mul_add, sdot_lane,
    smmla, spread, to_floats,
};
use crate::w4a8::neon::{NeonDotprod, NeonI8mm};
use crate::w4a8::panel::for_rows;

/// Columns of a vector.
const LANES: usize = 4;
/// Bytes of four k of a block.
const PIECE_BYTES: usize = 4 * NR;

/// The kernels that this CPU supports, slowest first.
pub(super) fn kernels() -> Vec<Box<dyn Kernel>> {
    let dotprod = NeonDotprod::detect().map(|k| Box::new(k) as Box<dyn Kernel>);
    let i8mm = NeonI8mm::detect().map(|k| Box::new(k) as Box<dyn Kernel>);
    dotprod.into_iter().chain(i8mm).collect()
}

impl Kernel for NeonDotprod {
    fn name(&self) -> &'static str {
        "neon-dotprod"
    }

    fn run(&self, panel: Panel<'_>, rhs: E2m1Run<'_>, y: &mut [f32], stride: usize) {
        // SAFETY: the function needs dotprod; `detect`, the only constructor of this type, detected it.
        unsafe { for_rows!(panel.rows(), by_lanes[](*self, panel, rhs, y, stride)) }
    }
}

impl Kernel for NeonI8mm {
    fn name(&self) -> &'static str {
        "neon-i8mm"
    }

    fn run(&self, panel: Panel<'_>, rhs: E2m1Run<'_>, y: &mut [f32], stride: usize) {
        // SAFETY: the functions need dotprod and i8mm; `detect`, the only constructor of this type,
        // detected both.
        unsafe {
            match panel.rows() {
                1 => by_lanes::<1>(self.dotprod(), panel, rhs, y, stride),
                rows => for_rows!(2.., rows, by_pairs[](*self, panel, rhs, y, stride)),
            }
        }
    }
}

/// The operands of four columns of a block.
#[derive(Clone, Copy)]
struct Quad {
    /// The columns' first codes.
    codes: *const u8,
    /// Their first scales.
    scales: *const u8,
    /// Codes of the panel's rows.
    q: *const u8,
    /// Half scales of the panel's rows.
    halves: *const f32,
    /// 2w by code.
    table: Bytes,
}

impl Quad {
    /// The next group of `M` rows.
    #[inline(always)]
    fn advance<const M: usize>(&mut self) {
        self.codes = self.codes.wrapping_add(GROUP_BYTES);
        self.scales = self.scales.wrapping_add(GROUP_BYTES);
        self.q = self.q.wrapping_add(GROUP * M);
        self.halves = self.halves.wrapping_add(M);
    }
}

/// Calls `sums` for each four columns of the run and stores its rows with the biases.
///
/// Panics if a slice is shorter than its layout requires.
#[inline(always)]
fn each_quad<const M: usize>(
    panel: Panel<'_>,
    rhs: E2m1Run<'_>,
    y: &mut [f32],
    stride: usize,
    sums: impl Fn(Quad, usize) -> [Floats; M],
) {
    rhs.check(panel, y, stride, M);
    let groups = rhs.layout.groups();
    // SAFETY: NEON is part of the target; the table has the vector's bytes.
    let table = unsafe { vld1q_s8(DOUBLED.as_ptr()) };
    for (b, block) in rhs.bytes.chunks_exact(rhs.layout.block_bytes()).enumerate() {
        let biases = &block[groups * GROUP_BYTES..];
        for quad in 0..NR / LANES {
            let first = b * NR + quad * LANES;
            let columns = rhs.columns.saturating_sub(first).min(LANES);
            if columns == 0 {
                return;
            }
            let operands = Quad {
                codes: block[quad * 4 * LANES..].as_ptr(),
                scales: block[CODE_BYTES + quad * LANES..].as_ptr(),
                q: panel.codes().as_ptr(),
                halves: panel.scales().as_ptr(),
                table,
            };
            let found = sums(operands, groups);
            let bias = |i: usize| {
                let at = 4 * (quad * LANES + i);
                f32::from_le_bytes([0, 1, 2, 3].map(|j| biases[at + j]))
            };
            let bias = from_lanes([0, 1, 2, 3].map(bias));
            for m in 0..M {
                let row = lanes(add(found[m], bias));
                y[m * stride + first..][..columns].copy_from_slice(&row[..columns]);
            }
        }
    }
}

/// Rows times lanes of columns: a vector holds four columns.
#[target_feature(enable = "neon,dotprod")]
fn by_lanes<const M: usize>(
    cpu: NeonDotprod,
    panel: Panel<'_>,
    rhs: E2m1Run<'_>,
    y: &mut [f32],
    stride: usize,
) {
    each_quad::<M>(panel, rhs, y, stride, |mut at, groups| {
        let mut sums = [floats(0.0); M];
        for _ in 0..groups {
            // SAFETY: `each_quad` has checked that panel and block have the groups, and `M` rows.
            unsafe {
                let acc = group_by_lanes::<M>(cpu, at);
                let scales = scales(at.scales);
                for m in 0..M {
                    let factor = mul(scales, floats(*at.halves.add(m)));
                    sums[m] = mul_add(to_floats(acc[m]), factor, sums[m]);
                }
            }
            at.advance::<M>();
        }
        sums
    });
}

/// The integer sums of a group.
///
/// # Safety
/// `at` has a group, of `M` rows.
#[inline(always)]
unsafe fn group_by_lanes<const M: usize>(cpu: NeonDotprod, at: Quad) -> [Ints; M] {
    let mut acc = [ints(0); M];
    for octet in 0..2 {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let [a, b] = pieces(at, octet);
            let ([a0, a1], [b0, b1]) = (doubled(at.table, a), doubled(at.table, b));
            for (half, [a, b]) in [[a0, b0], [a1, b1]].into_iter().enumerate() {
                for i in 0..M.div_ceil(2) {
                    let q = two_rows::<M>(at.q, octet + 2 * half, i);
                    acc[2 * i] = sdot_lane::<0>(cpu, acc[2 * i], a, q);
                    acc[2 * i] = sdot_lane::<1>(cpu, acc[2 * i], b, q);
                    if 2 * i + 1 < M {
                        acc[2 * i + 1] = sdot_lane::<2>(cpu, acc[2 * i + 1], a, q);
                        acc[2 * i + 1] = sdot_lane::<3>(cpu, acc[2 * i + 1], b, q);
                    }
                }
            }
        }
    }
    acc
}

/// Pairs of rows times pairs of columns.
#[target_feature(enable = "neon,dotprod,i8mm")]
fn by_pairs<const M: usize>(
    cpu: NeonI8mm,
    panel: Panel<'_>,
    rhs: E2m1Run<'_>,
    y: &mut [f32],
    stride: usize,
) {
    each_quad::<M>(panel, rhs, y, stride, |mut at, groups| {
        // `[rows 2i, 2i + 1][columns 2c, 2c + 1]`, each 2 x 2 in a vector.
        let mut sums = [[floats(0.0); 2]; 4];
        for _ in 0..groups {
            // SAFETY: `each_quad` has checked that panel and block have the groups, and `M` rows.
            unsafe {
                let acc = group_by_pairs::<M>(cpu, at);
                let scales = spread(scales(at.scales));
                for i in 0..M.div_ceil(2) {
                    let first = *at.halves.add(2 * i);
                    let second = if 2 * i + 1 < M { *at.halves.add(2 * i + 1) } else { 0.0 };
                    let rows = from_lanes([first, first, second, second]);
                    for c in 0..2 {
                        let found = to_floats(acc[i][c]);
                        sums[i][c] = mul_add(found, mul(scales[c], rows), sums[i][c]);
                    }
                }
            }
            at.advance::<M>();
        }
        let mut rows = [floats(0.0); M];
        for i in 0..M.div_ceil(2) {
            let [first, second] = halves(sums[i][0], sums[i][1]);
            rows[2 * i] = first;
            if 2 * i + 1 < M {
                rows[2 * i + 1] = second;
            }
        }
        rows
    });
}

/// The integer sums of a group.
///
/// # Safety
/// `at` has a group, of `M` rows.
#[inline(always)]
unsafe fn group_by_pairs<const M: usize>(cpu: NeonI8mm, at: Quad) -> [[Ints; 2]; 4] {
    let mut acc = [[ints(0); 2]; 4];
    for octet in 0..2 {
        // SAFETY: guaranteed by the caller; NEON is part of the target.
        unsafe {
            let [a, b] = pieces(at, octet).map(|x| vreinterpretq_s32_s8(x));
            let left = doubled(at.table, vreinterpretq_s8_s32(vzip1q_s32(a, b)));
            let right = doubled(at.table, vreinterpretq_s8_s32(vzip2q_s32(a, b)));
            for half in 0..2 {
                for i in 0..M.div_ceil(2) {
                    let q = two_rows::<M>(at.q, octet + 2 * half, i);
                    acc[i][0] = smmla(cpu, acc[i][0], q, left[half]);
                    acc[i][1] = smmla(cpu, acc[i][1], q, right[half]);
                }
            }
        }
    }
    acc
}

/// The packed codes of k 8·`octet` to 8·`octet` + 3, and of the next four; the k 16 further are in the
/// high nibbles.
///
/// # Safety
/// `at` has a group, and `octet` is below 2.
#[inline(always)]
unsafe fn pieces(at: Quad, octet: usize) -> [Bytes; 2] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let first = at.codes.add(2 * octet * PIECE_BYTES);
        [vld1q_s8(first.cast()), vld1q_s8(first.add(PIECE_BYTES).cast())]
    }
}

/// 2w of the low and of the high nibbles.
#[inline(always)]
fn doubled(table: Bytes, codes: Bytes) -> [Bytes; 2] {
    // SAFETY: NEON is part of the target; only registers are accessed.
    unsafe {
        let codes = vreinterpretq_u8_s8(codes);
        [vandq_u8(codes, vdupq_n_u8(15)), vshrq_n_u8::<4>(codes)].map(|i| vqtbl1q_s8(table, i))
    }
}

/// The scales of four columns, as floats; 2^-127 is subnormal.
///
/// # Safety
/// The four bytes can be read.
#[inline(always)]
unsafe fn scales(bytes: *const u8) -> Floats {
    // SAFETY: guaranteed by the caller; NEON is part of the target.
    unsafe {
        let four = bytes.cast::<u32>().read_unaligned();
        let wide = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four.into()))));
        vreinterpretq_f32_u32(vmaxq_u32(vshlq_n_u32::<23>(wide), vdupq_n_u32(1 << 22)))
    }
}

/// Eight codes of rows 2`i` and 2`i` + 1 of `M`; a missing row is zeros.
///
/// # Safety
/// `q` is a group of `M` rows, `piece` is below 4, and 2`i` is below `M`.
#[inline(always)]
unsafe fn two_rows<const M: usize>(q: *const u8, piece: usize, i: usize) -> Bytes {
    // SAFETY: guaranteed by the caller; an unpaired last row is read alone.
    unsafe {
        let at = q.add((piece * M + 2 * i) * 8).cast::<i8>();
        match 2 * i + 1 < M {
            true => vld1q_s8(at),
            false => vcombine_s8(vld1_s8(at), vdup_n_s8(0)),
        }
    }
}
