//! A kernel's outputs against the exact product and the bound of its class.

use super::Wide;
use super::bound::{Class, Inputs};
use super::centre::{Centre, Raw};
use super::chain::Chain;
use super::columns::{Columns, Rule, WeightColumns};
use super::exact::{Element, product};
use super::recipe::{Extras, Recipe};
use super::rows::Rows;
use crate::Result;
use crate::dims::GroupSize;
use crate::scalar::{ScalarType, f64_to_f32_rne};
use crate::weight::{Groups, Weight};

/// What is known of one element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounded {
    /// The exact result, to within f64's precision.
    pub exact: f64,
    /// Bits of the exact result rounded once to the output's type.
    pub rounded: u32,
    /// What errors are measured from: the exact result; of a class that fixes the order of k, the
    /// result of that order, which truncation may take far from the exact one.
    pub centre: f64,
    /// Least result of a kernel of the class, a number of the output's type.
    pub lo: f64,
    /// Greatest result of a kernel of the class.
    pub hi: f64,
    /// How far below the centre a kernel of the class may be: by its sum's error and the roundings
    /// up to the last, and half a unit in the last place for that.
    pub below: f64,
    /// How far above.
    pub above: f64,
}

impl Bounded {
    /// A result that is zero in every kernel.
    pub const ZERO: Self =
        Self { exact: 0.0, rounded: 0, centre: 0.0, lo: 0.0, hi: 0.0, below: 0.0, above: 0.0 };

    /// The error of `found` over its bound: above 1 exactly where no kernel of the class computes
    /// `found`. NaN in the place of a number is infinitely far, but where partial sums may overflow
    /// to infinities that meet; where the exact result is NaN, only NaN will do.
    pub fn ratio(&self, found: f64) -> f64 {
        if self.exact.is_nan() {
            return if found.is_nan() { 0.0 } else { f64::INFINITY };
        }
        if found == self.centre || self.is_unbounded() {
            return 0.0;
        }
        if found.is_nan() {
            return f64::INFINITY;
        }
        let (error, bound) = if found >= self.centre {
            (found - self.centre, self.above)
        } else {
            (self.centre - found, self.below)
        };
        let ratio = error / bound;
        if (self.lo..=self.hi).contains(&found) {
            // Not a number where both are infinite.
            return ratio.min(1.0);
        }
        if ratio.is_nan() { f64::INFINITY } else { ratio.max(1.0f64.next_up()) }
    }

    /// Whether nothing is promised: partial sums may overflow.
    pub fn is_unbounded(&self) -> bool {
        self.lo == f64::NEG_INFINITY && self.hi == f64::INFINITY
    }

    /// Error of `found` in units of the last place that `ty` has at the exact result.
    pub fn ulps(&self, ty: ScalarType, found: f64) -> f64 {
        if self.exact == found || self.exact.is_nan() && found.is_nan() {
            return 0.0;
        }
        let error = (found - self.exact).abs() / unit(ty, self.exact);
        if error.is_nan() { f64::INFINITY } else { error }
    }
}

/// A product to judge: one matrix, and how its kernel is declared to compute.
#[derive(Clone, Copy)]
pub struct Judge<'j> {
    /// The matrix.
    pub weight: &'j Weight<'j>,
    /// Order of the rows in the kernel's loop (act-order's sort), or as stored.
    pub order: Option<&'j [u32]>,
    /// Scales, bias, roundings.
    pub recipe: &'j Recipe,
    /// Accumulation.
    pub class: &'j Class,
    /// Scales and router weights of the rows.
    pub extras: Extras<'j>,
}

