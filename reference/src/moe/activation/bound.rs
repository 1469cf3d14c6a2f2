//! Bounds on the results of correct implementations of an activation: an interval around the exact
//! value that follows from the operations that an implementation may use. Each width follows from a
//! stated error; no tolerance is chosen.
//!
//! The class of operations (u = 2^-24; one ulp of an f32 is at most 2u of it):
//!
//! | step | form | error |
//! | --- | --- | --- |
//! | SiLU's argument | α · g | u of it, so u·α·abs(g) relative in the exponential; none for α = 1 |
//! | exponential | CUDA `expf` or `__expf` | at most 2 + ⌊1.173·abs(x)⌋ ulp; from 2^126 on a quotient by it may be zero |
//! | sum 1 + e | f32 | u |
//! | quotient | exact, `__fdividef`, or a reciprocal and a product | 2 ulp |
//! | SiLU | the above, with one product at any place | u more |
//! | GELU's argument | g · √½, both rounded | 2u of it |
//! | error function | CUDA `erff` | 2 ulp; ±1 where it differs from ±1 by less than 2^-36 |
//! | error function, tangent | in f64 | 2^-51; ±1 where it differs from ±1 by less than 2^-54 |
//! | tangent's argument | g³ (2u), 0.044715 · g³ (2u), sum (u), √(2/π) (2u) | 7u of it |
//! | tangent | CUDA `tanhf` | 2 ulp; ±1 where it differs from ±1 by less than 2^-27 |
//! | GELU | sum 1 + t, product with ½·g | u each |
//! | squared ReLU | product | u |
//! | limits | exact; a limit may be rounded to the 16-bit type | – |
//! | up + shift | f32 | u |
//! | last product | f32 | u |
//! | product with up + shift | may come before the quotient | NaN where it overflows and e is infinite |
//! | result | one rounding to the 16-bit type | rounding is monotone: the ends are rounded |
//! | either factor of the last product | may be rounded to the 16-bit type first | the same |
//! | anything | results below 2^-126 may be flushed to zero, above the largest f32 be infinite | – |
//!
//! The error of an exponential affects SiLU only by the share e/(1 + e), which is small for
//! positive gates. The errors of `erff` and `tanhf` are absolute: they dominate GELU at negative
//! gates, where 1 + t cancels: below about -7, f64's 1 + t has a few bits left, and a product of it is
//! off by a share that bfloat16 shows. Sources of the library errors: CUDA C++ Programming Guide,
//! "Mathematical Functions", single precision; the saturation of `erff` and `tanhf` is their known
//! behaviour, since a value nearer to ±1 than half an ulp rounds to it.

use ndarray::{Array2, ArrayView2};

use super::{Definition, Function, exact};
use crate::Result;
use crate::moe::widen;
use crate::num::interval::{Bound, FLUSH, Interval, U};
use crate::num::scalar::ScalarType;

/// Second-order terms of relative errors below 2^-16.
const SECOND: f64 = 1.0 + 1.0 / 8192.0;
/// Gates beyond which t is ±1: of `erff` or `tanhf`, and of the same functions in f64.
struct Saturation {
    f32: f64,
    f64: f64,
}

const GELU: Saturation = Saturation { f32: 7.1, f64: 8.5 };
const GELU_TANH: Saturation = Saturation { f32: 5.5, f64: 7.3 };

/// The largest (c0 + c1·|y|) / (1 + e^y) for y ≥ `from`.
fn largest_share(from: f64, c0: f64, c1: f64) -> f64 {
    let sigmoid = |y: f64| 1.0 / (1.0 + (-y).exp());
    if from < 0.0 {
        // Below -104 every implementation gives zero, which the caller includes.
        let from = from.max(-104.0);
        // It rises toward negative y; for positive y, y / (1 + e^y) is at most 0.2785.
        let negative = (c0 - c1 * from) * sigmoid(-from);
        return negative.max(0.5 * c0 + 0.2785 * c1);
    }
    let y = from.max(1.2785);
    c0 * sigmoid(-from) + c1 * y * sigmoid(-y)
}

/// The unit in the last place of f32 at `x` (0 < x < 1).
fn ulp(x: f64) -> f64 {
    let exponent = (x.max(FLUSH).to_bits() >> 52) as i32 - 1023;
    2f64.powi(exponent - 23)
}

/// The largest value on [lo, hi] of a function that rises up to `top` and falls after it.
fn largest(lo: f64, hi: f64, top: f64, f: impl Fn(f64) -> f64) -> f64 {
    f(top.clamp(lo, hi))
}

impl Function {
    /// The exact range of F over `gate`.
    fn range(self, gate: Interval, alpha: f64) -> Interval {
        let (a, b) = (self.exact(gate.lo, alpha), self.exact(gate.hi, alpha));
        let mut range = Interval { lo: a.min(b), hi: a.max(b) };
        let lowest = self.lowest(alpha);
        if gate.contains(lowest) {
            range.lo = range.lo.min(self.exact(lowest, alpha));
        }
        range
    }

