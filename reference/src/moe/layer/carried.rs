//! Rows whose values are known by bounds, as they enter a product.
//!
//! A quantizer is monotonic: a larger value never gets a smaller code, and a larger magnitude never a
//! smaller scale. A value in [a, b] of a row whose largest magnitude is in [m, M] therefore has a code
//! between those of a and of b under the scales of m and of M.

use crate::Result;
use crate::num::element::E4m3fn;
use crate::num::interval::{Bound, round_once};
use crate::num::scalar::ScalarType;
use crate::products::Rows;
use crate::quantize::{Fp8GroupRule, RowRule};

/// How rows enter a product.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Carrier {
    /// As they are.
    Unquantized,
    /// By a rule, with one scale for each row; the product takes it times `factor`.
    Rows { rule: RowRule, factor: f32 },
    /// As e4m3fn under one given scale.
    Static(f32),
    /// As e4m3fn with a scale for each `size` values of a row.
    Groups { size: usize, rule: Fp8GroupRule, ue8m0: bool },
}

/// The operands of a product.
pub(crate) struct Carried {
    /// Codes, or values where groups have scales.
    pub(crate) values: Rows,
    /// The largest distance of an implementation's value from `values`; `None` where all are known.
    pub(crate) radius: Option<Rows>,
    /// Scales of the rows.
    pub(crate) scales: Option<Vec<f32>>,
    /// Rows without a bound: one of their values may be infinite or NaN, and they are quantized.
    pub(crate) undefined: Vec<bool>,
    /// Rows with a value that may be NaN.
    pub(crate) nan: Vec<bool>,
}

impl Carried {
    /// Rows that every implementation has.
    pub(crate) fn known(values: Rows, scales: Option<Vec<f32>>) -> Self {
        let no = vec![false; values.rows()];
        Self { values, radius: None, scales, undefined: no.clone(), nan: no }
    }
}

/// Whether every implementation has a finite value here.
fn is_finite(b: &Bound) -> bool {
    !b.nan && b.interval.lo.is_finite() && b.interval.hi.is_finite()
}

/// A value inside the bound: the exact one rounded to `dtype` unless every implementation has the same.
fn centre(b: &Bound, dtype: ScalarType) -> f64 {
    if b.interval.is_empty() {
        return f64::NAN;
    }
    if b.interval.is_point() {
        // The exact value may round differently.
        return b.interval.lo;
    }
    let value = round_once(dtype, b.exact);
    if value.is_finite() { value.clamp(b.interval.lo, b.interval.hi) } else { 0.0 }
}

/// Rows of `k` bounds of `dtype` as they enter a product. A row with an infinity or NaN has no bound; its
/// values count as zeros here.
pub(crate) fn carried<'b>(
    x: impl Iterator<Item = &'b Bound> + Clone,
    k: usize,
    dtype: ScalarType,
    how: Carrier,
) -> Result<Carried> {
    let most = f64::from(f32::MAX);
    let bounds: Vec<&Bound> = x.clone().collect();
    let quantized = !matches!(how, Carrier::Unquantized);
    let undefined =
        bounds.chunks(k.max(1)).map(|row| quantized && !row.iter().all(|b| is_finite(b))).collect();
    let nan = bounds.chunks(k.max(1)).map(|row| row.iter().any(|b| b.nan)).collect();
    let values: Vec<f64> = x.clone().map(|b| centre(b, dtype)).collect();
    if let Carrier::Unquantized = how {
        let radius = |(b, &c): (&Bound, &f64)| {
            let reach = (b.interval.hi - c).max(c - b.interval.lo);
            if b.interval.is_point() || c.is_nan() { 0.0 } else { reach.clamp(0.0, most) }
        };
        let radii: Vec<f64> = x.zip(&values).map(radius).collect();
        let certain = radii.iter().all(|r| *r == 0.0);
        let radius = if certain { None } else { Some(Rows::new(k, radii)?) };
        let values = Rows::new(k, values)?;
        return Ok(Carried { values, radius, scales: None, undefined, nan });
    }
    let ends: Vec<[f32; 2]> = x.map(ends).collect();
    let values: Vec<f32> = values.into_iter().map(finite).collect();
    let group = if let Carrier::Groups { size, .. } = how { size } else { k.max(1) };
    let mut all = Quantized::default();
    for (values, ends) in values.chunks(group).zip(ends.chunks(group)) {
        all.add(values, ends, how, dtype);
    }
    let radius = match all.radii.iter().all(|r| *r == 0.0) {
        true => None,
        false => Some(Rows::new(k, all.radii.iter().map(|r| r.min(most)).collect())?),
    };
    let scales = (!matches!(how, Carrier::Groups { .. })).then_some(all.scales);
    Ok(Carried { values: Rows::new(k, all.values)?, radius, scales, undefined, nan })
}

