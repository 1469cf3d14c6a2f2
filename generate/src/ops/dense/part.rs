//! Products with some rows of a weight, on the caller's thread: one head of latent attention.

use std::ops::Range;

use marlinspike::w4a8::wide::{Loop, wide};

use super::{Bf16, Dense, F16, Product, Values, Weight};

impl Dense<'_> {
    /// `out` `[M, rows]` of `x` `[M, K]` times the weight's `rows`, each sum as in
    /// [`Dense::forward`], without the bias. Panics if a length does not fit.
    pub fn forward_part(&self, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
        let range = rows.start * self.size_k..rows.end * self.size_k;
        match &self.values {
            Values::Bf16(v) => self.part::<Bf16>(bytemuck::cast_slice(&v[range]), x, out),
            Values::F16(v) => self.part::<F16>(bytemuck::cast_slice(&v[range]), x, out),
            Values::F32(v) => self.part::<f32>(&v[range], x, out),
        }
    }

    fn part<W: Weight>(&self, columns: &[W], x: &[f32], out: &mut [f32]) {
        let (size_k, size_m) = (self.size_k, x.len() / self.size_k);
        if size_m == 1 {
            return wide(Product { columns, x, size_k, out });
        }
        let mut transposed = vec![0.0; out.len()];
        wide(Product { columns, x, size_k, out: &mut transposed });
        for (n, column) in transposed.chunks_exact(size_m).enumerate() {
            for (m, &y) in column.iter().enumerate() {
                out[m * (columns.len() / size_k) + n] = y;
            }
        }
    }

    /// `out` `[M, K]` of `x` `[M, rows]` times the weight's `rows`, not transposed: Σ xᵢ · rowᵢ, added
    /// from the first row on by fused multiply-adds. Panics if a length does not fit.
    pub fn combine_part(&self, rows: Range<usize>, x: &[f32], out: &mut [f32]) {
        let range = rows.start * self.size_k..rows.end * self.size_k;
        let size_k = self.size_k;
        match &self.values {
            Values::Bf16(v) => {
                wide(Combine::<Bf16> { rows: bytemuck::cast_slice(&v[range]), size_k, x, out })
            }
            Values::F16(v) => {
                wide(Combine::<F16> { rows: bytemuck::cast_slice(&v[range]), size_k, x, out });
            }
            Values::F32(v) => wide(Combine { rows: &v[range], size_k, x, out }),
        }
    }
}

/// `out` `[M, K]` = `x` `[M, rows]` · `rows` `[rows, K]`.
struct Combine<'a, W> {
    rows: &'a [W],
    size_k: usize,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl<W: Weight> Loop for Combine<'_, W> {
    #[inline(always)]
    fn run(self) {
        let Self { rows, size_k, x, out } = self;
        let count = rows.len() / size_k;
        out.fill(0.0);
        for (i, row) in rows.chunks_exact(size_k).enumerate() {
            for (m, out) in out.chunks_exact_mut(size_k).enumerate() {
                let factor = x[m * count + i];
                for (y, &w) in out.iter_mut().zip(row) {
                    *y = factor.mul_add(w.widen(), *y);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use marlinspike::num::tensor::{DType, Tensor};

    use super::*;

    #[test]
    fn parts_are_products_with_these_rows_alone() {
        let (n, k, rows) = (7, 19, 2..6);
        let value = |i: usize| ((i * 2_654_435_761) % 1021) as f32 / 256.0 - 2.0;
        let weight: Vec<f32> = (0..n * k).map(value).collect();
        let tensor = Tensor::from_vec("w", DType::F32, vec![n, k], weight.clone()).unwrap();
        let dense = Dense::new(tensor, n, k).unwrap();
        for m in [1, 2, 5] {
            let x: Vec<f32> = (0..m * k).map(|i| value(i + 9)).collect();
            let mut whole = vec![0.0; m * n];
            dense.forward(&x, &mut whole);
            let mut part = vec![0.0; m * rows.len()];
            dense.forward_part(rows.clone(), &x, &mut part);
            for (row, part) in whole.chunks(n).zip(part.chunks(rows.len())) {
                assert_eq!(row[rows.clone()], *part);
            }
            let y: Vec<f32> = (0..m * rows.len()).map(|i| value(i + 77)).collect();
            let mut combined = vec![0.0; m * k];
            dense.combine_part(rows.clone(), &y, &mut combined);
            for (i, found) in combined.iter().enumerate() {
                let (row, j) = (i / k, i % k);
                let term = |r: usize| {
                    f64::from(y[row * rows.len() + r]) * f64::from(weight[(rows.start + r) * k + j])
                };
                let exact: f64 = (0..rows.len()).map(term).sum();
                assert!((f64::from(*found) - exact).abs() < 1e-5, "{m} {i}");
            }
        }
    }
}
