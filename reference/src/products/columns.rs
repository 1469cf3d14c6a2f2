//! Decodes weights to exact values, a few columns at a time.

use crate::num::scalar::{self, ScalarType};
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

/// Number of columns that are decoded and multiplied together.
pub const TILE: usize = 8;

/// A source of weight columns.
pub trait Columns: Sync {
    /// Rows of the matrix.
    fn size_k(&self) -> usize;
    /// Columns of the matrix.
    fn size_n(&self) -> usize;
    /// Writes columns `n0..n0 + TILE` to `out`, `[size_k, TILE]`; zeros past the last column.
    fn tile(&self, n0: usize, out: &mut [[f64; TILE]]);
}

/// The value of a code in the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rule {
    /// (q − z) · s, exactly.
    Exact,
    /// (q − z) · s rounded to this type (float16 or bfloat16), to nearest even: the operand of
    /// kernels of the Marlin family.
    Rounded(ScalarType),
    /// q − z; the scale, one per column, multiplies the sum.
    Unscaled,
}

/// A [`Weight`] as columns under a [`Rule`]. The caller applies global scale and bias.
pub struct WeightColumns<'w> {
    weight: &'w Weight<'w>,
    rule: Rule,
    /// Value of each code without zero point, times the recipe's power of two.
    meanings: Vec<f64>,
    /// The scales `[groups, size_n]`.
    scales: Vec<f64>,
    /// Row of the product → row of the matrix; `None` keeps the stored order.
    order: Option<&'w [u32]>,
    /// Group of each row of the product.
    groups: Vec<u32>,
}

impl<'w> WeightColumns<'w> {
    /// Columns of `weight` with rows in the order `order` (act-order's sort), or as stored.
    ///
    /// # Errors
    /// Returns an error for an inconsistent weight, or if `order` is not a list of its rows.
    pub fn new(weight: &'w Weight<'w>, rule: Rule, order: Option<&'w [u32]>) -> Result<Self> {
        weight.validate()?;
        let size_k = weight.shape().size_k;
        let row = |k: usize| order.map_or(k, |o| o[k] as usize);
        if let Some(order) = order
            && (order.len() != size_k || order.iter().any(|&k| k as usize >= size_k))
        {
            let found = format!("{} places", order.len());
            return Err(Error::size("row order", found, format!("a permutation of {size_k} rows")));
        }
        let groups = match &weight.groups {
            Groups::Uniform(_) if weight.scales.rows() == 1 => vec![0; size_k],
            groups => (0..size_k).map(|k| groups.group_of(row(k)) as u32).collect(),
        };
        Ok(Self {
            rule,
            meanings: (0..1 << weight.codes.bits()).map(|c| weight.ty.to_f64(c)).collect(),
            scales: weight.scales.iter_bits().map(|b| weight.scales.ty().to_f64(b)).collect(),
            order,
            groups,
            weight,
        })
    }

    /// The same columns with e4m3's NaN codes read as ±480: kernels that move the bits of an 8-bit
    /// float into a wider float read NaN codes as a number.
    pub fn moving_bits(mut self) -> Self {
        if self.weight.ty == ScalarType::FLOAT8_E4M3FN {
            let of = 480.0 * self.meanings[0x38];
            (self.meanings[0x7f], self.meanings[0xff]) = (of, -of);
        }
        self
    }

    /// The same columns times 2^power, for columns that are not rounded to another type.
    pub fn times_power(mut self, power: i32) -> Self {
        let factor = f64::from(power).exp2();
        let values =
            if self.rule == Rule::Unscaled { &mut self.meanings } else { &mut self.scales };
        values.iter_mut().for_each(|x| *x *= factor);
        self
    }

    /// The group of each row of the product.
    pub(super) fn groups(&self) -> &[u32] {
        &self.groups
    }

    /// The same columns with other groups for the rows of the product, as a wrong kernel may read
    /// them. Groups must be below the number of scale rows.
    ///
    /// # Errors
    /// Returns an error unless there is one group per row and each is below the number of scale
    /// rows.
    pub fn with_groups(self, groups: Vec<u32>) -> Result<Self> {
        let rows = self.weight.scales.rows();
        if groups.len() != self.groups.len() || groups.iter().any(|&g| g as usize >= rows) {
            let expected = format!("{} groups below {rows}", self.groups.len());
            return Err(Error::size("groups", groups.len(), expected));
        }
        Ok(Self { groups, ..self })
    }
}

impl Columns for WeightColumns<'_> {
    fn size_k(&self) -> usize {
        self.weight.shape().size_k
    }

    fn size_n(&self) -> usize {
        self.weight.shape().size_n
    }

    fn tile(&self, n0: usize, out: &mut [[f64; TILE]]) {
        match self.rule {
            Rule::Unscaled => self.fill(n0, out, |q, _| q),
            Rule::Exact => self.fill(n0, out, |q, scale| q * scale),
            Rule::Rounded(ScalarType::FLOAT16) => {
                self.fill(n0, out, |q, scale| round_f16(q * scale));
            }
            Rule::Rounded(_) => self.fill(n0, out, |q, scale| round_bf16(q * scale)),
        }
    }
}

