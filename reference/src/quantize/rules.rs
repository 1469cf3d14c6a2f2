//! Identifies the known quantizer that produced given codes and scales.
//!
//! int8 and e4m3 activations with one scale per row follow from x, up to details: frameworks
//! multiply by a reciprocal instead of dividing, and round ties in two ways. Each rule is defined
//! bit for bit here. One rule must explain all values.

use super::absmax;
use crate::moe::{narrow, widen};
use crate::num::scalar::{ScalarType, e4m3fn_to_f32, f32_to_e4m3fn_rne_saturating};
use crate::{Error, Result};

/// How a row x becomes codes q and a scale s. L is 127 (int8) or 448 (e4m3), max the largest
/// magnitude of the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivationRule {
    /// s = max · fl(1/L), q = x / s to nearest even: torch on a GPU.
    Quotient,
    /// s = max / L, q = x / s to nearest even: vLLM's `dynamic_per_token_scaled_fp8_quant`.
    QuotientExact,
    /// s = max · fl(1/L), q = x · fl(1/s) to nearest even.
    Reciprocal,
    /// s = max / L, q = x · fl(1/s) to nearest even.
    ReciprocalExact,
    /// s = max / L, q = x · fl(L/max) to nearest even: vLLM's `dynamic_scaled_int8_quant`.
    ProductEven,
    /// s = max / L, q = x · fl(L/max), ties away from zero: the source of vLLM's
    /// `per_token_quant_int8`.
    Product,
    /// As [`ActivationRule::Product`], with the approximate division of compiled Triton
    /// (`div.full.f32`, within 2 ulp): one factor for each row.
    ProductApproximate,
    /// s = max / L, q = x / s, halves away from zero.
    QuotientAway,
    /// s = max / L, q = x · fl(1/s), halves away from zero.
    ReciprocalAway,
    /// s = max / L and x / s, both rounded to the type of x; q to nearest even.
    SixteenBit,
    /// One given scale for all rows; q = x / s or x · fl(1/s), saturating, to nearest even. Only if
    /// a case declares it, since the scale does not follow from x.
    Static,
}

impl ActivationRule {
    /// Every rule with its name in the config key `quantizer`.
    pub const NAMED: &[(&str, Self)] = &[
        ("quotient", Self::Quotient),
        ("quotient_exact", Self::QuotientExact),
        ("reciprocal", Self::Reciprocal),
        ("reciprocal_exact", Self::ReciprocalExact),
        ("product_even", Self::ProductEven),
        ("product", Self::Product),
        ("product_approximate", Self::ProductApproximate),
        ("quotient_away", Self::QuotientAway),
        ("reciprocal_away", Self::ReciprocalAway),
        ("sixteen_bit", Self::SixteenBit),
        ("static", Self::Static),
    ];

    /// The name of the rule.
    pub fn name(self) -> &'static str {
        Self::NAMED.iter().find(|(_, rule)| *rule == self).map_or("", |(name, _)| name)
    }

    /// Whether halves go away from zero; e4m3 has no such quantizer.
    fn away(self) -> bool {
        use ActivationRule as R;
        matches!(self, R::Product | R::ProductApproximate | R::QuotientAway | R::ReciprocalAway)
    }

    /// Whether x is multiplied by a quotient that does not pass through the scale.
    fn is_product(self) -> bool {
        matches!(self, Self::Product | Self::ProductEven | Self::ProductApproximate)
    }
}

/// Activations and their codes and scales from an unknown quantizer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StatedActivations<'a> {
    /// Rows of `cols` values of type `dtype`, widened.
    pub(crate) x: &'a [f32],
    /// Values of a row.
    pub(crate) cols: usize,
    /// Type of x.
    pub(crate) dtype: ScalarType,
    /// [`ScalarType::INT8`] or [`ScalarType::FLOAT8_E4M3FN`].
    pub(crate) ty: ScalarType,
    /// Factor of every scale after quantization: `input_global_scale`, or 1.
    pub(crate) factor: f32,
    /// Bits of one code per value.
    pub(crate) codes: &'a [u8],
    /// One per row.
    pub(crate) scales: &'a [f32],
}

/// The result of one rule, compared with the found codes and scales.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RuleFit {
    /// The rule.
    pub(crate) rule: ActivationRule,
    /// Bits of the rule's codes.
    pub(crate) codes: Vec<u8>,
    /// The rule's scales.
    pub(crate) scales: Vec<f32>,
    /// Indices of codes that differ.
    pub(crate) wrong_codes: Vec<usize>,
    /// Rows whose scale differs.
    pub(crate) wrong_scales: Vec<usize>,
}

impl RuleFit {
    /// Whether the rule explains every code and every scale.
    pub(crate) fn is_exact(&self) -> bool {
        self.wrong_codes.is_empty() && self.wrong_scales.is_empty()
    }

    /// The share of differing codes plus the share of differing scales.
    fn wrong(&self) -> f64 {
        let share = |wrong: &[usize], of: usize| wrong.len() as f64 / of.max(1) as f64;
        share(&self.wrong_codes, self.codes.len()) + share(&self.wrong_scales, self.scales.len())
    }
}

