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

/// What a row's codes and step may be.
struct Row {
    /// Least and largest code without the zero point, for each k.
    codes: Vec<[i32; 2]>,
    /// The largest offset that a kernel may add to codes.
    offset: f64,
    /// Length of the range of activations over 255; 1 for a row of zeros.
    step: f64,
    /// Whether the step may be flushed to zero, so that the result may be the bias alone.
    flushes: bool,
}

/// Below this range, 255 / range overflows or its reciprocal is subnormal: codes and step may be any.
const SMALL_RANGE: f64 = 512.0 * FLUSH;

impl Row {
    /// What kernels may make of a row: one of these. Empty for activations that are not finite.
    fn all(x: &[f32]) -> Vec<Self> {
        if !x.iter().all(|x| x.is_finite()) {
            return Vec::new();
        }
        let x = || x.iter().map(|&x| f64::from(x));
        let (low, high) = (x().fold(0.0, f64::min), x().fold(0.0, f64::max));
        let range = high - low;
        let same = |code: [i32; 2], offset: f64, step: f64| {
            let codes = x().map(|_| code).collect();
            Self { codes, offset, step, flushes: false }
        };
        // The operator's scale is 1 and its zero point -128, which every code equals. The correction
        // cancels the sum in exact arithmetic only.
        let zeros = || same([0; 2], 128.0, 1.0);
        if range == 0.0 {
            return vec![zeros()];
        }
        if range > f64::from(f32::MAX) {
            // The range overflows: the scale is 0, and so is the step.
            return vec![same([0; 2], 128.0, 0.0)];
        }
        if range < SMALL_RANGE {
            let any = Self { flushes: true, ..same([-255, 255], 128.0, range / 255.0) };
            // Subnormal activations may be flushed to zero.
            let flushed = range < FLUSH * 2.0;
            return if flushed { vec![any, zeros()] } else { vec![any] };
        }
        let scale = 255.0 / range;
        let zero_points = nearest(-128.0 - low * scale, 8.0 * 256.0 * U);
        let zero_points: Vec<i32> = zero_points.map(|z| z.clamp(-128, 127)).collect();
        let codes = x().map(|x| {
            let scaled = x * scale;
            let rounded = nearest(scaled, SCALE_ROUNDINGS * U * scaled.abs() + FLUSH * scale);
            let all = rounded
                .flat_map(|r| zero_points.iter().map(move |&z| (r + z).clamp(-128, 127) - z));
            all.fold([i32::MAX, i32::MIN], |[a, b], v| [a.min(v), b.max(v)])
        });
        let codes = codes.collect();
        let offset = |z: &i32| f64::from(z.abs().max((z + 128).abs()));
        let offset = zero_points.iter().map(offset).fold(0.0, f64::max);
        vec![Self { codes, offset, step: range / 255.0, flushes: false }]
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
    /// The results of one output under `row`, before they are rounded to its type, and the exact one;
    /// `None` if a sum may overflow. `exact` has the operator's codes without the zero point.
    fn results(&self, row: &Row, exact: &[i32]) -> Option<(Interval, f64)> {
        let (mut sum, mut sums) = (0.0, Interval::point(0.0));
        let (mut grouped, mut pieces) = (0.0, 0.0);
        for (g, &scale) in self.scales.iter().enumerate() {
            let k = g * self.group..(g + 1) * self.group;
            let codes = &self.codes[k.clone()];
            let (mut own, mut all, mut spread) = (0i64, 0i64, 0i64);
            for ((&w, &v), range) in codes.iter().zip(&exact[k.clone()]).zip(&row.codes[k]) {
                let (w, [low, high]) = (i64::from(w), range.map(i64::from));
                let v = i64::from(v).clamp(low, high);
                own += v * w;
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
        let largest = (grouped + pieces * row.offset) * row.step.max(1.0) + self.bias.abs();
        if largest >= f64::from(f32::MAX) {
            return None;
        }
        let error = gamma(groups + 4) * grouped
            + gamma(self.codes.len() / PIECE + groups + 4) * pieces * row.offset;
        let factor = |value: f64, up: f64| {
            let relative = SCALE_ROUNDINGS * U * value.abs();
            let product = (value + up * relative) * row.step;
            // The product, and the addition of the bias.
            let slack = 2.0 * U * (product.abs() + self.bias.abs()) + 2.0 * FLUSH;
            product + self.bias + up * slack
        };
        let all = Interval { lo: factor(sums.lo - error, -1.0), hi: factor(sums.hi + error, 1.0) };
        let exact = if row.flushes { 0.0 } else { sum * row.step };
        Some((all, exact + self.bias))
    }

    /// The bounds of one output, whose operator has the result `rounded`.
    fn bounded(&self, rows: &[Row], codes: &[i32], rounded: u32, ty: ScalarType) -> Bounded {
        let results = rows.iter().map(|row| self.results(row, codes)).collect::<Option<Vec<_>>>();
        let Some((all, exact)) =
            results.and_then(|all| all.into_iter().reduce(|(a, exact), (b, _)| (a.hull(b), exact)))
        else {
            return unbounded(rounded, ty);
        };
        let Interval { lo, hi } = all.rounded(ty);
        Bounded { exact, rounded, centre: exact, lo, hi, below: exact - lo, above: hi - exact }
    }
}

/// Any result at all.
fn unbounded(rounded: u32, ty: ScalarType) -> Bounded {
    let (exact, lo, hi) = (ty.to_f64(rounded), f64::NEG_INFINITY, f64::INFINITY);
    Bounded { exact, rounded, centre: exact, lo, hi, below: hi, above: hi }
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
        let made = Row::all(x);
        let zero_point = rows.negated_zero_points[m];
        let own = rows.row(m)[..size_k].iter().map(|&q| i32::from(q) + zero_point);
        let own: Vec<i32> = own.collect();
        bounded.extend(all.iter().zip(expected).map(|(c, &e)| c.bounded(&made, &own, e, ty)));
    }
    bounded
}
