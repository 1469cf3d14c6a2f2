//! Codes packed along K: the common representation of all formats and layouts.

use std::borrow::Cow;

use ndarray::{Array2, ArrayView2};

use crate::num::array::contiguous;
use crate::num::dims::{PackedK, Shape};
use crate::{Error, Result};

/// Codes `[size_k, size_n]` of 4 or 8 bits in 32-bit words `[size_k / pack, size_n]`: the code
/// of row k is in word row k / pack, at bits `[i·b, (i+1)·b)` with i = k mod pack.
///
/// This is the order of GPTQ checkpoints and of the input of upstream's `gptq_marlin_repack`, so
/// the common path borrows the mapped file and copies nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Codes<'a> {
    bits: u32,
    shape: Shape,
    words: Cow<'a, [u32]>,
}

/// The shape of the codes in `[rows, cols]` words.
fn logical(bits: u32, (rows, cols): (usize, usize)) -> Result<Shape> {
    match bits {
        4 | 8 => Ok(Shape::new(PackedK(rows).logical(bits).0, cols)),
        _ => Err(Error::size("bits per code", bits, "4 or 8")),
    }
}

impl<'a> Codes<'a> {
    /// Wraps packed words `[size_k / pack, size_n]`. `bits` is 4 or 8.
    pub fn from_words(bits: u32, shape: Shape, words: impl Into<Cow<'a, [u32]>>) -> Result<Self> {
        let words = words.into();
        if !matches!(bits, 4 | 8) {
            return Err(Error::size("bits per code", bits, "4 or 8"));
        }
        let rows = shape.k().packed(bits)?.0;
        if words.len() != rows * shape.size_n {
            return Err(Error::shape(
                "codes",
                &[words.len()],
                format!("{rows} x {} words", shape.size_n),
            ));
        }
        Ok(Self { bits, shape, words })
    }

    /// Packed words `[size_k / pack, size_n]`, borrowed. `bits` is 4 or 8.
    ///
    /// # Errors
    /// [`Error::Size`] for other `bits`; [`Error::NotContiguous`] for other strides than row-major ones,
    /// since weights are not copied.
    ///
    /// ```
    /// use marlinspike::weight::Codes;
    /// use ndarray::array;
    ///
    /// // One word holds eight codes of a column, the first in its low bits.
    /// let qweight = array![[0x7654_3210u32, 0xfedc_ba98]];
    /// let codes = Codes::from_view(4, qweight.view())?;
    /// assert_eq!((codes.shape().size_k, codes.get(3, 0), codes.get(0, 1)), (8, 3, 8));
    /// assert_eq!(codes.view().as_ptr(), qweight.as_ptr());
    /// # Ok::<(), marlinspike::Error>(())
    /// ```
    pub fn from_view(bits: u32, words: ArrayView2<'a, u32>) -> Result<Self> {
        let found = words.shape().to_vec();
        let shape = logical(bits, words.dim())?;
        match words.to_slice() {
            Some(words) => Self::from_words(bits, shape, words),
            None => Err(Error::NotContiguous { tensor: "qweight".to_owned(), found }),
        }
    }

