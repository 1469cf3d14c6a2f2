//! Products with MXFP4 weights: f32 activations times e2m1 codes with a power of two for each 32.

use std::cell::RefCell;

use marlinspike::num::scalar::{e2m1_to_f32, e8m0_to_f32};
use marlinspike::w4a8::wide::{Loop, wide};
use rayon::prelude::*;

use crate::ops::dense::product;

/// Values along K that share a scale.
pub(super) const BLOCK: usize = 32;

/// Rows of the weight that a work item expands at a time.
const COLUMNS: usize = 8;

thread_local! {
    /// Expanded rows, in memory that all products of a thread reuse.
    static EXPANDED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// One weight `[N, K]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrix<'a> {
    /// `[N, K / 2]`: value 2i in the low half of byte i.
    pub(super) codes: &'a [u8],
    /// e8m0, `[N, K / 32]`.
    pub(super) scales: &'a [u8],
    /// `[N]`.
    pub(super) bias: &'a [f32],
    /// K, a multiple of [`BLOCK`].
    pub(super) size_k: usize,
}

impl Matrix<'_> {
    /// `out` `[M, N]` = `x` `[M, K]` · Wᵀ + bias, on rayon's current pool: the bits of
    /// [`Dense::forward`](super::dense::Dense::forward) with the expanded weight. Panics if a length
    /// does not fit.
    pub(super) fn forward(&self, x: &[f32], out: &mut [f32]) {
        let (size_k, size_n) = (self.size_k, self.bias.len());
        let size_m = x.len() / size_k;
        assert_eq!((x.len(), out.len()), (size_m * size_k, size_m * size_n), "M");
        let mut transposed = vec![0.0f32; out.len()];
        let codes = self.codes.par_chunks(COLUMNS * size_k / 2);
        let scales = self.scales.par_chunks(COLUMNS * size_k / BLOCK);
        let items = codes.zip(scales).zip(transposed.par_chunks_mut(COLUMNS * size_m));
        items.for_each(|((codes, scales), out)| {
            EXPANDED.with_borrow_mut(|values| {
                values.resize(codes.len() * 2, 0.0);
                wide(Expand { codes, scales, values });
                product(values, x, size_k, out);
            });
        });
        out.par_chunks_exact_mut(size_n).enumerate().for_each(|(m, row)| {
            let columns = transposed.chunks_exact(size_m).zip(self.bias);
            for (y, (column, bias)) in row.iter_mut().zip(columns) {
                *y = column[m] + bias;
            }
        });
    }
}

/// Whole rows to f32.
struct Expand<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    values: &'a mut [f32],
}

impl Loop for Expand<'_> {
    #[inline(always)]
    fn run(self) {
        let mut table = [0.0f32; 16];
        for (code, value) in table.iter_mut().enumerate() {
            *value = e2m1_to_f32(code as u8);
        }
        let blocks = self.codes.chunks_exact(BLOCK / 2).zip(self.scales);
        for ((codes, &scale), values) in blocks.zip(self.values.chunks_exact_mut(BLOCK)) {
            let scale = e8m0_to_f32(scale);
            for (byte, pair) in codes.iter().zip(values.chunks_exact_mut(2)) {
                pair[0] = table[usize::from(byte & 15)] * scale;
                pair[1] = table[usize::from(byte >> 4)] * scale;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::dot;

    /// e2m1 by its fields: 1 sign, 2 exponent (bias 1), 1 mantissa.
    fn e2m1(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 1 & 3), f64::from(code & 1));
        let magnitude = match exponent {
            0 => mantissa * 0.5,
            e => (1.0 + mantissa * 0.5) * 2f64.powi(e - 1),
        };
        if code & 8 == 0 { magnitude } else { -magnitude }
    }

    #[test]
    fn products_are_those_of_the_expanded_weight() {
        for (size_m, size_n, size_k) in [(1, 1, 32), (1, 19, 96), (5, 9, 64), (9, 24, 32)] {
            let byte = |i: usize| ((i * 2_654_435_761) >> 7) as u8;
            let codes: Vec<u8> = (0..size_n * size_k / 2).map(byte).collect();
            let scales: Vec<u8> =
                (0..size_n * size_k / 32).map(|i| 120 + byte(i + 3) % 12).collect();
            let bias: Vec<f32> = (0..size_n).map(|n| n as f32 - 2.5).collect();
            let x: Vec<f32> = (0..size_m * size_k).map(|i| f32::from(byte(i)) - 99.5).collect();
            let value = |n: usize, k: usize| {
                let at = n * size_k + k;
                let code = codes[at / 2] >> (4 * (at % 2)) & 15;
                (e2m1(code) * 2f64.powi(i32::from(scales[at / 32]) - 127)) as f32
            };
            let mut out = vec![0.0; size_m * size_n];
            let matrix = Matrix { codes: &codes, scales: &scales, bias: &bias, size_k };
            matrix.forward(&x, &mut out);
            for (i, y) in out.iter().enumerate() {
                let (m, n) = (i / size_n, i % size_n);
                let row: Vec<f32> = (0..size_k).map(|k| value(n, k)).collect();
                let expected = dot(&x[m * size_k..][..size_k], &row) + bias[n];
                assert_eq!(y.to_bits(), expected.to_bits(), "{size_m} {size_n} {size_k}: {m} {n}");
            }
        }
    }
}