    /// The interval of f32 results for any gate of an interval.
    fn interval(self, gate: Interval, alpha: f64) -> Interval {
        let range = self.range(gate, alpha);
        match self {
            Self::Silu => {
                let argument = if alpha == 1.0 { 0.0 } else { U };
                let exponential =
                    largest_share(alpha * gate.lo, 4.0 * U, 1.173 * 2.0 * U + argument);
                // From 2^126 on. A reciprocal is subnormal there, with 2^-22 of rounding.
                let vanishes = alpha * gate.lo < -87.0;
                let reciprocal = if vanishes { 4.0 * U } else { 0.0 };
                // Sum, quotient, product.
                let out = range.after_f32((exponential + 6.0 * U + reciprocal) * SECOND);
                if vanishes { out.hull(Interval::point(0.0)) } else { out }
            }
            Self::Gelu => {
                let argument =
                    |z: f64| 2.0 * U * z * std::f64::consts::FRAC_2_SQRT_PI * (-z * z).exp();
                let scale = std::f64::consts::FRAC_1_SQRT_2;
                self.cancelling(gate, range, GELU, |lo, hi| {
                    let (lo, hi) = (lo * scale, hi * scale);
                    let value = 1.0 - exact::erfc(hi);
                    (value, largest(lo, hi, scale, argument))
                })
            }
            Self::GeluTanh => {
                let argument = |y: f64| 7.0 * U * y / y.cosh().powi(2);
                self.cancelling(gate, range, GELU_TANH, |lo, hi| {
                    let (lo, hi) = (exact::inner(lo), exact::inner(hi));
                    (hi.tanh(), largest(lo, hi, 0.7717, argument))
                })
            }
            Self::Relu2 => range.after_f32(U),
        }
    }

    /// ½·g·(1 + t): relative errors of sum and product, and the absolute one of t, which `error`
    /// gives as (largest |t|, error from the argument) for an interval of |g|.
    fn cancelling(
        self,
        gate: Interval,
        range: Interval,
        saturates: Saturation,
        error: impl Fn(f64, f64) -> (f64, f64),
    ) -> Interval {
        let (lo, hi) = (gate.lo.max(-saturates.f32), gate.hi.min(saturates.f32));
        let mut out = range.after_f32(2.0 * U * SECOND);
        if lo <= hi {
            let most = lo.abs().max(hi.abs());
            let least = if lo < 0.0 && hi > 0.0 { 0.0 } else { lo.abs().min(hi.abs()) };
            let (t, argument) = error(least, most);
            let absolute = 0.5 * most * (2.0 * ulp(t.min(1.0 - U)) + argument) * SECOND;
            out.lo -= absolute;
            out.hi += absolute;
        }
        if gate.lo < -saturates.f32 {
            // In f64, ½·g times the error of 1 + t.
            if gate.hi > -saturates.f64 {
                out.lo -= 0.5 * gate.lo.max(-saturates.f64).abs() * 2f64.powi(-51);
            }
            out = out.hull(Interval::point(0.0));
        }
        out
    }
}

/// The bounds of one activation for one type of results.
#[derive(Debug, Clone)]
pub struct Bounds {
    definition: Definition,
    ty: ScalarType,
    /// The gate's factor by its bits, filled on demand: a gate has 65536 values.
    table: Vec<Option<Bound>>,
}

/// Applies `f` unless the interval is empty.
fn map(interval: Interval, f: impl Fn(Interval) -> Interval) -> Interval {
    if interval.is_empty() { interval } else { f(interval) }
}

impl Bounds {
    /// The bounds of `definition` on values of `ty`, FLOAT16 or BFLOAT16.
    ///
    /// # Errors
    /// As [`Definition::validate`]; [`Error::Unsupported`](crate::Error::Unsupported) for other types.
    pub fn new(definition: Definition, ty: ScalarType) -> Result<Self> {
        crate::moe::half_type(ty)?;
        Ok(Self { table: vec![None; 1 << 16], ..Self::of_type(definition, ty)? })
    }

    /// The bounds for [`of_bounds`](Self::of_bounds) alone, whose results may also be FLOAT32.
    pub(crate) fn of_type(definition: Definition, ty: ScalarType) -> Result<Self> {
        definition.validate()?;
        Ok(Self { definition, ty, table: Vec::new() })
    }

    /// The bound for one gate and one up, bits of the type. Without multiplication up is ignored.
    pub fn of_bits(&mut self, gate: u16, up: u16) -> Bound {
        let point = |bits| Bound::exactly(f64::from(widen(self.ty, bits)));
        let factor = match self.table[usize::from(gate)] {
            Some(factor) => factor,
            None => {
                let factor = self.gate(&point(gate));
                self.table[usize::from(gate)] = Some(factor);
                factor
            }
        };
        self.product(factor, &point(up))
    }

