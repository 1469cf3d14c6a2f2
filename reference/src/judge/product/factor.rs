//! A factor that all values of a product have in common, within bounds wide enough to allow it.
//!
//! A bound holds for each value alone. Kernels of a class err by less than that, and to both sides, so a
//! common factor is no proof of a mistake, but no pass either: sums that are truncated have one as well.

use crate::products::Bounded;

/// Fewest values that show a factor, the smaller half left out.
const FEWEST: usize = 16;
/// Standard errors by which the factor must differ from 1.
const CERTAIN: f64 = 8.0;
/// The difference from 1 that is remarkable, as a share of the largest uniform error that a pass may leave
/// unnoticed. With 2 % that is 0.3 %; bfloat16 outputs that are truncated have 0.26 %.
const REMARKABLE: f64 = 0.15;

/// The mean factor between values and the exact results, if it and the one to the centres of the bounds
/// certainly differ from 1 by a good part of `limit`.
pub(super) fn common(bounded: &[Bounded], found: &[f64], limit: f64) -> Option<f64> {
    let factor = |of: fn(&Bounded) -> f64| between(bounded.iter().map(of), found, limit);
    factor(|b| b.centre).and(factor(|b| b.exact))
}

fn between(results: impl Iterator<Item = f64>, found: &[f64], limit: f64) -> Option<f64> {
    let is_number = |(e, x): &(f64, f64)| *e != 0.0 && e.is_finite() && x.is_finite();
    let mut pairs: Vec<_> = results.zip(found.iter().copied()).filter(is_number).collect();
    // Sums that cancel have errors of any size next to their result.
    pairs.sort_by(|a, b| b.0.abs().total_cmp(&a.0.abs()));
    pairs.truncate(pairs.len() / 2);
    let count = pairs.len() as f64;
    let mean = pairs.iter().map(|(e, x)| x / e).sum::<f64>() / count;
    let spread: f64 = pairs.iter().map(|(e, x)| (x / e - mean).powi(2)).sum();
    let error = spread.sqrt() / count;
    let differs = (mean - 1.0).abs();
    (pairs.len() >= FEWEST && differs > REMARKABLE * limit && differs > CERTAIN * error)
        .then_some(mean)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(found: impl Fn(f64, f64) -> f64) -> Option<f64> {
        let centres: Vec<f64> = (1..=64).map(|i| f64::from(i * i % 61 - 30) / 7.0).collect();
        let bounded: Vec<Bounded> = centres
            .iter()
            .map(|&centre| Bounded { centre, exact: centre, ..Bounded::ZERO })
            .collect();
        // Errors of up to 1 % with changing signs.
        let noise = |i: usize| f64::from((i * 37 % 41) as u32) / 2050.0 - 0.01;
        let values = centres.iter().enumerate().map(|(i, &c)| found(c, noise(i)));
        common(&bounded, &values.collect::<Vec<_>>(), 0.02)
    }

    #[test]
    fn only_a_common_factor_is_found() {
        assert_eq!(of(|c, noise| c * (1.0 + noise)), None);
        assert_eq!(of(|c, noise| c * 0.9978 * (1.0 + noise / 8.0)), None);
        let factor = of(|c, noise| c * 1.005 * (1.0 + noise / 8.0)).expect("a factor");
        assert!((factor - 1.005).abs() < 0.001, "{factor}");
        assert!(of(|c, _| c * 0.98).is_some());
        // One value that is far off has no common factor with the others.
        assert_eq!(of(|c, noise| if c > 4.2 { 1.2 * c } else { c * (1.0 + noise / 8.0) }), None);
    }
}
