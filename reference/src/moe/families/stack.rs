//! Stacks of the matrices of a block's experts.

use crate::num::tensor::{DType, Tensor};
use crate::{Error, Result};

/// A stack of matrices `[experts, n, k]` of one element type.
pub(super) struct Stack {
    pub(super) dtype: DType,
    pub(super) shape: [usize; 3],
    pub(super) bytes: Vec<u8>,
}

impl Stack {
    pub(super) fn of(tensor: &Tensor<'_>) -> Result<Self> {
        let dtype = tensor.dtype();
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::dtype(tensor.name(), dtype, "F32, F16 or BF16"));
        }
        let shape = match *tensor.shape() {
            [n, k] => [1, n, k],
            [experts, n, k] => [experts, n, k],
            ref other => return Err(Error::shape(tensor.name(), other, "two or three dimensions")),
        };
        Ok(Self { dtype, shape, bytes: tensor.bytes().to_vec() })
    }

    /// This stack's experts, then the other's.
    pub(super) fn then(mut self, name: &str, other: Self) -> Result<Self> {
        if (self.dtype, self.shape[1..].to_vec()) != (other.dtype, other.shape[1..].to_vec()) {
            let rule = format!("{} of {:?}, as the experts before", self.dtype, &self.shape[1..]);
            return Err(Error::shape(name, &other.shape[1..], rule));
        }
        self.shape[0] += other.shape[0];
        self.bytes.extend(other.bytes);
        Ok(self)
    }

    /// Rows of each expert, then the other's rows of that expert.
    pub(super) fn above(self, name: &str, other: &Self) -> Result<Self> {
        let [experts, n, k] = self.shape;
        if (self.dtype, experts, k) != (other.dtype, other.shape[0], other.shape[2]) {
            let rule = format!("{} of [{experts}, N, {k}], as the gate", self.dtype);
            return Err(Error::shape(name, &other.shape, rule));
        }
        let (own, more) = (n * k * self.dtype.bytes(), other.shape[1] * k * self.dtype.bytes());
        let mut bytes = Vec::with_capacity(self.bytes.len() + other.bytes.len());
        for e in 0..experts {
            bytes.extend(&self.bytes[e * own..(e + 1) * own]);
            bytes.extend(&other.bytes[e * more..(e + 1) * more]);
        }
        Ok(Self { dtype: self.dtype, shape: [experts, n + other.shape[1], k], bytes })
    }

    pub(super) fn transposed(self) -> Self {
        let ([experts, n, k], width) = (self.shape, self.dtype.bytes());
        let mut bytes = Vec::with_capacity(self.bytes.len());
        for e in 0..experts {
            for column in 0..k {
                for row in 0..n {
                    let at = ((e * n + row) * k + column) * width;
                    bytes.extend(&self.bytes[at..at + width]);
                }
            }
        }
        Self { dtype: self.dtype, shape: [experts, k, n], bytes }
    }

    /// Rows of one matrix as the rows of `experts` matrices.
    pub(super) fn split(self, name: &str, experts: usize) -> Result<Self> {
        let [one, rows, k] = self.shape;
        if one != 1 || experts == 0 || !rows.is_multiple_of(experts) {
            let rule = format!("[{experts} · I, H]");
            return Err(Error::shape(name, &self.shape[1..], rule));
        }
        Ok(Self { shape: [experts, rows / experts, k], ..self })
    }

    pub(super) fn tensor(self, name: &str) -> Result<Tensor<'static>> {
        Tensor::new(name, self.dtype, self.shape.to_vec(), self.bytes)
    }

    /// With rows of zeros below each of the `parts` of an expert, `n` rows in all.
    pub(super) fn rows_to(self, parts: usize, n: usize) -> Self {
        let [experts, own, k] = self.shape;
        let (row, per) = (k * self.dtype.bytes(), own / parts);
        let mut bytes = vec![0; experts * n * row];
        for (part, values) in self.bytes.chunks_exact((per * row).max(1)).enumerate() {
            let at = part * (n / parts) * row;
            bytes[at..at + values.len()].copy_from_slice(values);
        }
        Self { dtype: self.dtype, shape: [experts, n, k], bytes }
    }

    /// With columns of zeros after its own, `k` columns in all.
    pub(super) fn columns_to(self, k: usize) -> Self {
        let [experts, n, own] = self.shape;
        let width = self.dtype.bytes();
        let mut bytes = vec![0; experts * n * k * width];
        for (row, values) in self.bytes.chunks_exact((own * width).max(1)).enumerate() {
            let at = row * k * width;
            bytes[at..at + values.len()].copy_from_slice(values);
        }
        Self { dtype: self.dtype, shape: [experts, n, k], bytes }
    }

    /// Rows that alternate between two parts as the rows of one part, then of the other.
    pub(super) fn in_halves(self) -> Self {
        let [_, n, k] = self.shape;
        let row = k * self.dtype.bytes();
        let mut bytes = Vec::with_capacity(self.bytes.len());
        for expert in self.bytes.chunks_exact(n * row) {
            for half in 0..2 {
                expert.chunks_exact(row).skip(half).step_by(2).for_each(|r| bytes.extend(r));
            }
        }
        Self { bytes, ..self }
    }

    /// All matrices one below the other.
    pub(super) fn flat(self, name: &str) -> Result<Tensor<'static>> {
        let [experts, n, k] = self.shape;
        Tensor::new(name, self.dtype, vec![experts * n, k], self.bytes)
    }
}