fn finite(v: f64) -> f32 {
    if v.is_finite() { v as f32 } else { 0.0 }
}

/// The ends of a bound in f32, rounded outwards.
fn ends(b: &Bound) -> [f32; 2] {
    if b.interval.is_empty() {
        return [0.0; 2];
    }
    let [lo, hi] = [finite(b.interval.lo), finite(b.interval.hi)];
    let below = b.interval.lo.is_finite() && f64::from(lo) > b.interval.lo;
    let above = b.interval.hi.is_finite() && f64::from(hi) < b.interval.hi;
    [if below { lo.next_down() } else { lo }, if above { hi.next_up() } else { hi }]
}

/// The smallest and the largest magnitude that a row or group may have.
fn magnitudes(ends: &[[f32; 2]]) -> [f32; 2] {
    let least = ends.iter().map(|[lo, hi]| match *lo <= 0.0 && *hi >= 0.0 {
        true => 0.0,
        false => lo.abs().min(hi.abs()),
    });
    let most = ends.iter().map(|[lo, hi]| lo.abs().max(hi.abs()));
    [least.fold(0.0, f32::max), most.fold(0.0, f32::max)]
}

/// The values that codes and scales may have.
pub(crate) struct CodeRanges {
    /// k of a row.
    pub(crate) size_k: usize,
    /// The smallest and the largest value of each code.
    pub(crate) codes: Vec<[f64; 2]>,
    /// The value of each code that the exact source gives.
    pub(crate) exact: Vec<f64>,
    /// The smallest, the exact and the largest scale of each row or group.
    pub(crate) scales: Vec<[f32; 3]>,
}

impl CodeRanges {
    /// The ranges of rows of `k` bounds.
    pub(crate) fn new(x: &[Bound], k: usize, dtype: ScalarType, how: Carrier) -> Self {
        let group = if let Carrier::Groups { size, .. } = how { size } else { k.max(1) };
        let mut all = Self { size_k: k, codes: Vec::new(), exact: Vec::new(), scales: Vec::new() };
        for bounds in x.chunks(group) {
            let values: Vec<f32> = bounds.iter().map(|b| finite(centre(b, dtype))).collect();
            let ends: Vec<[f32; 2]> = bounds.iter().map(ends).collect();
            let max = values.iter().fold(0f32, |max, v| max.max(v.abs()));
            let (scale, exact) = quantize(values, max, how, dtype);
            let mut codes: Vec<[f64; 2]> = exact.iter().map(|code| [*code; 2]).collect();
            let mut scales = [scale; 3];
            for max in magnitudes(&ends) {
                for side in 0..2 {
                    let side = ends.iter().map(|e| e[side]).collect();
                    let (own, made) = quantize(side, max, how, dtype);
                    scales = [scales[0].min(own), scale, scales[2].max(own)];
                    for (range, code) in codes.iter_mut().zip(made) {
                        *range = [range[0].min(code), range[1].max(code)];
                    }
                }
            }
            all.codes.extend(codes);
            all.exact.extend(exact);
            all.scales.push(scales);
        }
        all
    }
}

