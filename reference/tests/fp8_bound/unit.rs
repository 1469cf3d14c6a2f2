//! A naive model of the e4m3 matrix units: every number is an f64, every truncation a division by
//! a power of two. Nothing here is the code under test.

use marlinspike::vectors::Rng;

/// ⌊log₂ |x|⌋ of a number that is neither zero nor an f64 subnormal.
fn exponent(x: f64) -> i32 {
    (x.abs().to_bits() >> 52) as i32 - 1023
}

/// `x` rounded toward zero to a multiple of 2^unit.
fn truncated(x: f64, unit: i32) -> f64 {
    let two_to = |e: i32| f64::from_bits(((e + 1023) as u64) << 52);
    (x * two_to(-unit)).trunc() * two_to(unit)
}

/// A unit's addition of e4m3 products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Unit {
    /// Hopper's wgmma: 32 products, F = 13, 14 bits.
    Wgmma,
    /// Ada's mma.sync: 16 consecutive products at a time, F = 13, 14 bits.
    Ada,
    /// Hopper's mma.sync: f16 factors, two sums over pairs of k from zero with F = 25, the
    /// accumulator added in f32.
    Mma,
}

pub(crate) const UNITS: [Unit; 3] = [Unit::Wgmma, Unit::Ada, Unit::Mma];

/// One fused sum of factors and an accumulator.
fn fused(terms: &[(f64, f64)], c: f64, least: i32, fraction: i32, kept: i32) -> f64 {
    let factor = |x: f64| exponent(x).max(least);
    let mut largest = if c == 0.0 { i32::MIN } else { exponent(c) };
    for &(a, w) in terms.iter().filter(|(a, w)| *a != 0.0 && *w != 0.0) {
        largest = largest.max(factor(a) + factor(w));
    }
    if largest == i32::MIN {
        return 0.0;
    }
    let unit = largest - fraction;
    let sum: f64 =
        truncated(c, unit) + terms.iter().map(|(a, w)| truncated(a * w, unit)).sum::<f64>();
    if sum == 0.0 { 0.0 } else { truncated(sum, exponent(sum) + 1 - kept) }
}

impl Unit {
    /// One instruction of 32 products or fewer.
    fn instruction(self, terms: &[(f64, f64)], c: f64) -> f64 {
        match self {
            Self::Wgmma => fused(terms, c, -6, 13, 14),
            Self::Ada => terms.chunks(16).fold(c, |c, terms| fused(terms, c, -6, 13, 14)),
            Self::Mma => {
                let half = |low: usize| -> Vec<(f64, f64)> {
                    let mine = |k: &usize| (k % 4 / 2) == low;
                    (0..terms.len()).filter(mine).map(|k| terms[k]).collect()
                };
                let first = fused(&half(0), 0.0, -14, 25, 24);
                let sum = fused(&half(1), first, -14, 25, 24);
                f64::from(c as f32 + sum as f32)
            }
        }
    }

    /// A chain of instructions from zero.
    pub(crate) fn chain(self, terms: &[(f64, f64)]) -> f64 {
        terms.chunks(32).fold(0.0, |c, terms| self.instruction(terms, c))
    }
}

/// The f32 sum of parts in a random order and association.
pub(crate) fn reduced(random: &mut Rng, mut parts: Vec<f64>) -> f64 {
    match random.below(3) {
        0 => {}
        1 => parts.reverse(),
        _ => {
            while parts.len() > 1 {
                let x = parts.swap_remove(random.below(parts.len()));
                let y = parts.swap_remove(random.below(parts.len()));
                parts.push(f64::from(x as f32 + y as f32));
            }
        }
    }
    parts.into_iter().fold(0.0, |sum, part| f64::from(sum as f32 + part as f32))
}
