//! RMSNorm.

use marlinspike::w4a8::wide::{Loop, wide};
use rayon::prelude::*;

use super::{add_piece, dot, item_rows, resize};

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

    /// `out` holds the normalized rows `x`, on rayon's current pool.
    pub fn of(&self, x: &[f32], out: &mut Vec<f32>) {
        resize(out, x.len());
        let rows = item_rows(self.size()) * self.size();
        x.par_chunks(rows).zip(out.par_chunks_mut(rows)).for_each(|(x, out)| {
            out.copy_from_slice(x);
            self.apply(out);
        });
    }

    /// [`RmsNorm::of`] `x` + `y`, which becomes `x`.
    pub fn of_sum(&self, x: &mut [f32], y: &[f32], out: &mut Vec<f32>) {
        resize(out, x.len());
        let rows = item_rows(self.size()) * self.size();
        let items = x.par_chunks_mut(rows).zip(y.par_chunks(rows)).zip(out.par_chunks_mut(rows));
        items.for_each(|((x, y), out)| {
            add_piece(x, y);
            out.copy_from_slice(x);
            self.apply(out);
        });
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

    #[test]
    fn rows_of_many_items_are_those_of_one_call() {
        let (size, rows) = (96, 500);
        let value = |i: usize| ((i * 7919) % 1009) as f32 / 97.0 - 5.0;
        let norm = RmsNorm::new((0..size).map(value).collect(), 1e-6);
        let (x, y): (Vec<f32>, Vec<f32>) =
            (0..size * rows).map(|i| (value(i), value(i + 5))).unzip();
        let mut expected = x.clone();
        norm.apply(&mut expected);
        let mut out = vec![7.0; 3];
        norm.of(&x, &mut out);
        assert_eq!(out, expected);
        let sum: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        let (mut in_place, mut expected) = (x, sum.clone());
        norm.apply(&mut expected);
        norm.of_sum(&mut in_place, &y, &mut out);
        assert_eq!((in_place, out), (sum, expected));
    }
}
