//! Int8 weights on aarch64, four columns of a block at a time.
//!
//! With dot products, a vector of weights is four k of four columns, and a row's codes multiply by
//! lanes. With matrix products, two such vectors are interleaved into eight k of two columns.
#![allow(unsafe_code)]
// Index loops with fixed bounds unroll, so that arrays become registers. Iterator chains do not
// always unroll.
#![allow(clippy::needless_range_loop)]

use std::arch::aarch64::*;

use super::kernel::{Int8Run, Kernel};
use crate::layouts::int8::{Int8Tail, NR, PIECE};
use crate::w4a8::Panel;
use crate::w4a8::neon::ops::{
    Bytes, Ints, add_ints, as_floats, as_ints, floats, from_lanes, halves, ints, lanes, mul,
    mul_add, sdot_lane, smmla, to_floats,
};
use crate::w4a8::neon::{NeonDotprod, NeonI8mm};
use crate::w4a8::panel::for_rows;

/// Columns of a vector.
const LANES: usize = 4;
/// Bytes of four k of a block.
const PIECE_BYTES: usize = PIECE * NR;
/// k of a step.
const OCTET: usize = 8;

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

    fn run(&self, panel: Panel<'_>, rhs: Int8Run<'_>, y: &mut [f32], stride: usize) {
        // SAFETY: the function needs dotprod; `detect`, the only constructor of this type, detected it.
        unsafe { for_rows!(panel.rows(), by_lanes[](*self, panel, rhs, y, stride)) }
    }
}

impl Kernel for NeonI8mm {
    fn name(&self) -> &'static str {
        "neon-i8mm"
    }

    fn run(&self, panel: Panel<'_>, rhs: Int8Run<'_>, y: &mut [f32], stride: usize) {
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

/// Calls `sums` for each four columns of the run, with the addresses of their codes and of the panel's,
/// and the number of steps; stores the results of its rows.
///
/// Panics if a slice is shorter than its layout requires.
#[inline(always)]
fn each_quad<const M: usize>(
    panel: Panel<'_>,
    rhs: Int8Run<'_>,
    y: &mut [f32],
    stride: usize,
    sums: impl Fn(*const u8, *const u8, usize) -> [Ints; M],
) {
    rhs.check(panel, y, stride, M);
    let steps = rhs.layout.padded_k() / OCTET;
    for (b, block) in rhs.bytes.chunks_exact(rhs.layout.block_bytes()).enumerate() {
        let (codes, tail) = block.split_at(rhs.layout.code_bytes());
        for quad in 0..NR / LANES {
            let first = b * NR + quad * LANES;
            let columns = rhs.columns.saturating_sub(first).min(LANES);
            if columns == 0 {
                return;
            }
            let found = sums(codes[quad * PIECE * LANES..].as_ptr(), panel.codes().as_ptr(), steps);
            let of = |what: Int8Tail| {
                let at = (what as usize * NR + quad * LANES) * 4;
                let word = |i: usize| [0, 1, 2, 3].map(|j| tail[at + 4 * i + j]);
                from_lanes([0, 1, 2, 3].map(|i| f32::from_le_bytes(word(i))))
            };
            let (scales, biases) = (of(Int8Tail::Scale), of(Int8Tail::Bias));
            for m in 0..M {
                let scaled = mul(to_floats(found[m]), scales);
                let row = lanes(mul_add(scaled, floats(panel.reciprocals()[m]), biases));
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
    rhs: Int8Run<'_>,
    y: &mut [f32],
    stride: usize,
) {
    each_quad::<M>(panel, rhs, y, stride, |codes, q, steps| {
        let mut acc = [ints(0); M];
        // Of a single row, so that products do not wait for each other.
        let mut other = ints(0);
        for step in 0..steps {
            // SAFETY: `each_quad` has checked that panel and block have the steps, and `M` rows.
            unsafe {
                let [a, b] = pieces(codes, step);
                for i in 0..M.div_ceil(2) {
                    let q = two_rows::<M>(q, step, i);
                    acc[2 * i] = sdot_lane::<0>(cpu, acc[2 * i], a, q);
                    if M == 1 {
                        other = sdot_lane::<1>(cpu, other, b, q);
                    } else {
                        acc[2 * i] = sdot_lane::<1>(cpu, acc[2 * i], b, q);
                    }
                    if 2 * i + 1 < M {
                        acc[2 * i + 1] = sdot_lane::<2>(cpu, acc[2 * i + 1], a, q);
                        acc[2 * i + 1] = sdot_lane::<3>(cpu, acc[2 * i + 1], b, q);
                    }
                }
            }
        }
        if M == 1 {
            acc[0] = add_ints(acc[0], other);
        }
        acc
    });
}

/// Pairs of rows times pairs of columns.
#[target_feature(enable = "neon,dotprod,i8mm")]
fn by_pairs<const M: usize>(
    cpu: NeonI8mm,
    panel: Panel<'_>,
    rhs: Int8Run<'_>,
    y: &mut [f32],
    stride: usize,
) {
    each_quad::<M>(panel, rhs, y, stride, |codes, q, steps| {
        // `[rows 2i, 2i + 1][columns 2c, 2c + 1]`, each 2 x 2 in a vector.
        let mut acc = [[ints(0); 2]; 4];
        for step in 0..steps {
            // SAFETY: `each_quad` has checked that panel and block have the steps, and `M` rows; NEON is
            // part of the target.
            unsafe {
                let [a, b] = pieces(codes, step).map(|x| vreinterpretq_s32_s8(x));
                let left = vreinterpretq_s8_s32(vzip1q_s32(a, b));
                let right = vreinterpretq_s8_s32(vzip2q_s32(a, b));
                for i in 0..M.div_ceil(2) {
                    let q = two_rows::<M>(q, step, i);
                    acc[i][0] = smmla(cpu, acc[i][0], q, left);
                    acc[i][1] = smmla(cpu, acc[i][1], q, right);
                }
            }
        }
        let mut rows = [ints(0); M];
        for i in 0..M.div_ceil(2) {
            let [left, right] = acc[i].map(as_floats);
            let [first, second] = halves(left, right).map(as_ints);
            rows[2 * i] = first;
            if 2 * i + 1 < M {
                rows[2 * i + 1] = second;
            }
        }
        rows
    });
}

/// The codes of k 8·`step` to 8·`step` + 3 of four columns, and of the next four k.
///
/// # Safety
/// The block has the step.
#[inline(always)]
unsafe fn pieces(codes: *const u8, step: usize) -> [Bytes; 2] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let first = codes.add(2 * step * PIECE_BYTES);
        [vld1q_s8(first.cast()), vld1q_s8(first.add(PIECE_BYTES).cast())]
    }
}

/// Eight codes of rows 2`i` and 2`i` + 1 of `M`; a missing row is zeros.
///
/// # Safety
/// The panel has `M` rows and the step, and 2`i` is below `M`.
#[inline(always)]
unsafe fn two_rows<const M: usize>(q: *const u8, step: usize, i: usize) -> Bytes {
    // SAFETY: guaranteed by the caller; an unpaired last row is read alone.
    unsafe {
        let at = q.add((step * M + 2 * i) * OCTET).cast::<i8>();
        match 2 * i + 1 < M {
            true => vld1q_s8(at),
            false => vcombine_s8(vld1_s8(at), vdup_n_s8(0)),
        }
    }
}
