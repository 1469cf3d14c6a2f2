//! Bounds on the outputs of correct routers: an interval around the exact value that follows from
//! the operations that an implementation may use. Each width follows from a stated error; no
//! tolerance is chosen.
//!
//! The class of operations (u = 2^-24, the unit roundoff of f32; one ulp is at most 2u of a value):
//!
//! | step | form | error |
//! | --- | --- | --- |
//! | softmax argument | x − max, one rounding | u·(max − x) absolute, so as much relative in the exponential |
//! | softmax exponential | CUDA `expf` | 2 ulp (CUDA C++ Programming Guide, single precision) |
//! | sum over experts | f32, any order | (E − 1)·u relative, since all terms are positive |
//! | probability | times a rounded reciprocal, or divided | 2u |
//! | sigmoid | 1 / (1 + `__expf`(−x)) | 2 + ⌊1.173·abs(x)⌋ ulp in the exponential, u each in the sum and the quotient |
//! | sigmoid, grouped top-k | the above, or ½·`tanhf`(½·x) + ½ | 2 ulp of the tangent, at most u, and u/2 of the sum, absolute |
//! | biased score | one addition | rounded to the scores' type |
//! | group score | one addition | rounded to the scores' type |
//! | renormalized weight | sum of top_k in any order, reciprocal or quotient, factor | (k + 3)·u relative |
//! | 16-bit scores (grouped) | rounded to the logits' type | rounding is monotone: the ends are rounded |
//! | sum, quotient, factor of 16-bit scores | in f32, or rounded to the logits' type ([`Roundings`]) | the same |
//! | anything | results below 2^-126 may be flushed to zero | 2^-126 absolute |
//!
//! The common factor 1/Σ of a token's probabilities cancels in renormalized weights and does not
//! change their order. It is kept separate, which keeps the intervals narrow. Exact values and ends
//! are computed in f64 and widened by 2^-40 of their size, far more than the error of any f64
//! exponential, and far less than u.

use crate::moe::ScoringFunc;
use crate::moe::router::{Groups, Router};
use crate::num::interval::{Interval, U, WIDEN};
use crate::num::scalar::ScalarType;
use crate::num::scalar::round_to;

/// Which results after 16-bit scores are rounded to the logits' type, too. Fused operators round none of
/// them, torch's operators every one; a compiler may keep some in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Roundings {
    /// The sum that weights are divided by.
    pub sum: bool,
    /// The divided weights.
    pub quotient: bool,
    /// The weights times the routed scaling factor.
    pub product: bool,
}

impl Roundings {
    /// Every combination that can differ under `router`; none rounded first, all rounded second.
    pub fn of(router: &Router<'_>) -> Vec<Self> {
        let mut all = vec![Self::default()];
        if router.score_type() == ScalarType::FLOAT32 {
            return all;
        }
        let (divides, scales) = (router.renormalize, router.routed_scaling_factor != 1.0);
        for bits in (1..8).rev() {
            let [sum, quotient, product] = [bits & 4 != 0, bits & 2 != 0, bits & 1 != 0];
            if (divides || !sum && !quotient) && (scales || !product) {
                all.push(Self { sum, quotient, product });
            }
        }
        all
    }
}

/// The scores of one token: exact values and intervals of computed values.
#[derive(Debug, Clone)]
pub struct Bounds {
    /// Exact scores without the common factor.
    exact: Vec<f64>,
    /// Computed scores without the common factor.
    free: Vec<Interval>,
    /// Exact common factor and its interval: 1/Σ of a softmax.
    common: (f64, Interval),
    /// Selection values, up to the common factor.
    choice: Vec<Interval>,
    renormalize: bool,
    factor: f64,
    /// What follows 16-bit scores.
    roundings: Roundings,
}