/// x · factor or x / divisor, before rounding to a code.
#[derive(Clone, Copy)]
enum Scaling {
    Divide(f32),
    Multiply(f32),
    Narrowed(f32),
}

/// The code of `v` under `by`.
fn code(ty: ScalarType, dtype: ScalarType, v: f32, by: Scaling, away: bool) -> u8 {
    let scaled = match by {
        Scaling::Divide(s) => v / s,
        Scaling::Multiply(f) => v * f,
        Scaling::Narrowed(s) => widen(dtype, narrow(dtype, v / s)),
    };
    if ty != ScalarType::INT8 {
        return f32_to_e4m3fn_rne_saturating(if scaled.is_nan() { 448.0 } else { scaled });
    }
    let rounded = if away { scaled.round() } else { scaled.round_ties_even() };
    rounded.clamp(-128.0, 127.0) as i8 as u8
}

/// A rule for rows of `dtype` and codes of `ty`, with one scale for each row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowRule {
    pub(crate) rule: ActivationRule,
    pub(crate) ty: ScalarType,
    pub(crate) dtype: ScalarType,
}

impl RowRule {
    fn limit(self) -> f32 {
        if self.ty == ScalarType::INT8 { 127.0 } else { 448.0 }
    }

    /// The largest magnitude that counts: upstream's lower limit for int8 is on it, for e4m3 on the
    /// scale.
    fn largest(self, x: &[f32]) -> f32 {
        if self.ty == ScalarType::INT8 { absmax(x).max(1e-10) } else { absmax(x) }
    }

    /// The scale of a row with this [`largest`](Self::largest) magnitude.
    fn scaling(self, max: f32) -> (f32, Scaling) {
        let (rule, limit) = (self.rule, self.limit());
        let scale = match rule {
            ActivationRule::Quotient | ActivationRule::Reciprocal => max * (1.0 / limit),
            ActivationRule::SixteenBit => widen(self.dtype, narrow(self.dtype, max / limit)),
            _ => max / limit,
        };
        let floor = 1.0 / (448.0 * 512.0);
        let floored = self.ty != ScalarType::INT8 && scale < floor;
        let scale = if floored { floor } else { scale };
        let scaling = match rule {
            rule if rule.is_product() && !floored => Scaling::Multiply(limit / max),
            ActivationRule::Reciprocal
            | ActivationRule::ReciprocalExact
            | ActivationRule::ReciprocalAway => Scaling::Multiply(1.0 / scale),
            ActivationRule::SixteenBit if scale > 0.0 => Scaling::Narrowed(scale),
            _ => Scaling::Divide(if scale > 0.0 { scale } else { 1.0 }),
        };
        (scale, scaling)
    }

    /// The scale of a row whose largest magnitude is `max`, and the codes of `values` in it.
    pub(crate) fn quantize<'v>(
        self,
        max: f32,
        values: impl IntoIterator<Item = &'v f32>,
    ) -> (f32, Vec<u8>) {
        let (scale, scaling) = self.scaling(self.largest(&[max]));
        let code = |v: &f32| code(self.ty, self.dtype, *v, scaling, self.rule.away());
        (scale, values.into_iter().map(code).collect())
    }
}