impl WeightColumns<'_> {
    /// Fills a tile; `value` has q − z and the scale.
    #[inline]
    fn fill(&self, n0: usize, out: &mut [[f64; TILE]], value: impl Fn(f64, f64) -> f64) {
        let mut lanes = [Lane::default(); TILE];
        let mut rest = (0, out);
        for run in self.groups.chunk_by(|a, b| a == b) {
            let (start, out) = rest;
            let (now, later) = out.split_at_mut(run.len());
            self.group(run[0] as usize, n0, &mut lanes);
            if self.weight.codes.bits() == 4 && run.len() >= 16 {
                // Each value of the group once.
                let values: [[f64; TILE]; 16] = std::array::from_fn(|c| {
                    lanes.map(|lane| value(self.meanings[c] - lane.zero, lane.scale))
                });
                self.codes(n0, start, now, |codes| {
                    std::array::from_fn(|j| values[codes[j] & 15][j])
                });
            } else {
                self.codes(n0, start, now, |codes| {
                    let meanings = codes.map(|c| self.meanings[c]);
                    std::array::from_fn(|j| value(meanings[j] - lanes[j].zero, lanes[j].scale))
                });
            }
            rest = (start + run.len(), later);
        }
    }

    /// Scales and zero points of group `g` in columns `n0..n0 + TILE`; zeros past the last column.
    fn group(&self, g: usize, n0: usize, lanes: &mut [Lane; TILE]) {
        let size_n = self.size_n();
        let width = TILE.min(size_n - n0);
        let scales = &self.scales[g * size_n + n0..][..width];
        for (j, (lane, &scale)) in lanes.iter_mut().zip(scales).enumerate() {
            let zero = self.weight.zeros.as_ref().map_or(0.0, |z| f64::from(z.bits(g, n0 + j)));
            *lane = Lane { scale, zero };
        }
    }

    /// Writes the values of the codes of each row of the product from `start` on.
    #[inline]
    fn codes(
        &self,
        n0: usize,
        start: usize,
        out: &mut [[f64; TILE]],
        values: impl Fn([usize; TILE]) -> [f64; TILE],
    ) {
        let codes = &self.weight.codes;
        let size_n = self.size_n();
        let width = TILE.min(size_n - n0);
        let mask = (1u32 << codes.bits()) - 1;
        for (p, out) in (start..).zip(out) {
            let k = self.order.map_or(p, |o| o[p] as usize);
            let (row, bit) = codes.place(k);
            let words = &codes.words()[row * size_n + n0..][..width];
            let mut found = [0; TILE];
            for (found, word) in found.iter_mut().zip(words) {
                *found = (word >> bit & mask) as usize;
            }
            *out = values(found);
            out[width..].fill(0.0);
        }
    }
}

/// The scale and the zero point of a column.
#[derive(Debug, Clone, Copy, Default)]
struct Lane {
    scale: f64,
    zero: f64,
}

/// Rounds to f16, as f64. It has no branches on the value, so loops vectorize; tests compare it
/// with the conversions of the scalar module.
#[inline]
pub fn round_f16(x: f64) -> f64 {
    round_to(x, 42, f64::from_bits(0x3f10_0000_0000_0000), 65520.0)
}

/// Rounds to bf16, as f64.
#[inline]
pub fn round_bf16(x: f64) -> f64 {
    // Half a unit above the largest finite bf16: 2^128 − 2^119.
    round_to(x, 45, f64::from_bits(0x3810_0000_0000_0000), f64::from_bits(0x47ef_f000_0000_0000))
}

/// Drops `drop` mantissa bits to nearest even; below `normal`, the type's smallest normal, the
/// last unit stays the same; from `overflow` on the result is infinite.
#[inline]
fn round_to(x: f64, drop: u32, normal: f64, overflow: f64) -> f64 {
    let bits = x.to_bits();
    let odd = bits >> drop & 1;
    let rounded = f64::from_bits((bits + (odd + (1 << (drop - 1)) - 1)) & !((1 << drop) - 1));
    // Adding and subtracting 1.5 · 2^drop units in the last place rounds to whole units, since the
    // sum has no lower bits. The unit of a subnormal is that of the smallest normal.
    let magic = normal * f64::from_bits(0x3ff8_0000_0000_0000 + (u64::from(drop) << 52));
    let tiny = (x + magic) - magic;
    let magnitude = x.abs();
    if magnitude < normal {
        tiny
    } else if magnitude >= overflow {
        // Comparisons with NaN are false, so it takes the last branch.
        f64::INFINITY.copysign(x)
    } else if magnitude < overflow {
        rounded
    } else {
        x
    }
}

/// [`crate::num::scalar`]'s rounding of an f64 to a 16-bit type, as f64.
pub(crate) fn round_half(ty: ScalarType, x: f64) -> f64 {
    match ty {
        ScalarType::FLOAT16 => scalar::f16_to_f64(scalar::f64_to_f16_rne(x)),
        ScalarType::BFLOAT16 => f64::from(scalar::bf16_to_f32(scalar::f64_to_bf16_rne(x))),
        _ => f64::from(scalar::f64_to_f32_rne(x)),
    }
}
