//! From the sums of pairs of rows by pairs of columns to results.
#![allow(clippy::needless_range_loop)]

use super::ops::*;
use super::results::Results;
use crate::w4a8::{MAX_ROWS, Panel};

/// Up to eight rows by four columns: `[rows 2i, 2i + 1][columns 2j, 2j + 1]`, each 2 x 2 in a vector.
/// An odd last row is paired with zeros.
pub(super) type Quad<T> = [[T; 2]; 4];

/// The row factors of a panel: `[rows 2i, 2i + 1]`, each twice.
pub(super) struct Factors {
    /// −zero points: floats for groups, int32 for channels.
    zeros: [Floats; 4],
    /// 1 / scale.
    reciprocals: [Floats; 4],
}

impl Factors {
    /// The factors of a panel of `M` rows.
    #[inline(always)]
    pub(super) fn of<const M: usize>(panel: Panel<'_>, channel_wise: bool) -> Self {
        let (mut zeros, mut reciprocals) = ([0; MAX_ROWS], [0.0; MAX_ROWS]);
        zeros[..M].copy_from_slice(panel.negated_zero_points());
        reciprocals[..M].copy_from_slice(panel.reciprocals());
        let convert = |zeros| if channel_wise { as_floats(zeros) } else { to_floats(zeros) };
        let ((left, _), (factors, _)) = (zeros.as_chunks(), reciprocals.as_chunks());
        let [a, b] = twice(convert(int_lanes(left[0])));
        let [c, d] = twice(convert(int_lanes(left[1])));
        let ([e, f], [g, h]) = (twice(from_lanes(factors[0])), twice(from_lanes(factors[1])));
        Self { zeros: [a, b, c, d], reciprocals: [e, f, g, h] }
    }
}

/// `(a + sums · −z) · 1/s`: `sums` are Σ scale·Σw of the columns.
#[inline(always)]
pub(super) fn group_wise<const M: usize>(
    mut a: Quad<Floats>,
    sums: Floats,
    rows: &Factors,
) -> Quad<Floats> {
    let sums = spread(sums);
    for i in 0..M.div_ceil(2) {
        for c in 0..2 {
            a[i][c] = mul(mul_add(sums[c], rows.zeros[i], a[i][c]), rows.reciprocals[i]);
        }
    }
    a
}

/// Start of a channel's integer sums: `sums · −z`, modulo 2^32; `sums` are 16·Σw of the columns.
#[inline(always)]
pub(super) fn channel_wise_starts<const M: usize>(sums: Floats, rows: &Factors) -> Quad<Ints> {
    let (sums, mut acc) = (spread(sums), [[ints(0); 2]; 4]);
    for i in 0..M.div_ceil(2) {
        for c in 0..2 {
            acc[i][c] = mul_ints(as_ints(sums[c]), as_ints(rows.zeros[i]));
        }
    }
    acc
}

/// `float(acc) · (scale · 1/s)`.
#[inline(always)]
pub(super) fn channel_wise<const M: usize>(
    acc: Quad<Ints>,
    scales: Floats,
    rows: &Factors,
) -> Quad<Floats> {
    let (scales, mut y) = (spread(scales), [[floats(0.0); 2]; 4]);
    for i in 0..M.div_ceil(2) {
        for c in 0..2 {
            y[i][c] = mul(to_floats(acc[i][c]), mul(scales[c], rows.reciprocals[i]));
        }
    }
    y
}

/// Passes on the rows of a quad, from row `m` and column `n` of the run.
///
/// # Safety
/// There are `M` rows from `m` on.
#[inline(always)]
pub(super) unsafe fn put<const M: usize>(
    y: Quad<Floats>,
    [m, n]: [usize; 2],
    biases: Floats,
    results: &mut impl Results,
) {
    for i in 0..M.div_ceil(2) {
        for (j, row) in halves(y[i][0], y[i][1]).into_iter().enumerate() {
            if 2 * i + j < M {
                // SAFETY: guaranteed by the caller.
                unsafe { results.put(m + 2 * i + j, n, row, biases) };
            }
        }
    }
}
