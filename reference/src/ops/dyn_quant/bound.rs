//! The bound on `y` of kernels that quantize as the operator does, and compute the rest in any order.
//!
//! The derivation is "Int8 activations of other kernels" in docs/src/internals/activations.md.

use crate::num::interval::{FLUSH, Interval, U};
use crate::num::scalar::{ScalarType, bf16_to_f32};
use crate::products::Bounded;
use crate::w4a8::packed::{Columns, Factors, QuantizedRows};

/// The name of the class in reports.
pub(super) const CLASS: &str = "int8-per-token-any-order";

/// Roundings of 1 / scale, and of a scaled activation, in f32.
const SCALE_ROUNDINGS: f64 = 4.0;

/// Codes that every kernel adds exactly before it multiplies by a scale.
const PIECE: usize = 8;

/// The relative error of `count` roundings to f32.
fn gamma(count: usize) -> f64 {
    let count = count as f64 * U;
    count / (1.0 - count)
}

/// Integers within one half and `slack` of `value`.
fn nearest(value: f64, slack: f64) -> std::ops::RangeInclusive<i32> {
    (value - 0.5 - slack).ceil() as i32..=(value + 0.5 + slack).floor() as i32
}

/// What a row's codes may be.
struct Row {
    /// Least and largest code without the zero point, for each k.
    codes: Vec<[i32; 2]>,
    /// The largest offset that a kernel may add to codes.
    offset: f64,
    /// Length of the range of activations over 255.
    step: f64,
}

impl Row {
    /// `None` for activations whose scale is not a normal number.
    fn of(x: &[f32]) -> Option<Self> {
        if !x.iter().all(|x| x.is_finite()) {
            return None;
        }
        let x = || x.iter().map(|&x| f64::from(x));
        let (low, high) = (x().fold(0.0, f64::min), x().fold(0.0, f64::max));
        let range = high - low;
        if range == 0.0 {
            return Some(Self { codes: x().map(|_| [0; 2]).collect(), offset: 0.0, step: 0.0 });
        }
        if !(1e-30..1e30).contains(&range) {
            return None;
        }
        let scale = 255.0 / range;
        let zero_points = nearest(-128.0 - low * scale, 8.0 * 256.0 * U);
        let zero_points: Vec<i32> = zero_points.map(|z| z.clamp(-128, 127)).collect();
        let codes = x().map(|x| {
            let scaled = x * scale;
            let rounded = nearest(scaled, SCALE_ROUNDINGS * U * scaled.abs());
            let all = rounded
                .flat_map(|r| zero_points.iter().map(move |&z| (r + z).clamp(-128, 127) - z));
            all.fold([i32::MAX, i32::MIN], |[a, b], v| [a.min(v), b.max(v)])
        });
        let codes = codes.collect();
        let offset = |z: &i32| f64::from(z.abs().max((z + 128).abs()));
        let offset = zero_points.iter().map(offset).fold(0.0, f64::max);
        Some(Self { codes, offset, step: range / 255.0 })
    }
}

/// A column in f64.
struct Column<'c> {
    codes: &'c [i8],
    /// A scale for each group.
    scales: Vec<f64>,
    group: usize,
    bias: f64,
}

fn column(columns: &Columns, n: usize) -> Column<'_> {
    let codes = columns.column(n);
    let (scales, group) = match columns.factors() {
        // Stored divided by 16.
        Factors::Channel { scales, .. } => (vec![f64::from(scales[n]) * 16.0], codes.len()),
        Factors::Group { group_size, scales, .. } => {
            let groups = codes.len() / group_size;
            let scales = &scales[n * groups..][..groups];
            (scales.iter().map(|&s| bf16_to_f32(s).into()).collect(), *group_size)
        }
    };
    Column { codes, scales, group, bias: columns.bias()[n].into() }
}

impl Column<'_> {
    /// The bounds of one output, whose operator has `exact` codes without the zero point, and the result
    /// `rounded`.
    fn bounded(&self, row: &Row, exact: &[i32], rounded: u32, ty: ScalarType) -> Bounded {
        let (mut sum, mut sums) = (0.0, Interval::point(0.0));
        let (mut grouped, mut pieces) = (0.0, 0.0);
        for (g, &scale) in self.scales.iter().enumerate() {
            let k = g * self.group..(g + 1) * self.group;
            let codes = &self.codes[k.clone()];
            let (mut own, mut all, mut spread) = (0i64, 0i64, 0i64);
            for ((&w, &v), range) in codes.iter().zip(&exact[k.clone()]).zip(&row.codes[k]) {
                let (w, [low, high]) = (i64::from(w), range.map(i64::from));
                own += i64::from(v) * w;
                all += w;
                spread += (high - low) * w.abs();
                let ends = [low * w, high * w].map(|v| v as f64 * scale);
                sums.lo += ends[0].min(ends[1]);
                sums.hi += ends[0].max(ends[1]);
            }
            sum += own as f64 * scale;
            let magnitude = own.abs() as f64 + all.abs() as f64 * row.offset + spread as f64;
            grouped += magnitude * scale.abs();
            let piece = |codes: &[i8]| codes.iter().map(|&w| i64::from(w)).sum::<i64>().abs();
            let all: i64 = codes.chunks(PIECE).map(piece).sum();
            pieces += all as f64 * scale.abs();
        }
        let groups = self.scales.len();
        let error = gamma(groups + 4) * grouped
            + gamma(self.codes.len() / PIECE + groups + 4) * pieces * row.offset;
        let factor = |value: f64, up: f64| {
            let relative = SCALE_ROUNDINGS * U * value.abs();
            let product = (value + up * relative) * row.step;
            // The product, and the addition of the bias.
            let slack = 2.0 * U * (product.abs() + self.bias.abs()) + 2.0 * FLUSH;
            product + self.bias + up * slack
        };
        let (lo, hi) = (factor(sums.lo - error, -1.0), factor(sums.hi + error, 1.0));
        let exact = sum * row.step + self.bias;
        let limit = f64::from(f32::MAX);
        let Interval { lo, hi } =
            Interval { lo: lo.clamp(-limit, limit), hi: hi.clamp(-limit, limit) }.rounded(ty);
        let centre = exact;
        Bounded { exact, rounded, centre, lo, hi, below: centre - lo, above: hi - centre }
    }
}

/// The bounds of every output of `x` `[M, K]`, whose operator has these rows and results.
pub(super) fn bounds(
    x: &[f32],
    rows: &QuantizedRows,
    columns: &Columns,
    expected: &[u32],
    ty: ScalarType,
) -> Vec<Bounded> {
    let (size_k, size_n) = (rows.size_k, columns.shape().size_n);
    let all: Vec<Column<'_>> = (0..size_n).map(|n| column(columns, n)).collect();
    let mut bounded = Vec::with_capacity(expected.len());
    for (m, x) in x.chunks_exact(size_k).enumerate() {
        let expected = &expected[m * size_n..][..size_n];
        let Some(row) = Row::of(x) else {
            let (lo, hi) = (f64::NEG_INFINITY, f64::INFINITY);
            bounded.extend(expected.iter().map(|&rounded| {
                let exact = ty.to_f64(rounded);
                Bounded { exact, rounded, centre: exact, lo, hi, below: hi, above: hi }
            }));
            continue;
        };
        let zero_point = rows.negated_zero_points[m];
        let own = rows.row(m)[..size_k].iter().map(|&q| i32::from(q) + zero_point);
        let own: Vec<i32> = own.collect();
        bounded.extend(all.iter().zip(expected).map(|(c, &e)| c.bounded(&row, &own, e, ty)));
    }
    bounded
}