    /// Packed words `[size_k / pack, size_n]`; not copied.
    ///
    /// # Errors
    /// As [`Codes::from_view`].
    pub fn from_array(bits: u32, words: Array2<u32>) -> Result<Codes<'static>> {
        let shape = logical(bits, words.dim())?;
        Codes::from_words(bits, shape, contiguous("qweight", words)?)
    }

    /// The packed words `[size_k / pack, size_n]`.
    pub fn view(&self) -> ArrayView2<'_, u32> {
        let rows = self.shape.size_k / self.pack();
        ArrayView2::from_shape((rows, self.shape.size_n), &self.words).expect("checked when made")
    }

    /// The packed words `[size_k / pack, size_n]`; copied only where they are borrowed.
    pub fn into_array(self) -> Array2<u32> {
        let rows = self.shape.size_k / self.pack();
        let shape = (rows, self.shape.size_n);
        Array2::from_shape_vec(shape, self.words.into_owned()).expect("checked when made")
    }

    /// Packs `code(k, n)`; bits above `bits` must be zero.
    pub fn from_fn(
        bits: u32,
        shape: Shape,
        mut code: impl FnMut(usize, usize) -> u8,
    ) -> Result<Codes<'static>> {
        let pack = (32 / bits) as usize;
        let rows = shape.k().packed(bits)?.0;
        let mut words = vec![0u32; rows * shape.size_n];
        for k in 0..shape.size_k {
            let row = &mut words[k / pack * shape.size_n..][..shape.size_n];
            let shift = (k % pack) as u32 * bits;
            for (n, word) in row.iter_mut().enumerate() {
                let c = code(k, n);
                debug_assert!(bits == 8 || c < 1 << bits);
                *word |= u32::from(c) << shift;
            }
        }
        Codes::from_words(bits, shape, words)
    }

    /// Bits per code: 4 or 8.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// Codes per word: 8 or 4.
    pub fn pack(&self) -> usize {
        (32 / self.bits) as usize
    }

    /// Matrix shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The packed words `[size_k / pack, size_n]`.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The packed words; copies them only where they are borrowed.
    pub fn into_words(self) -> Vec<u32> {
        self.words.into_owned()
    }

    /// The code of row `k`, column `n`.
    pub fn get(&self, k: usize, n: usize) -> u8 {
        let (row, bit) = self.place(k);
        let word = self.words[row * self.shape.size_n + n];
        (word >> bit) as u8 & (0xff >> (8 - self.bits))
    }

    /// The row of words that holds row `k`, and the lowest bit of its codes there.
    #[inline]
    pub(crate) fn place(&self, k: usize) -> (usize, usize) {
        // Called once per code: constant divisors, unlike `self.pack()`, compile to shifts.
        if self.bits == 4 { (k / 8, k % 8 * 4) } else { (k / 4, k % 4 * 8) }
    }

    /// The same codes, but `code` in row `k`, column `n`.
    pub(crate) fn with(&self, [k, n]: [usize; 2], code: u8) -> Codes<'static> {
        let (row, bit) = self.place(k);
        let mut codes = self.clone().into_owned();
        let word = &mut codes.words.to_mut()[row * self.shape.size_n + n];
        *word = *word & !((u32::MAX >> (32 - self.bits)) << bit) | u32::from(code) << bit;
        codes
    }

    /// Column n taken from column `columns[n]`, each below the matrix's size_n.
    pub(crate) fn gather_columns(&self, columns: &[usize]) -> Codes<'static> {
        let rows = self.words.chunks_exact(self.shape.size_n.max(1));
        let words: Vec<u32> = rows.flat_map(|row| columns.iter().map(|&n| row[n])).collect();
        Codes {
            bits: self.bits,
            shape: Shape::new(self.shape.size_k, columns.len()),
            words: words.into(),
        }
    }

    /// The same words with their values in another order: place p of a word takes its value `order[p]`.
    pub(crate) fn reordered(&self, order: &[usize]) -> Codes<'static> {
        let (bits, mask) = (self.bits, u32::MAX >> (32 - self.bits));
        let moved = |word: &u32| {
            let places = order.iter().enumerate();
            places.fold(0, |made, (p, &from)| {
                made | (word >> (from as u32 * bits) & mask) << (p as u32 * bits)
            })
        };
        let words: Vec<u32> = self.words.iter().map(moved).collect();
        Codes { bits, shape: self.shape, words: words.into() }
    }

    /// The same codes in a matrix of another shape: rows and columns beyond this one are zero, those beyond
    /// `shape` are left out.
    pub(crate) fn resized(&self, shape: Shape) -> Result<Codes<'static>> {
        let rows = shape.k().packed(self.bits)?.0;
        let mut words = vec![0; rows * shape.size_n];
        let width = shape.size_n.min(self.shape.size_n);
        if width > 0 {
            let lines = self.words.chunks_exact(self.shape.size_n);
            for (to, from) in words.chunks_exact_mut(shape.size_n).zip(lines) {
                to[..width].copy_from_slice(&from[..width]);
            }
        }
        Codes::from_words(self.bits, shape, words)
    }

    /// The same codes with row k taken from row `perm[k]` (act-order's gather).
    pub fn gather_rows(&self, perm: &[u32]) -> Result<Codes<'static>> {
        if perm.len() != self.shape.size_k {
            return Err(Error::shape("perm", &[perm.len()], format!("[{}]", self.shape.size_k)));
        }
        if let Some(k) = perm.iter().position(|&p| p as usize >= self.shape.size_k) {
            let limit = format!("a row below {}", self.shape.size_k);
            return Err(Error::value("perm", &[k], perm[k], limit));
        }
        Codes::from_fn(self.bits, self.shape, |k, n| self.get(perm[k] as usize, n))
    }

    /// The same codes, owning their words.
    pub fn into_owned(self) -> Codes<'static> {
        Codes { bits: self.bits, shape: self.shape, words: Cow::Owned(self.words.into_owned()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each operation on words against the same operation code by code.
    #[test]
    fn words_move_as_their_codes_do() {
        for (bits, map) in [(4, &[5, 0, 7, 2, 1, 6, 3, 4][..]), (8, &[2, 0, 3, 1][..])] {
            let code = |k: usize, n: usize| (k * 37 + n * 11 + 5) as u8 & (0xff >> (8 - bits));
            let shape = Shape::new(24, 5);
            let of = |shape, code: &dyn Fn(usize, usize) -> u8| {
                Codes::from_fn(bits, shape, code).expect("codes")
            };
            let codes = of(shape, &code);
            let pack = codes.pack();
            for at in [[0, 0], [11, 3], [23, 4]] {
                let new = !code(at[0], at[1]) & (0xff >> (8 - bits));
                let expected = of(shape, &|k, n| if [k, n] == at { new } else { code(k, n) });
                assert_eq!(codes.with(at, new), expected, "{bits} bits, {at:?}");
            }
            let columns = [4, 0, 4];
            let expected = of(Shape::new(24, 3), &|k, n| code(k, columns[n]));
            assert_eq!(codes.gather_columns(&columns), expected, "{bits} bits");
            let expected = of(shape, &|k, n| code(k / pack * pack + map[k % pack], n));
            assert_eq!(codes.reordered(map), expected, "{bits} bits");
            for (size_k, size_n) in [(32, 7), (16, 7), (32, 2), (8, 5), (0, 5), (24, 0)] {
                let inside = |k, n| k < 24 && n < 5;
                let expected = of(Shape::new(size_k, size_n), &|k, n| {
                    if inside(k, n) { code(k, n) } else { 0 }
                });
                let found = codes.resized(expected.shape()).expect("codes");
                assert_eq!(found, expected, "{bits} bits, {size_k} x {size_n}");
            }
        }
    }
}
