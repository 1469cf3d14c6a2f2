//! The value of a code.

use ndarray::Array2;

use super::Weight;
use crate::num::scalar::ScalarType;

impl Weight<'_> {
    /// The value of row `k`, column `n`: (q − z) · s, times NVFP4's global scale.
    ///
    /// q is the code's value in its type (`uint4b8`: code − 8, `float4_e2m1f`: the float), z the zero
    /// point of the row's group and column (0 without zero points), s its scale. q − z and the
    /// product with s are exact: 9 bits times at most 24. A global scale adds 24 bits, which is
    /// exact with e4m3 scales. Only with 32-bit scales would the last product round, to f64's 53
    /// bits.
    ///
    /// # Panics
    /// If `k` or `n` is outside the matrix.
    pub fn dequantize(&self, k: usize, n: usize) -> f64 {
        let group = self.groups.group_of(k);
        let q = self.ty.to_f64(u32::from(self.codes.get(k, n)));
        let zero = self.zeros.as_ref().map_or(0.0, |z| f64::from(z.bits(group, n)));
        let product = (q - zero) * self.scales.value(group, n);
        match self.global_scale {
            Some(global) => product * f64::from(global),
            None => product,
        }
    }

    /// The whole matrix `[size_k, size_n]`.
    pub fn dequantize_all(&self) -> Array2<f64> {
        let shape = self.shape();
        // A table of all codes, at most 256, replaces decoding each of them.
        let values: Vec<f64> = (0..1 << self.codes.bits()).map(|c| self.ty.to_f64(c)).collect();
        let mut out = Vec::with_capacity(shape.len());
        for k in 0..shape.size_k {
            let group = self.groups.group_of(k);
            for n in 0..shape.size_n {
                let q = values[usize::from(self.codes.get(k, n))];
                let zero = self.zeros.as_ref().map_or(0.0, |z| f64::from(z.bits(group, n)));
                let product = (q - zero) * self.scales.value(group, n);
                out.push(self.global_scale.map_or(product, |g| product * f64::from(g)));
            }
        }
        Array2::from_shape_vec((shape.size_k, shape.size_n), out).expect("every element")
    }

    /// Whether codes of this type need a zero point of their own for each group.
    pub fn needs_zeros(&self) -> bool {
        matches!(self.ty, ScalarType::UINT4 | ScalarType::UINT8)
    }
}