impl Bounds {
    /// The bounds of one `row` of logits, which [`Router::validate`] accepts.
    pub fn new(router: &Router<'_>, row: &[f32]) -> Self {
        let one = (1.0, Interval { lo: 1.0, hi: 1.0 });
        let (exact, mut free, mut common): (Vec<f64>, Vec<Interval>, _) = match router.scoring_func
        {
            ScoringFunc::Sigmoid => {
                let both = router.groups.is_some();
                let (exact, free) = row.iter().map(|&x| sigmoid(x.into(), both)).unzip();
                (exact, free, one)
            }
            ScoringFunc::Softmax => softmax(row),
        };
        let ty = router.score_type();
        if ty != ScalarType::FLOAT32 {
            // The rounding to 16 bits follows the common factor.
            free = free.iter().map(|f| product(*f, common.1).rounded(ty)).collect();
            let exact = exact.iter().map(|e| e * common.0).collect();
            return Self::with_choice(router, exact, free, one);
        }
        if router.bias.is_some() {
            free = free.iter().map(|f| product(*f, common.1)).collect();
            let exact = exact.iter().map(|e| e * common.0).collect();
            common = one;
            return Self::with_choice(router, exact, free, common);
        }
        Self::with_choice(router, exact, free, common)
    }

    fn with_choice(
        router: &Router<'_>,
        exact: Vec<f64>,
        free: Vec<Interval>,
        common: (f64, Interval),
    ) -> Self {
        let ty = router.score_type();
        let choice = match router.bias {
            Some(bias) => {
                let biased = |(f, &b): (&Interval, &f32)| {
                    let b = f64::from(round_to(ty, b));
                    Interval { lo: f.lo + b, hi: f.hi + b }.rounded(ty)
                };
                free.iter().zip(bias).map(biased).collect()
            }
            None => free.clone(),
        };
        let (renormalize, factor) = (router.renormalize, f64::from(router.routed_scaling_factor));
        let roundings = Roundings::default();
        Self { exact, free, common, choice, renormalize, factor, roundings }
    }

    /// Bounds the weights of implementations that also round these results.
    pub const fn set_roundings(&mut self, roundings: Roundings) {
        self.roundings = roundings;
    }

    /// The bounds if scores were recovered from the rounded selection values by subtracting the
    /// correction `bias`, which loses the bits that the bias has shifted out.
    pub fn less_bias(&self, bias: &[f32]) -> Self {
        let mut changed = self.clone();
        let back = |sum: f64, b: f32| f64::from(sum as f32 - b);
        for (i, (choice, &b)) in self.choice.iter().zip(bias).enumerate() {
            changed.free[i] = Interval { lo: back(choice.lo, b), hi: back(choice.hi, b) };
            changed.exact[i] = back(self.exact[i] + f64::from(b), b);
        }
        changed
    }

    /// Selection values, up to a factor that all experts share.
    pub fn choice(&self) -> &[Interval] {
        &self.choice
    }

    /// Exact weight and interval of entry `j` of the chosen `ids`, all below the number of experts.
    pub fn weight(&self, router: &Router<'_>, ids: &[usize], j: usize) -> (f64, Interval) {
        let (me, f) = (self.exact[ids[j]], self.free[ids[j]]);
        let ty = router.score_type();
        let (exact, mut weight) = if self.renormalize {
            let others = || ids.iter().enumerate().filter(|(i, _)| *i != j).map(|(_, &id)| id);
            let (mut exact, mut lo, mut hi) = (0.0, 0.0, 0.0);
            for id in others() {
                exact += self.exact[id];
                lo += self.free[id].lo;
                hi += self.free[id].hi;
            }
            // x / (x + others) grows with x. The fused operator starts its sum with 1e-20.
            let share = |x: f64, others: f64| if x > 0.0 { x / (x + others) } else { 0.0 };
            let interval = match self.roundings.sum {
                true => {
                    // Each score is one of the type's numbers, so a rounded sum is not below it.
                    let sum = Interval { lo: f.lo + lo, hi: f.hi + hi };
                    let sum = sum.scaled((ids.len() - 1) as f64 * U).rounded(ty);
                    let over = |x: f64, sum: f64| if x > 0.0 { x / sum.max(x) } else { 0.0 };
                    Interval { lo: over(f.lo, sum.hi), hi: over(f.hi, sum.lo) }.scaled(3.0 * U)
                }
                false => Interval { lo: share(f.lo, hi + 1e-20), hi: share(f.hi, lo) }
                    .scaled((ids.len() + 3) as f64 * U),
            };
            let rounded = if self.roundings.quotient { interval.rounded(ty) } else { interval };
            (share(me, exact), rounded)
        } else {
            // A sigmoid has no common factor, hence no rounding of a product with it.
            let score = if self.common.1.is_point() { f } else { product(f, self.common.1) };
            (me * self.common.0, score.scaled(U))
        };
        let ends = [weight.lo * self.factor, weight.hi * self.factor];
        weight = Interval { lo: ends[0].min(ends[1]), hi: ends[0].max(ends[1]) };
        if self.roundings.quotient || self.roundings.product {
            // The f32 product with the factor follows a rounding or precedes one.
            let error = weight.magnitude() * U;
            weight = Interval { lo: weight.lo - error, hi: weight.hi + error };
        }
        if self.roundings.product {
            weight = weight.rounded(ty);
        }
        (exact * self.factor, weight)
    }

