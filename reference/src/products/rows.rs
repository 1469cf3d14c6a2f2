//! Activations as exact numbers.

use crate::num::scalar::ScalarType;
use crate::{Error, Result};

/// The range of the bits of a row of activations or a column of weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range {
    /// All numbers are multiples of 2^low ...
    pub low: i32,
    /// ... and below 2^high in magnitude. `low >= high` when all are zero.
    pub high: i32,
    /// Whether an infinity or a NaN is among them.
    pub special: bool,
}

impl Range {
    /// The range of no values.
    pub const EMPTY: Self = Self { low: i32::MAX / 4, high: i32::MIN / 4, special: false };

    /// The range with one more value.
    #[inline]
    pub fn with(self, x: f64) -> Self {
        let bits = x.to_bits();
        let field = (bits >> 52) as i32 & 0x7ff;
        if field == 0 {
            // There are no f64 subnormals, so this is a zero.
            return self;
        }
        if field == 0x7ff {
            return Self { special: true, ..self };
        }
        let zeros = (bits | 1 << 52).trailing_zeros() as i32;
        Self {
            low: self.low.min(field - 1075 + zeros),
            high: self.high.max(field - 1022),
            special: self.special,
        }
    }

    /// The range of `values`.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        values.into_iter().fold(Self::EMPTY, Self::with)
    }

    /// Number of bits between the ends; 0 if all values are zero.
    pub fn bits(self) -> i32 {
        (self.high - self.low).max(0)
    }

    /// An upper bound of the magnitudes, 0 when all are zero.
    pub fn magnitude(self) -> f64 {
        if self.high <= self.low { 0.0 } else { two_to(self.high) }
    }
}

/// 2^e.
pub(in crate::products) fn two_to(e: i32) -> f64 {
    match e {
        -1022..=1023 => f64::from_bits(((e + 1023) as u64) << 52),
        _ => f64::from(e).exp2(),
    }
}

/// Rows `[rows, size_k]` of exact numbers: decoded activations.
#[derive(Debug, Clone)]
pub struct Rows {
    size_k: usize,
    values: Vec<f64>,
    ranges: Vec<Range>,
}

impl Rows {
    /// Wraps values `[rows, size_k]`, which must not be f64 subnormals.
    ///
    /// # Errors
    /// Returns an error unless they fill whole rows.
    pub fn new(size_k: usize, values: Vec<f64>) -> Result<Self> {
        if size_k == 0 || !values.len().is_multiple_of(size_k) {
            return Err(Error::size("activations", values.len(), format!("rows of {size_k}")));
        }
        let ranges =
            values.chunks_exact(size_k).map(|row| Range::of(row.iter().copied())).collect();
        Ok(Self { size_k, values, ranges })
    }

    /// Decodes the bits of scalars of type `ty`.
    ///
    /// # Errors
    /// Returns an error unless they fill whole rows.
    pub fn decode(ty: ScalarType, size_k: usize, bits: impl Iterator<Item = u32>) -> Result<Self> {
        Self::new(size_k, bits.map(|b| ty.to_f64(b)).collect())
    }

    /// The same rows with their k in the order `perm` (act-order's gather): k takes `perm[k]`.
    ///
    /// # Errors
    /// Returns an error unless `perm` has one entry per k.
    pub fn gather(&self, perm: &[u32]) -> Result<Self> {
        if perm.len() != self.size_k {
            return Err(Error::shape("perm", &[perm.len()], format!("[{}]", self.size_k)));
        }
        if let Some(k) = perm.iter().position(|&p| p as usize >= self.size_k) {
            let limit = format!("a row below {}", self.size_k);
            return Err(Error::value("perm", &[k], perm[k], limit));
        }
        let rows = self.values.chunks_exact(self.size_k);
        let values = rows.flat_map(|row| perm.iter().map(|&p| row[p as usize])).collect();
        Ok(Self { size_k: self.size_k, values, ranges: self.ranges.clone() })
    }

    /// The rows `which`, in that order; `None` if one does not exist.
    pub fn select(&self, which: &[usize]) -> Option<Self> {
        let mut values = Vec::with_capacity(which.len() * self.size_k);
        let mut ranges = Vec::with_capacity(which.len());
        for &i in which {
            ranges.push(*self.ranges.get(i)?);
            values.extend_from_slice(self.row(i));
        }
        Some(Self { size_k: self.size_k, values, ranges })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.ranges.len()
    }

    /// Numbers per row.
    pub fn size_k(&self) -> usize {
        self.size_k
    }

    /// Row `i`.
    pub fn row(&self, i: usize) -> &[f64] {
        &self.values[i * self.size_k..][..self.size_k]
    }

    /// The range of row `i`.
    pub fn range(&self, i: usize) -> Range {
        self.ranges[i]
    }
}
