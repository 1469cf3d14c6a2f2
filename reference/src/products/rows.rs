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
    scales: Option<GroupScales>,
}

/// The scales of [`Rows::scaled`].
#[derive(Debug, Clone)]
struct GroupScales {
    /// k of a group.
    group: usize,
    /// `[rows, size_k / group]`; none if the k were reordered.
    values: Option<Vec<f32>>,
    largest: f32,
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
        Ok(Self { size_k, values, ranges, scales: None })
    }

    /// Codes times the scales `[rows, size_k / group]` of their groups of k, of a product whose unit
    /// sums codes and whose kernel multiplies the sum of each group by its scales.
    ///
    /// # Errors
    /// Returns an error unless the groups fill the rows and there is a positive scale for each.
    pub fn scaled(mut self, group: usize, scales: &[f32]) -> Result<Self> {
        if group == 0 || !self.size_k.is_multiple_of(group) {
            let expected = format!("a divisor of size_k {}", self.size_k);
            return Err(Error::size("group of the activations", group, expected));
        }
        let per = self.size_k / group;
        if scales.len() != self.rows() * per {
            let expected = format!("[{}, {per}]", self.rows());
            return Err(Error::shape("scales of the activations", &[scales.len()], expected));
        }
        // A NaN scale makes its products NaN.
        if let Some(i) = scales.iter().position(|s| *s <= 0.0 || s.is_infinite()) {
            let at = [i / per, i % per];
            return Err(Error::value(
                "scales of the activations",
                &at,
                scales[i],
                "above 0, finite",
            ));
        }
        for (values, &scale) in self.values.chunks_exact_mut(group).zip(scales) {
            // At most 11 bits by 24: exact.
            values.iter_mut().for_each(|x| *x *= f64::from(scale));
        }
        let ranges = self.values.chunks_exact(self.size_k);
        self.ranges = ranges.map(|row| Range::of(row.iter().copied())).collect();
        let largest = scales.iter().copied().fold(0.0, f32::max);
        self.scales = Some(GroupScales { group, values: Some(scales.to_vec()), largest });
        Ok(self)
    }

    /// The largest scale of [`Rows::scaled`]; `None` for rows without scales of groups.
    pub(in crate::products) fn largest_scale(&self) -> Option<f32> {
        self.scales.as_ref().map(|s| s.largest)
    }

    /// k of the groups of [`Rows::scaled`] whose scales are known.
    pub(in crate::products) fn scaled_group(&self) -> Option<usize> {
        self.scales.as_ref().filter(|s| s.values.is_some()).map(|s| s.group)
    }

    /// The scale of row `m` at `k`; 1 without scales.
    pub(in crate::products) fn scale(&self, m: usize, k: usize) -> f64 {
        let scale = self.scales.as_ref().and_then(|s| {
            let values = s.values.as_ref()?;
            values.get(m * (self.size_k / s.group) + k / s.group)
        });
        scale.map_or(1.0, |s| f64::from(*s))
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
        let scales = self.scales.clone().map(|s| GroupScales { values: None, ..s });
        Ok(Self { size_k: self.size_k, values, ranges: self.ranges.clone(), scales })
    }

    /// The rows `which`, in that order; `None` if one does not exist.
    pub fn select(&self, which: &[usize]) -> Option<Self> {
        let of_row = |s: &GroupScales, i: usize| -> Option<Vec<f32>> {
            let per = self.size_k / s.group;
            Some(s.values.as_ref()?.get(i * per..(i + 1) * per)?.to_vec())
        };
        let scales = self.scales.as_ref().map(|s| {
            let values: Option<Vec<Vec<f32>>> = which.iter().map(|&i| of_row(s, i)).collect();
            GroupScales { values: values.map(|v| v.concat()), ..s.clone() }
        });
        let mut values = Vec::with_capacity(which.len() * self.size_k);
        let mut ranges = Vec::with_capacity(which.len());
        for &i in which {
            ranges.push(*self.ranges.get(i)?);
            values.extend_from_slice(self.row(i));
        }
        Some(Self { size_k: self.size_k, values, ranges, scales })
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
