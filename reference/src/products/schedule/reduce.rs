//! Reduces partial sums in the stated order.

use super::{Order, Schedule, Sum};
use crate::num::scalar::ScalarType;
use crate::products::tensor_core::{LANES, Lanes, add_f32};

use super::steps::round_bits;

/// Adds lane by lane.
fn add(x: &Lanes, y: &Lanes) -> Lanes {
    std::array::from_fn(|l| add_f32(x[l], y[l]))
}

/// Rounds a sum to the type in which it is stored between additions.
fn stored(x: Lanes, ty: ScalarType) -> Lanes {
    if ty == ScalarType::FLOAT32 {
        return x;
    }
    // Back to f32: exact.
    x.map(|bits| (ty.to_f64(round_bits(f32::from_bits(bits), ty)) as f32).to_bits())
}

impl Schedule {
    /// The sum of the chunks' sums (f32 bits), which must not be empty; overwrites them.
    pub(super) fn add_chunks(&self, sums: &mut [Lanes]) -> Lanes {
        let Some(chunks) = self.leaf_chunks else { return self.chunk_sum.reduce(sums) };
        let leaf = Sum::default();
        let mut leaves: Vec<Lanes> = sums.chunks_mut(chunks).map(|own| leaf.reduce(own)).collect();
        self.chunk_sum.reduce(&mut leaves)
    }
}

impl Sum {
    /// The sum of `parts` (f32 bits), which must not be empty; overwrites `parts`.
    pub(super) fn reduce(self, parts: &mut [Lanes]) -> Lanes {
        let ty = self.ty;
        let chain = |parts: &mut dyn Iterator<Item = Lanes>| {
            let first = parts.next().unwrap_or([0; LANES]);
            parts.fold(first, |sum, part| add(&stored(sum, ty), &part))
        };
        match self.order {
            Order::Ascending => chain(&mut parts.iter().copied()),
            Order::Descending => chain(&mut parts.iter().rev().copied()),
            Order::Pairwise => {
                let mut len = parts.len();
                while len > 1 {
                    for i in 0..len / 2 {
                        parts[i] = add(&stored(parts[2 * i], ty), &stored(parts[2 * i + 1], ty));
                    }
                    if len % 2 == 1 {
                        parts[len / 2] = parts[len - 1];
                    }
                    len = len.div_ceil(2);
                }
                parts[0]
            }
            Order::Halving => {
                let mut half = parts.len() / 2;
                if half == 0 {
                    return parts[0];
                }
                // Stored values: initially the sums of the upper half.
                let mut memory: Vec<Lanes> = parts[half..].iter().map(|&p| stored(p, ty)).collect();
                while half > 1 {
                    half /= 2;
                    for i in 0..half {
                        let pair = add(&memory[i + half], &memory[i]);
                        memory[i] = stored(add(&parts[i + half], &pair), ty);
                    }
                }
                add(&parts[0], &memory[0])
            }
        }
    }
}