/// Quantized groups of rows.
#[derive(Default)]
struct Quantized {
    values: Vec<f64>,
    radii: Vec<f64>,
    scales: Vec<f32>,
}

impl Quantized {
    /// Adds the values of one scale, each with the ends of its interval.
    fn add(&mut self, values: &[f32], ends: &[[f32; 2]], how: Carrier, dtype: ScalarType) {
        let max = values.iter().fold(0f32, |max, v| max.max(v.abs()));
        let [least, most] = magnitudes(ends);
        let (scale, codes) = quantize(values.to_vec(), max, how, dtype);
        let given = if let Carrier::Rows { factor, .. } = how { scale * factor } else { scale };
        self.scales.push(given);
        let in_groups = matches!(how, Carrier::Groups { .. });
        let unit = if in_groups { f64::from(scale) } else { 1.0 };
        self.values.extend(codes.iter().map(|code| code * unit));
        if least == most && ends.iter().all(|[lo, hi]| lo == hi) {
            self.radii.extend(codes.iter().map(|_| 0.0));
            return;
        }
        // In units of the scale.
        let low: Vec<f32> = ends.iter().map(|e| e[0]).collect();
        let high: Vec<f32> = ends.iter().map(|e| e[1]).collect();
        let mut reach = codes.iter().map(|code| [*code; 2]).collect::<Vec<_>>();
        let mut of = vec![least, most];
        of.dedup();
        for max in of {
            for side in [&low, &high] {
                let (own, codes) = quantize(side.clone(), max, how, dtype);
                for (reach, code) in reach.iter_mut().zip(codes) {
                    let value = code * (f64::from(own) / f64::from(scale));
                    *reach = [reach[0].min(value), reach[1].max(value)];
                }
            }
        }
        // The scale may lie anywhere between those of both magnitudes, and the code at either.
        let slack = 1.0 + 1e-6;
        let stretch = f64::from(quantize(Vec::new(), most, how, dtype).0)
            / f64::from(quantize(Vec::new(), least, how, dtype).0).max(f64::MIN_POSITIVE);
        self.radii.extend(reach.iter().zip(&codes).map(|([lo, hi], code)| {
            let own = (hi - code).max(code - lo);
            let of_scale = (stretch - 1.0) * lo.abs().max(hi.abs());
            let radius = if own == 0.0 && stretch == 1.0 { 0.0 } else { (own + of_scale) * slack };
            radius * unit
        }));
    }
}

/// The scale of a row or group whose largest magnitude is `max`, and the values of the codes of `values`.
fn quantize(values: Vec<f32>, max: f32, how: Carrier, dtype: ScalarType) -> (f32, Vec<f64>) {
    let e4m3 = ScalarType::FLOAT8_E4M3FN;
    let decoded = |ty: ScalarType, codes: Vec<u8>| -> Vec<f64> {
        codes.into_iter().map(|code| ty.to_f64(code.into())).collect()
    };
    match how {
        Carrier::Unquantized => (1.0, values.into_iter().map(f64::from).collect()),
        Carrier::Rows { rule, .. } => {
            let (scale, codes) = RowRule { dtype, ..rule }.quantize(max, &values);
            (scale, decoded(rule.ty, codes))
        }
        Carrier::Static(scale) => {
            let code =
                |v: f32| f64::from(E4m3fn::from_f32_rne_saturating(v * (1.0 / scale)).to_f32());
            (scale, values.into_iter().map(code).collect())
        }
        Carrier::Groups { rule, ue8m0, .. } => {
            let (scale, codes) = rule.operations().quantize(max, ue8m0, &values);
            (scale, decoded(e4m3, codes.into_iter().map(E4m3fn::to_bits).collect()))
        }
    }
}
