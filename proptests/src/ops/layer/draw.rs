//! Activations and row orders of drawn layers.

use marlinspike::act_order;
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::weight::{Groups, Weight};

/// Activations between 2^-8 and 2 in magnitude; some rows are all zeros or all one value.
pub(crate) fn activations(rng: &mut Rng, dtype: ScalarType, rows: usize, cols: usize) -> Vec<u16> {
    let (bias, mantissa) = if dtype == ScalarType::FLOAT16 { (15, 10) } else { (127, 7) };
    let number = |rng: &mut Rng| {
        let (sign, exponent) = (rng.between(0, 1), rng.between(bias - 8, bias));
        (sign << 15 | exponent << mantissa | rng.between(0, (1 << mantissa) - 1)) as u16
    };
    let mut all = Vec::with_capacity(rows * cols);
    for _ in 0..rows {
        let (kind, same) = (rng.below(8), number(rng));
        all.extend((0..cols).map(|_| match kind {
            0 => 0,
            1 => same,
            _ => number(rng),
        }));
    }
    all
}

/// The stable permutations of matrices with a `g_idx`.
pub(crate) fn stable(weights: &[Weight<'_>]) -> Option<Vec<Vec<u32>>> {
    let of = |w: &Weight<'_>| match &w.groups {
        Groups::Indexed { g_idx, .. } => Some(act_order::sort(g_idx).perm),
        Groups::Uniform(_) => None,
    };
    weights.iter().map(of).collect()
}
