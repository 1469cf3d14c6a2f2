//! Products with matrices that are not quantized.

use std::ops::Range;

use marlinspike::formats::float_type;
use marlinspike::ndarray::Array2;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use marlinspike::products::Wide;
use marlinspike::{Error, Result};

/// A sum of products.
pub(crate) type Dot = fn(&[f32], &[f32]) -> f64;

/// The sum in f64, with the rounding errors added up: exact but for about 2⁻¹⁰⁰ of the sum of the
/// magnitudes. A product of two f32 is exact in f64.
pub(crate) fn compensated(x: &[f32], w: &[f32]) -> f64 {
    let (mut sum, mut rest) = (0.0f64, 0.0f64);
    for (x, w) in x.iter().zip(w) {
        let term = f64::from(*x) * f64::from(*w);
        let next = sum + term;
        let part = next - sum;
        rest += (sum - (next - part)) + (term - part);
        sum = next;
    }
    if sum.is_finite() { sum + rest } else { sum }
}

/// The exact sum, rounded once to f64.
pub(crate) fn exact(x: &[f32], w: &[f32]) -> f64 {
    let mut sum = Wide::new();
    for (x, w) in x.iter().zip(w) {
        sum.add_product(f64::from(*x), f64::from(*w));
    }
    sum.to_f64()
}

/// `value` rounded to `ty`, as f32.
pub(crate) fn round(ty: ScalarType, value: f64) -> f32 {
    match ty {
        ScalarType::FLOAT32 => value as f32,
        _ => ty.to_f64(ty.encode_rne(value)) as f32,
    }
}

/// The numbers of a tensor of 16- or 32-bit floats.
///
/// # Errors
/// [`Error::Dtype`] for another type, [`Error::Value`] for a number that is not finite.
pub(crate) fn values(tensor: &Tensor<'_>) -> Result<Vec<f32>> {
    let Some(ty) = float_type(tensor.dtype()).filter(|ty| ty.storage_bits() >= 16) else {
        return Err(Error::dtype(tensor.name(), tensor.dtype(), "F32, F16 or BF16"));
    };
    let values: Vec<f32> = match ty.storage_bits() {
        32 => tensor.elements::<f32>().into_owned(),
        _ => tensor.elements::<u16>().iter().map(|&b| ty.to_f64(b.into()) as f32).collect(),
    };
    match values.iter().position(|v| !v.is_finite()) {
        Some(i) => Err(Error::value(tensor.name(), &[i], values[i], "a finite number")),
        None => Ok(values),
    }
}

/// The features of a shared expert that a rank has, of `[rank, ranks]`.
fn of_rank(size: usize, [rank, ranks]: [usize; 2]) -> Result<Range<usize>> {
    if ranks == 0 || rank >= ranks || !size.is_multiple_of(ranks) || size < ranks {
        let expected = format!("a multiple of {ranks} ranks");
        return Err(Error::size("features of the shared expert", size, expected));
    }
    let own = size / ranks;
    Ok(rank * own..(rank + 1) * own)
}

/// A matrix `[N, K]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Dense {
    pub(crate) values: Vec<f32>,
    pub(crate) size_k: usize,
}

impl Dense {
    /// The matrix `[N, size_k]` with zeros in the columns from its own K on.
    pub(crate) fn padded(&self, size_k: usize) -> Self {
        let row = |row: &[f32]| {
            let mut row = row.to_vec();
            row.resize(size_k, 0.0);
            row
        };
        Self { values: self.values.chunks_exact(self.size_k).flat_map(row).collect(), size_k }
    }

    /// `count` matrices, one below the other.
    pub(crate) fn parts(self, count: usize) -> Vec<Self> {
        let each = self.values.len() / count;
        let part = |values: &[f32]| Self { values: values.to_vec(), size_k: self.size_k };
        self.values.chunks_exact(each).map(part).collect()
    }

    /// The matrix of a tensor `[N, K]`.
    ///
    /// # Errors
    /// As [`values`]; [`Error::Shape`] unless K is `size_k`.
    pub(crate) fn new(tensor: &Tensor<'_>, size_k: usize) -> Result<Self> {
        match *tensor.shape() {
            [n, k] if n > 0 && k == size_k && k > 0 => {}
            ref shape => {
                return Err(Error::shape(tensor.name(), shape, format!("[N, {size_k}]")));
            }
        }
        Ok(Self { values: values(tensor)?, size_k })
    }

    /// The part of a rank, of `[rank, ranks]`: its rows of each of `parts` matrices that lie one below
    /// the other.
    ///
    /// # Errors
    /// [`Error::Size`] if the ranks do not divide the rows.
    pub(crate) fn rows_of_rank(&self, parts: usize, ranks: [usize; 2]) -> Result<Self> {
        let own = of_rank(self.size_n() / parts, ranks)?;
        let rows = self.values.chunks_exact(self.values.len() / parts);
        let part = |part: &[f32]| part[own.start * self.size_k..own.end * self.size_k].to_vec();
        Ok(Self { values: rows.flat_map(part).collect(), size_k: self.size_k })
    }

    /// The part of a rank, of `[rank, ranks]`: its columns.
    ///
    /// # Errors
    /// [`Error::Size`] if the ranks do not divide the columns.
    pub(crate) fn columns_of_rank(&self, ranks: [usize; 2]) -> Result<Self> {
        let own = of_rank(self.size_k, ranks)?;
        let rows = self.values.chunks_exact(self.size_k);
        let values = rows.flat_map(|row| row[own.clone()].iter().copied()).collect();
        Ok(Self { values, size_k: own.len() })
    }

    /// N.
    pub(crate) fn size_n(&self) -> usize {
        self.values.len() / self.size_k
    }

    /// x · Wᵀ for one row x, each sum rounded to `ty`.
    pub(crate) fn row(&self, x: &[f32], ty: ScalarType, dot: Dot) -> Vec<f32> {
        self.values.chunks_exact(self.size_k).map(|w| round(ty, dot(x, w))).collect()
    }
}

/// The matrix in f64.
pub(crate) fn matrix(dense: &Dense) -> Array2<f64> {
    Array2::from_shape_fn((dense.size_n(), dense.size_k), |(n, k)| {
        dense.values[n * dense.size_k + k].into()
    })
}
