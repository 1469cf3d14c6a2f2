//! Vectors as arrays, for loops that are compiled for several widths.
// Index loops with fixed bounds unroll, so that arrays become registers. Iterators and
// `copy_from_slice` may stay calls, which spill all vectors.
#![allow(clippy::needless_range_loop, clippy::manual_memcpy)]

use super::LANES;

/// A vector of one element for each lane.
#[derive(Debug, Clone, Copy)]
pub(super) struct Vector(pub(super) [f32; LANES]);

impl Vector {
    pub(super) const ZERO: Self = Self([0.0; LANES]);

    /// The vector from element `at` on.
    #[inline(always)]
    pub(super) fn load(values: &[f32], at: usize) -> Self {
        let values = &values[at..at + LANES];
        let mut vector = [0.0; LANES];
        for lane in 0..LANES {
            vector[lane] = values[lane];
        }
        Self(vector)
    }

    /// Stores the vector from element `at` on.
    #[inline(always)]
    pub(super) fn store(self, values: &mut [f32], at: usize) {
        let values = &mut values[at..at + LANES];
        for lane in 0..LANES {
            values[lane] = self.0[lane];
        }
    }

    /// self + a·b, rounded once.
    #[inline(always)]
    pub(super) fn add_product(mut self, a: Self, b: Self) -> Self {
        for lane in 0..LANES {
            self.0[lane] = a.0[lane].mul_add(b.0[lane], self.0[lane]);
        }
        self
    }

    #[inline(always)]
    pub(super) fn plus(mut self, other: Self) -> Self {
        for lane in 0..LANES {
            self.0[lane] += other.0[lane];
        }
        self
    }
}