    /// Interval of each group's score.
    pub fn groups(&self, router: &Router<'_>, groups: Groups) -> Vec<Interval> {
        let per = self.choice.len() / groups.num_expert_group.max(1);
        let best_two = |values: &mut dyn Iterator<Item = f64>| {
            values.fold((f64::NEG_INFINITY, f64::NEG_INFINITY), |(a, b), v| {
                if v > a { (v, a) } else { (a, b.max(v)) }
            })
        };
        let of = |c: &[Interval]| {
            let lo = best_two(&mut c.iter().map(|i| i.lo));
            let hi = best_two(&mut c.iter().map(|i| i.hi));
            match router.bias {
                Some(_) => {
                    Interval { lo: lo.0 + lo.1, hi: hi.0 + hi.1 }.rounded(router.score_type())
                }
                None => Interval { lo: lo.0, hi: hi.0 },
            }
        };
        self.choice.chunks_exact(per.max(1)).map(of).collect()
    }
}

/// A product of two numbers that are not negative, with one rounding.
fn product(a: Interval, b: Interval) -> Interval {
    Interval { lo: a.lo * b.lo, hi: a.hi * b.hi }.scaled(U)
}

/// Exact exponentials and their intervals, and the common factor.
fn softmax(row: &[f32]) -> (Vec<f64>, Vec<Interval>, (f64, Interval)) {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (mut exact, mut free) = (Vec::with_capacity(row.len()), Vec::with_capacity(row.len()));
    for &x in row {
        if x == f32::NEG_INFINITY {
            exact.push(0.0);
            free.push(Interval::point(0.0));
            continue;
        }
        let d = f64::from(x) - f64::from(max);
        let e = d.exp();
        exact.push(e);
        // Beyond the exponential's range both are zero, and the argument's error is irrelevant.
        let argument = (d.abs().min(1e3) * U).exp_m1();
        free.push(Interval::around(e, argument + 4.0 * U * (1.0 + argument)).at_least_zero());
    }
    let sum: f64 = exact.iter().sum();
    let (lo, hi) = free.iter().fold((0.0, 0.0), |(lo, hi), f| (lo + f.lo, hi + f.hi));
    // The term of the largest logit is positive.
    let common = Interval { lo: 1.0 / hi, hi: 1.0 / lo }.scaled(row.len() as f64 * U);
    (exact, free, (1.0 / sum, common))
}

/// Exact sigmoid and its interval; `both` includes the form with tanh.
fn sigmoid(x: f64, both: bool) -> (f64, Interval) {
    // Every form gives 0 for a masked expert: 1 / ∞, and ½ · tanh(−∞) + ½.
    if x == f64::NEG_INFINITY {
        return (0.0, Interval::point(0.0));
    }
    let exact = 1.0 / (1.0 + (-x).exp());
    let ulps = 2.0 + (1.173 * x.abs()).floor();
    // Out of range, the exponential is zero or infinite, and the interval must include that.
    let e = Interval::around((-x).min(700.0).exp(), (2.0 * U * ulps).min(1.0));
    let overflows = e.hi >= f64::from(f32::MAX);
    let quotient = Interval {
        lo: if overflows { 0.0 } else { 1.0 / (1.0 + e.hi) },
        hi: 1.0 / (1.0 + e.lo.max(0.0)),
    }
    .scaled(2.0 * U);
    let quotient = Interval { hi: quotient.hi.min(1.0), ..quotient };
    if !both {
        return (exact, quotient);
    }
    let error = 1.5 * U + WIDEN;
    let tangent = Interval { lo: (exact - error).max(0.0), hi: (exact + error).min(1.0) };
    (exact, quotient.hull(tangent))
}
