//! Comparisons of predicted products, which have bounds.

use super::Comparison;
use crate::num::scalar::ScalarType;
use crate::products::Bounded;

/// A value is near a prediction within this many units in the last place.
const NEAR: f64 = 4.0;
/// The distance of a kernel's result from the exact one, as a share of its bound, that is hardly
/// exceeded: rounding errors of a long sum have both signs, and their bound adds their magnitudes.
const SHARE: f64 = 8.0;

impl Comparison {
    /// Compares a predicted product with the found one. `predicted` are the elements that the
    /// mistake changes, without duplicates; `wrong` are the indices out of bound, ascending.
    ///
    /// A right element may lie within both bounds. Then distances decide: with the mistake, found
    /// numbers would lie near its exact results and not near the right ones.
    pub(crate) fn of_bounds(
        right: &[Bounded],
        predicted: impl IntoIterator<Item = (usize, Bounded)>,
        found: &[f64],
        wrong: &[usize],
        ty: ScalarType,
    ) -> Self {
        let mut all = Self::default();
        let (mut ratio, mut gain) = (Likelihood::default(), 0.0);
        for (i, made) in predicted {
            let (x, own) = (found[i], &right[i]);
            let holds = holds(&made, x);
            let size = made.exact.abs().max(x.abs());
            let near = x.is_finite() && near(&made, x, size, ty);
            all.changed += usize::from(!(own.lo..=own.hi).contains(&made.exact));
            let is_wrong = wrong.binary_search(&i).is_ok();
            all.weigh_distance(own, &made, x, ty);
            // An element without a bound carries no evidence.
            if !is_wrong || holds || near {
                gain += nearer(own, &made, x, ty);
            }
            if !is_wrong {
                let broken = !holds && !made.is_unbounded() && !own.is_unbounded();
                all.broken += usize::from(broken);
                all.near_broken += usize::from(broken && near);
                ratio.add(own, &made, x, ty);
            } else if holds {
                let radius = made.below.max(made.above);
                all.explained_float(x - own.exact, radius);
            } else if near {
                all.near += 1;
                let radius = reach(size, ty) + made.below.max(made.above);
                let bits = ((x - own.exact).abs() / radius).log2();
                all.near_evidence += if bits.is_nan() { 0.0 } else { bits.clamp(0.0, 10.0) };
            }
        }
        all.nearer = Some(gain);
        all.unexplained = wrong.len() - all.explained;
        all.broken += usize::from(ratio.contradicts());
        all
    }

    /// Counts a value that the mistake changes as near its prediction or far from it.
    pub(crate) fn weigh_distance(
        &mut self,
        own: &Bounded,
        made: &Bounded,
        found: f64,
        ty: ScalarType,
    ) {
        let reach = reach(made.exact.abs().max(found.abs()), ty);
        let unit = reach.max(made.below.max(made.above) / SHARE);
        let (moved, left) = ((made.exact - own.exact).abs(), (found - made.exact).abs());
        if moved > unit && left.is_finite() && unit.is_finite() {
            self.close += usize::from(left <= unit);
            self.loose += usize::from(left > unit);
        }
    }
}

/// Whether a kernel of the class that `bounded` describes may produce `found`.
pub(crate) fn holds(bounded: &Bounded, found: f64) -> bool {
    !bounded.is_unbounded() && bounded.ratio(found) <= 1.0
}

/// Half a unit in the last place, relative to the value.
fn roundoff(ty: ScalarType) -> f64 {
    if ty == ScalarType::FLOAT16 { 2f64.powi(-11) } else { 2f64.powi(-8) }
}

/// How much nearer `found` is to the prediction than to the right result, in bits. Distances below
/// half a unit in the last place, or an eighth of the bound, are equal.
fn nearer(right: &Bounded, made: &Bounded, found: f64, ty: ScalarType) -> f64 {
    if right.is_unbounded() || made.is_unbounded() {
        return 0.0;
    }
    let size = right.exact.abs().min(made.exact.abs());
    let width = right.below.max(right.above).min(made.below.max(made.above));
    let unit = (roundoff(ty) * size).max(width / SHARE).max(f64::MIN_POSITIVE);
    let distance = |exact: f64| (found - exact).abs().max(unit);
    let bits = (distance(right.exact) / distance(made.exact)).log2();
    if bits.is_nan() { 0.0 } else { bits.clamp(-10.0, 10.0) }
}

/// [`NEAR`] units in the last place at the magnitude `size`.
fn reach(size: f64, ty: ScalarType) -> f64 {
    NEAR * 2.0 * roundoff(ty) * size
}

/// Whether `found` is within its bound plus a few units in the last place.
pub(crate) fn near(made: &Bounded, found: f64, size: f64, ty: ScalarType) -> bool {
    (found - made.exact).abs() <= reach(size, ty) + made.below.max(made.above)
}

/// Distances of right elements from two predictions, beyond rounding errors.
#[derive(Debug, Clone, Copy, Default)]
struct Likelihood {
    /// Squared distances from the right results.
    right: f64,
    /// Squared distances from the results of the mistake.
    made: f64,
}

impl Likelihood {
    /// Counts distances above one unit in the last place plus an eighth of the bound. Bounds cover
    /// the worst case; actual sums are much closer.
    fn add(&mut self, right: &Bounded, made: &Bounded, found: f64, ty: ScalarType) {
        let width = right.below.max(right.above);
        let unit = (2.0 * roundoff(ty) * right.exact.abs()).max(width / 8.0);
        let excess = |exact: f64| ((found - exact).abs() / unit - 1.0).max(0.0).powi(2);
        let (own, other) = (excess(right.exact), excess(made.exact));
        if own.is_finite() && other.is_finite() {
            self.right += own;
            self.made += other;
        }
    }

    /// Whether the right elements contradict the mistake.
    fn contradicts(&self) -> bool {
        self.made > 4.0 * self.right + 4.0
    }
}