impl Judge<'_> {
    /// The exact result and the bounds of every element of `rows` · W, row by row. `rows` have
    /// their k as stored; `radius`, where given, is the uncertainty of each of their elements.
    ///
    /// # Errors
    /// When parts do not fit each other.
    pub fn bounds(&self, rows: &Rows, radius: Option<&Rows>) -> Result<Vec<Bounded>> {
        let columns = self.recipe.columns(self.weight, self.order)?;
        if !self.group_scales() {
            return self.bounds_of(&columns, &|n| n, rows, radius);
        }
        let codes = WeightColumns::new(self.weight, Rule::Unscaled, self.order)?;
        let scale = |group: u32, n: usize| self.weight.scales.value(group as usize, n);
        let raw = Raw { columns: &codes, power: 0, groups: Some((codes.groups(), &scale)) };
        self.bounds_with(&columns, Some(raw), &|n| n, rows, radius)
    }

    /// k of each group, all of k where groups have no one size.
    fn group_size(&self) -> usize {
        match (&self.weight.groups, self.order) {
            (Groups::Uniform(GroupSize::Of(size)), None) => *size,
            _ => self.weight.shape().size_k,
        }
    }

    /// Whether the unit sums codes, and the scale of each group multiplies its sum.
    fn group_scales(&self) -> bool {
        self.recipe.rule == Rule::Exact && self.recipe.operands.size_bits() == 8
    }

    /// As [`Self::bounds`], of other `columns`; `at` says which column's scale and bias belong to
    /// each of them.
    ///
    /// # Errors
    /// When parts do not fit each other.
    pub fn bounds_of(
        &self,
        columns: &dyn Columns,
        at: &(dyn Fn(usize) -> usize + Sync),
        rows: &Rows,
        radius: Option<&Rows>,
    ) -> Result<Vec<Bounded>> {
        let power = self.recipe.power;
        let raw = (!self.group_scales()).then_some(Raw { columns, power, groups: None });
        self.bounds_with(columns, raw, at, rows, radius)
    }

    /// As [`Self::bounds_of`]; `raw` is what the unit sees, where it is known.
    fn bounds_with(
        &self,
        columns: &dyn Columns,
        raw: Option<Raw<'_>>,
        at: &(dyn Fn(usize) -> usize + Sync),
        rows: &Rows,
        radius: Option<&Rows>,
    ) -> Result<Vec<Bounded>> {
        let gathered = match self.order {
            Some(order) => {
                Some((rows.gather(order)?, radius.map(|r| r.gather(order)).transpose()?))
            }
            None => None,
        };
        let (rows, radius) = match &gathered {
            Some((rows, radius)) => (rows, radius.as_ref()),
            None => (rows, radius),
        };
        let mut stripes = Vec::new();
        let mut request = self.class.request(&mut stripes);
        request.radius = radius;
        let (operands, group_scales) = (self.recipe.operands, self.group_scales());
        let inputs = Inputs {
            activations: operands,
            weights: if group_scales { self.weight.ty } else { operands },
            output: self.recipe.dtype,
            group_scales: group_scales.then(|| self.group_size()),
        };
        let centres = match raw {
            Some(raw) if radius.is_none() => raw.centres(self.class, rows)?,
            _ => None,
        };
        let (size_k, size_n) = (columns.size_k(), columns.size_n());
        product(rows, columns, request, |element| {
            let centre = centres.as_ref().map(|all| all[element.m * size_n + element.n]);
            self.element(element, centre, at, size_k, inputs)
        })
    }

    fn element(
        &self,
        element: &Element<'_>,
        centre: Option<Centre>,
        at: &dyn Fn(usize) -> usize,
        size_k: usize,
        inputs: Inputs,
    ) -> Bounded {
        let chain = self.recipe.chain(self.weight, self.extras, element.m, at(element.n));
        let exact = chain.exact(&element.sum());
        let rounded = exact.round(inputs.output);
        let sum = element.value();
        if let Some(centre) = centre.filter(Centre::is_finite) {
            return centred(&exact, &chain, centre, inputs.output);
        }
        let [lower, upper] = self.class.bound(element, size_k, inputs);
        // An f32 in the interval stays in it when the ends are rounded: rounding is monotone.
        let narrow = |x: f64| f64::from(f64_to_f32_rne(x));
        let ends = chain.interval(narrow(below(sum - lower)), narrow(above(sum + upper)));
        let value = exact.to_f64();
        // An infinite activation makes the result infinite, unless the numbers beside it overflow to
        // the other infinity.
        let numbers = element.row.magnitude() * element.column.magnitude() * size_k as f64;
        let meets = value.is_infinite() && numbers >= f64::from(f32::MAX);
        if exact.is_finite() && lower.is_infinite() || meets {
            let (lo, hi) = (f64::NEG_INFINITY, f64::INFINITY);
            return Bounded { exact: value, rounded, centre: value, lo, hi, below: hi, above: hi };
        }
        let half = |x: f64| unit(inputs.output, x) / 2.0;
        Bounded {
            exact: value,
            rounded,
            centre: value,
            lo: ends.lo,
            hi: ends.hi,
            below: (value - ends.before.0).max(0.0) + half(ends.before.0),
            above: (ends.before.1 - value).max(0.0) + half(ends.before.1),
        }
    }
}

/// The interval of what follows from a sum whose order is known.
fn centred(exact: &Wide, chain: &Chain, sum: Centre, ty: ScalarType) -> Bounded {
    let ends = chain.interval(sum.lo(), sum.hi());
    let half = |x: f64| unit(ty, x) / 2.0;
    let centre = f64::midpoint(ends.before.0, ends.before.1);
    Bounded {
        exact: exact.to_f64(),
        rounded: exact.round(ty),
        centre,
        lo: ends.lo,
        hi: ends.hi,
        below: centre - ends.before.0 + half(ends.before.0),
        above: ends.before.1 - centre + half(ends.before.1),
    }
}

/// One unit in the last place of `ty` at `x`.
fn unit(ty: ScalarType, x: f64) -> f64 {
    let (mantissa, least) = match ty {
        ScalarType::FLOAT16 => (10, -14),
        ScalarType::BFLOAT16 => (7, -126),
        _ => (23, -126),
    };
    let exponent = ((x.to_bits() >> 52) as i32 & 0x7ff) - 1023;
    f64::from(exponent.max(least) - mantissa).exp2()
}

/// The next f64 below, for ends that were computed in f64.
fn below(x: f64) -> f64 {
    if x.is_finite() { x.next_down() } else { x }
}

/// The next f64 above.
fn above(x: f64) -> f64 {
    if x.is_finite() { x.next_up() } else { x }
}
