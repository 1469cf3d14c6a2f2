//! Codes packed along K: the common representation of all formats and layouts.

use std::borrow::Cow;

use crate::num::dims::Shape;
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
        let word = self.words[k / self.pack() * self.shape.size_n + n];
        let shift = (k % self.pack()) as u32 * self.bits;
        (word >> shift) as u8 & (0xff >> (8 - self.bits))
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
