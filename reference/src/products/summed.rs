//! One element of a product before what follows its sum: the exact sum, and how far a kernel's may be
//! from it. Recipes that differ only after the sum share it.

use super::Wide;
use super::bounded::{Bounded, unit};
use super::centre::Centre;
use super::chain::{Chain, to_odd};
use super::exact::Element;
use super::rows::two_to;
use crate::num::scalar::{self, ScalarType, f64_to_f32_rne};

/// The sum of one element.
pub(super) struct Summed {
    exact: Sum,
    /// To within f64's precision.
    value: f64,
    /// Upper bound of a product's magnitude, times their number.
    numbers: f64,
}

/// An exact sum.
enum Sum {
    /// As an unevaluated pair.
    Pair([f64; 2]),
    Wide(Box<Wide>),
}

/// How far a kernel's sum may be.
pub(super) enum Errors {
    /// From a sum in a known order.
    Centre(Centre),
    /// Below and above the exact sum.
    Sides([f64; 2]),
}

/// The exact result of a chain.
struct Exact {
    /// To within f64's precision.
    value: f64,
    /// Bits of the number rounded once.
    rounded: u32,
    is_finite: bool,
}

impl Summed {
    pub(super) fn new(element: &Element<'_>, size_k: usize) -> Self {
        let exact = match element.pair() {
            Some(pair) => Sum::Pair(pair),
            None => Sum::Wide(Box::new(element.sum())),
        };
        let numbers = element.row.magnitude() * element.column.magnitude() * size_k as f64;
        Self { exact, value: element.value(), numbers }
    }

    /// The exact result of `chain`, and the bounds of what a kernel makes of the sum.
    pub(super) fn through(&self, errors: &Errors, chain: &Chain, ty: ScalarType) -> Bounded {
        let exact = self.exact(chain, ty);
        let [lower, upper] = match errors {
            Errors::Centre(centre) => return centred(&exact, chain, *centre, ty),
            Errors::Sides(sides) => *sides,
        };
        // An f32 in the interval stays in it when the ends are rounded: rounding is monotone.
        let narrow = |x: f64| f64::from(f64_to_f32_rne(x));
        let ends =
            chain.interval(narrow(below(self.value - lower)), narrow(above(self.value + upper)));
        let Exact { value, rounded, is_finite } = exact;
        // An infinite activation makes the result infinite, unless the other terms overflow to the
        // other infinity.
        let meets = value.is_infinite() && self.numbers >= f64::from(f32::MAX);
        if is_finite && lower.is_infinite() || meets {
            let (lo, hi) = (f64::NEG_INFINITY, f64::INFINITY);
            return Bounded { exact: value, rounded, centre: value, lo, hi, below: hi, above: hi };
        }
        let half = |x: f64| unit(ty, x) / 2.0;
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

    fn exact(&self, chain: &Chain, ty: ScalarType) -> Exact {
        let wide = match &self.exact {
            Sum::Wide(wide) => chain.exact(wide),
            Sum::Pair(pair) => {
                let made = chain.exact_pair(*pair).filter(|[value, rest]| is_clear(*value, *rest));
                if let Some([value, rest]) = made {
                    let rounded = round(ty, to_odd(value, rest));
                    return Exact { value, rounded, is_finite: true };
                }
                let mut sum = Wide::new();
                pair.iter().for_each(|x| sum.add(*x));
                chain.exact(&sum)
            }
        };
        Exact { value: wide.to_f64(), rounded: wide.round(ty), is_finite: wide.is_finite() }
    }
}

/// The exact result of `chain` for an integer sum, and the bounds of kernels that convert the sum to f32
/// to nearest even and follow the chain.
pub(super) fn of_integer(sum: i32, chain: &Chain, ty: ScalarType) -> Bounded {
    of_integer_within(sum.into(), 0.0, chain, ty)
}

/// As [`of_integer`], of kernels whose f32 sum is at most `error` from the exact one, or the f32 next to
/// such a number.
pub(super) fn of_integer_within(sum: i64, error: f64, chain: &Chain, ty: ScalarType) -> Bounded {
    let mut wide = Wide::new();
    wide.add(sum as f64);
    let wide = chain.exact(&wide);
    let value = wide.to_f64();
    // Sums have fewer than 53 bits, so f64 has them.
    let narrow = |x: f64| f64::from(f64_to_f32_rne(x));
    let ends = chain.interval(narrow(sum as f64 - error), narrow(sum as f64 + error));
    let half = |x: f64| unit(ty, x) / 2.0;
    Bounded {
        exact: value,
        rounded: wide.round(ty),
        centre: value,
        lo: ends.lo,
        hi: ends.hi,
        below: (value - ends.before.0).max(0.0) + half(ends.before.0),
        above: (ends.before.1 - value).max(0.0) + half(ends.before.1),
    }
}

/// Whether [`Wide::to_f64`], which looks at 64 bits, gives `value` of value + rest: not so close to the
/// middle of two f64 that the bits below decide.
fn is_clear(value: f64, rest: f64) -> bool {
    let bits = value.to_bits();
    let half = two_to((bits >> 52 & 0x7ff) as i32 - 1023 - 53);
    rest == 0.0 || bits << 12 != 0 && rest.abs() < half * (1.0 - 1.0 / 512.0)
}

/// Bits of `x` rounded to `ty`.
fn round(ty: ScalarType, x: f64) -> u32 {
    match ty {
        ScalarType::FLOAT16 => scalar::f64_to_f16_rne(x).into(),
        ScalarType::BFLOAT16 => scalar::f64_to_bf16_rne(x).into(),
        _ => f64_to_f32_rne(x).to_bits(),
    }
}

/// The interval of what follows from a sum whose order is known.
fn centred(exact: &Exact, chain: &Chain, sum: Centre, ty: ScalarType) -> Bounded {
    let ends = chain.interval(sum.lo(), sum.hi());
    let half = |x: f64| unit(ty, x) / 2.0;
    let centre = f64::midpoint(ends.before.0, ends.before.1);
    Bounded {
        exact: exact.value,
        rounded: exact.rounded,
        centre,
        lo: ends.lo,
        hi: ends.hi,
        below: centre - ends.before.0 + half(ends.before.0),
        above: ends.before.1 - centre + half(ends.before.1),
    }
}

/// The next f64 below, for ends that were computed in f64.
fn below(x: f64) -> f64 {
    if x.is_finite() { x.next_down() } else { x }
}

/// The next f64 above.
fn above(x: f64) -> f64 {
    if x.is_finite() { x.next_up() } else { x }
}