    /// The bound if gate and up are only known by the bounds of the previous stage.
    pub fn of_bounds(&self, gate: &Bound, up: &Bound) -> Bound {
        self.product(self.gate(gate), up)
    }

    /// The interval of a limit and its rounding to the type.
    fn rounded(&self, limit: f64) -> Interval {
        Interval::point(limit).hull(Interval::point(limit).rounded_once(self.ty))
    }

    /// F of the gate: the first factor.
    fn gate(&self, gate: &Bound) -> Bound {
        let d = &self.definition;
        let alpha = f64::from(d.alpha);
        let (mut exact, mut interval) = (gate.exact, gate.interval);
        if let Some(limit) = d.gate_limit.map(f64::from) {
            exact = if exact > limit { limit } else { exact };
            let limits = self.rounded(limit);
            interval = map(interval, |i| i.at_most(limits.lo).hull(i.at_most(limits.hi)));
            if gate.nan {
                // On the device, the minimum of NaN and a limit is the limit.
                interval = interval.hull(limits);
            }
        }
        let mut out = Bound { nan: gate.nan, ..Bound::NAN };
        if !exact.is_nan() {
            out.exact = d.function.exact(exact, alpha);
        }
        out.interval = map(interval, |i| d.function.interval(i, alpha));
        if interval.lo == f64::NEG_INFINITY && d.function != Function::Relu2 {
            // −∞/∞ or −∞ · 0: no implementation gives the limit.
            out.nan = true;
            if interval.is_point() {
                out = Bound::NAN;
            } else if exact == f64::NEG_INFINITY {
                out.exact = f64::NAN;
            }
        }
        if d.up_shift != 0.0 && alpha * interval.lo < -87.0 {
            // (up + shift) · gate first, as upstream's operator has it: −∞/∞ where it overflows.
            let up = d.up_limit.map_or(f64::INFINITY, |l| f64::from(l) + f64::from(d.up_shift));
            out.nan |= interval.lo * up < -f64::from(f32::MAX);
        }
        if let Some(limit) = d.value_limit.map(f64::from) {
            out.exact = if out.exact > limit { limit } else { out.exact };
            out.interval = map(out.interval, |i| i.at_most(limit));
            if out.nan {
                out.interval = out.interval.hull(Interval::point(limit));
            }
        }
        if d.is_gated() {
            out.interval = map(out.interval, |i| i.hull(i.rounded(self.ty)));
        }
        out
    }

    /// Limited and shifted: the other factor.
    fn up(&self, up: &Bound) -> Bound {
        let d = &self.definition;
        let mut out = *up;
        if let Some(limit) = d.up_limit.map(f64::from) {
            if !out.exact.is_nan() {
                out.exact = out.exact.clamp(-limit, limit);
            }
            let limits = self.rounded(limit);
            let inside = |i: Interval, limit: f64| i.at_most(limit).at_least(-limit);
            out.interval = map(out.interval, |i| inside(i, limits.lo).hull(inside(i, limits.hi)));
            if out.nan {
                // The result is one limit or the other, depending on their order.
                out.interval = out.interval.hull(Interval { lo: -limits.hi, hi: limits.hi });
            }
        }
        if d.up_shift != 0.0 {
            let shift = f64::from(d.up_shift);
            out.exact += shift;
            out.interval = map(out.interval, |i| {
                let sum = Interval { lo: i.lo + shift, hi: i.hi + shift }.after_f32(U);
                sum.hull(sum.rounded(self.ty))
            });
        }
        out
    }

    fn product(&self, gate: Bound, up: &Bound) -> Bound {
        if !self.definition.is_gated() {
            return Bound { interval: map(gate.interval, |i| i.rounded(self.ty)), ..gate };
        }
        let up = self.up(up);
        let mut out = Bound { exact: gate.exact * up.exact, nan: gate.nan || up.nan, ..Bound::NAN };
        if !gate.interval.is_empty() && !up.interval.is_empty() {
            let (product, undefined) = gate.interval.times(up.interval);
            out.nan |= undefined;
            out.interval = map(product, |i| i.after_f32(U).rounded(self.ty));
        }
        out
    }
}

impl Definition {
    /// The bounds `[rows, I]` of the activation of `gate_up` `[rows, `[`width_in(I)`](Self::width_in)`]`,
    /// from the bounds of the previous stage.
    ///
    /// # Errors
    /// As [`Bounds::new`]; [`Error::Shape`](crate::Error::Shape) when gate and up do not fill a row.
    pub fn bounds(&self, gate_up: ArrayView2<'_, Bound>, ty: ScalarType) -> Result<Array2<Bound>> {
        let bounds = Bounds::new(*self, ty)?;
        let size_i = self.size_i(gate_up.shape())?;
        Ok(Array2::from_shape_fn((gate_up.nrows(), size_i), |(m, i)| {
            let [gate, up] = self.places(i, size_i);
            bounds.of_bounds(&gate_up[[m, gate]], &gate_up[[m, up]])
        }))
    }
}