impl StatedActivations<'_> {
    /// Whether two codes have the same value; e4m3 has two zeros.
    fn same(&self, a: u8, b: u8) -> bool {
        a == b || (self.ty != ScalarType::INT8 && (a | b) & 0x7f == 0)
    }

    fn row<'s, T>(&self, all: &'s [T], row: usize) -> &'s [T] {
        &all[row * self.cols..][..self.cols]
    }

    fn codes_of(&self, row: usize, by: Scaling, away: bool) -> Vec<u8> {
        self.row(self.x, row).iter().map(|&v| code(self.ty, self.dtype, v, by, away)).collect()
    }

    fn wrong_in(&self, row: usize, codes: &[u8]) -> usize {
        let found = self.row(self.codes, row).iter();
        found.zip(codes).filter(|(a, b)| !self.same(**a, **b)).count()
    }

    /// The candidate with the fewest wrong codes in `row`.
    fn nearest(&self, row: usize, ways: &[Scaling], away: bool) -> Vec<u8> {
        let all = ways.iter().map(|&by| self.codes_of(row, by, away));
        all.min_by_key(|codes| self.wrong_in(row, codes)).unwrap_or_default()
    }

    /// Codes and scale of one row.
    fn made(&self, rule: ActivationRule, row: usize) -> (Vec<u8>, f32) {
        let (x, found) = (self.row(self.x, row), self.scales[row]);
        let no_nan: Vec<f32>;
        let x = match x.iter().all(|v| v.is_finite()) {
            true => x,
            // Kernels drop a NaN: it does not count for the scale, and its code is that of 0 or 448.
            false if found.is_finite() && !x.iter().any(|v| v.is_infinite()) => {
                no_nan = x.iter().map(|v| if v.is_nan() { 0.0 } else { *v }).collect();
                &no_nan
            }
            false => {
                // Its products are NaN for any codes.
                let scale = if found.is_finite() { f32::NAN } else { found };
                return (self.row(self.codes, row).to_vec(), scale);
            }
        };
        let of = RowRule { rule, ty: self.ty, dtype: self.dtype };
        let (limit, max) = (of.limit(), of.largest(x));
        let (scale, scaling) = of.scaling(max);
        let mut given = scale * self.factor;
        // A row of zeros gives zero products under any scale; known quantizers use these.
        if x.iter().all(|&v| v == 0.0) && (found == 0.0 || found == self.factor) {
            given = found;
        }
        if rule != ActivationRule::ProductApproximate {
            return (self.codes_of(row, scaling, rule.away()), given);
        }
        let around = |v: f32| [0, 1, -1, 2, -2].map(|step| step_by(v, step));
        let scales = around(scale).map(|s| s * self.factor);
        let given = scales.into_iter().find(|&s| s == found).unwrap_or(given);
        let ways = around(limit / max).map(Scaling::Multiply);
        (self.nearest(row, &ways, true), given)
    }

    /// The codes of all rows under the given scale.
    fn made_static(&self) -> Vec<(Vec<u8>, f32)> {
        let stated = self.scales[0];
        let before = [0, 1, -1].map(|step| step_by(stated / self.factor, step));
        let usable = |s: &f32| *s * self.factor == stated && s.is_finite() && *s > 0.0;
        let ways: Vec<Scaling> = before
            .into_iter()
            .filter(usable)
            .flat_map(|s| [Scaling::Divide(s), Scaling::Multiply(1.0 / s)])
            .collect();
        let rows = || 0..self.scales.len();
        let whole = |by: Scaling| rows().map(|r| self.codes_of(r, by, false)).collect::<Vec<_>>();
        let wrong = |codes: &Vec<Vec<u8>>| -> usize {
            codes.iter().enumerate().map(|(row, codes)| self.wrong_in(row, codes)).sum()
        };
        match ways.into_iter().map(whole).min_by_key(wrong) {
            Some(codes) => codes.into_iter().map(|codes| (codes, stated)).collect(),
            None => rows().map(|row| self.made(ActivationRule::Quotient, row)).collect(),
        }
    }

    fn fit(&self, rule: ActivationRule) -> RuleFit {
        let rows: Vec<(Vec<u8>, f32)> = match rule {
            ActivationRule::Static => self.made_static(),
            rule => (0..self.scales.len()).map(|row| self.made(rule, row)).collect(),
        };
        let scales: Vec<f32> = rows.iter().map(|(_, scale)| *scale).collect();
        let codes: Vec<u8> = rows.into_iter().flat_map(|(codes, _)| codes).collect();
        let both_nan = |a: f32, b: f32| a.is_nan() && b.is_nan();
        let equal = |i: &usize| {
            let (made, found) = (scales[*i], self.scales[*i]);
            made == found || both_nan(made, found)
        };
        RuleFit {
            rule,
            wrong_codes: (0..codes.len())
                .filter(|&i| !self.same(codes[i], self.codes[i]))
                .collect(),
            wrong_scales: (0..scales.len()).filter(|i| !equal(i)).collect(),
            codes,
            scales,
        }
    }

    /// The first known rule that explains every code and scale, otherwise the one that leaves the
    /// fewest unexplained; with `declared`, only that rule is tried.
    ///
    /// # Errors
    /// [`Error::Shape`] if codes and scales do not match rows of `cols` values;
    /// [`Error::Unsupported`] for another type of codes.
    pub(crate) fn explain(&self, declared: Option<ActivationRule>) -> Result<RuleFit> {
        if ![ScalarType::INT8, ScalarType::FLOAT8_E4M3FN].contains(&self.ty) {
            return Err(Error::unsupported(self.ty, "int8 or float8_e4m3fn activations"));
        }
        let rows = self.scales.len();
        let whole = rows.checked_mul(self.cols);
        if rows == 0 || whole != Some(self.x.len()) || whole != Some(self.codes.len()) {
            let expected = format!("{} values in rows of {}", self.x.len(), self.cols);
            let found = [self.codes.len(), rows];
            return Err(Error::shape("quantized activations", &found, expected));
        }
        let int8 = self.ty == ScalarType::INT8;
        let first = match (declared, int8) {
            (Some(rule), _) => return Ok(self.fit(rule)),
            (None, true) => ActivationRule::Quotient,
            (None, false) => ActivationRule::QuotientExact,
        };
        let mut best = self.fit(first);
        for &(_, rule) in ActivationRule::NAMED {
            if best.is_exact() {
                break;
            }
            if rule == first || rule == ActivationRule::Static || (rule.away() && !int8) {
                continue;
            }
            let fit = self.fit(rule);
            if fit.wrong() < best.wrong() {
                best = fit;
            }
        }
        Ok(best)
    }

    /// The number of a code.
    pub(crate) fn value(&self, code: u8) -> f32 {
        if self.ty == ScalarType::INT8 { f32::from(code as i8) } else { e4m3fn_to_f32(code) }
    }
}

/// The f32 `steps` steps above the positive `v`.
fn step_by(v: f32, steps: i32) -> f32 {
    f32::from_bits(v.to_bits().saturating_add_signed(steps))
}
