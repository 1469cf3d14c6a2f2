//! RMSNorm.

use marlinspike::w4a8::wide::{Loop, wide};

use super::dot;

/// A norm's weight and ε.
#[derive(Debug, Clone, PartialEq)]
pub struct RmsNorm {
    weight: Vec<f32>,
    eps: f32,
}

impl RmsNorm {
    /// A norm of rows of `weight.len()` values.
    pub fn new(weight: Vec<f32>, eps: f32) -> Self {
        Self { weight, eps }
    }

    /// Values of a row.
    pub fn size(&self) -> usize {
        self.weight.len()
    }

    /// Each row x to x · (1 / √(Σx² / n + ε)) · weight; every operation rounds to f32.
    pub fn apply(&self, rows: &mut [f32]) {
        wide(Rows { norm: self, rows });
    }
}

struct Rows<'a> {
    norm: &'a RmsNorm,
    rows: &'a mut [f32],
}

impl Loop for Rows<'_> {
    #[inline(always)]
    fn run(self) {
        let size = self.norm.weight.len();
        for row in self.rows.chunks_exact_mut(size) {
            let mean = dot(row, row) / size as f32;
            let factor = 1.0 / (mean + self.norm.eps).sqrt();
            for (x, &w) in row.iter_mut().zip(&self.norm.weight) {
                *x = *x * factor * w;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_their_weighted_root_mean_square() {
        let norm = RmsNorm::new(vec![1.0, 2.0, 0.5, 1.0], 0.0);
        let mut rows = vec![2.0, 2.0, 2.0, 2.0, 1.0, 7.0, 5.0, 5.0];
        norm.apply(&mut rows);
        assert_eq!(rows, [1.0, 2.0, 0.5, 1.0, 0.2, 2.8, 0.5, 1.0]);
    }
}
