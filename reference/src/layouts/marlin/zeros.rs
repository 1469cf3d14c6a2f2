//! Run-time zero points in kernel order.

use super::Activations;
use super::scales::GROUPED;
use super::tile::evens_first;
use crate::layouts::{Layout, Place, Slot};
use crate::num::scalar::ScalarType;
use crate::weight::{Table, TableData};
use crate::{Error, Result};

/// Zero points `[groups, N]`, packed along N into 32-bit words `[groups, N / pack]`.
///
/// Always the grouped column order (zero points enter every product), then the interleave that
/// dequantization undoes; no interleave with 8-bit activations. Source: vLLM 0.21.0
/// `marlin_zero_points`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ZeroPointLayout {
    groups: usize,
    size_n: usize,
    bits: u32,
    activations: Activations,
}

impl ZeroPointLayout {
    /// The layout of `[groups, size_n]` zero points of 4 or 8 bits. Fails unless N is a multiple
    /// of 64.
    pub fn new(groups: usize, size_n: usize, bits: u32, activations: Activations) -> Result<Self> {
        if !matches!(bits, 4 | 8) {
            return Err(Error::size("bits per zero point", bits, "4 or 8"));
        }
        if size_n == 0 || !size_n.is_multiple_of(super::MIN_THREAD_N) {
            return Err(Error::size(
                "size_n",
                size_n,
                format!("a positive multiple of {}", super::MIN_THREAD_N),
            ));
        }
        Ok(Self { groups, size_n, bits, activations })
    }

    fn pack_factor(&self) -> usize {
        32 / self.bits as usize
    }

    /// Column of the zero point at position `p` of a packed row.
    fn column(&self, p: usize) -> usize {
        let pack = self.pack_factor();
        let q = match self.activations {
            Activations::Bits16 => p / pack * pack + evens_first(self.bits)[p % pack],
            Activations::Bits8 => p,
        };
        q / 64 * 64 + GROUPED[q % 64]
    }

    /// Packs codes `[groups, N]` (one byte each).
    pub fn pack(&self, zeros: &Table) -> Result<Vec<u32>> {
        let TableData::B8(codes) = zeros.data() else {
            return Err(Error::unsupported("zero points wider than a byte", "codes are bytes"));
        };
        if (zeros.rows(), zeros.cols()) != (self.groups, self.size_n) {
            return Err(Error::shape(
                "zeros",
                &[zeros.rows(), zeros.cols()],
                format!("[{}, {}]", self.groups, self.size_n),
            ));
        }
        let pack = self.pack_factor();
        let mut words = vec![0u32; self.packed_len()];
        for (row, out) in codes.chunks(self.size_n).zip(words.chunks_mut(self.size_n / pack)) {
            for p in 0..self.size_n {
                out[p / pack] |= u32::from(row[self.column(p)]) << ((p % pack) as u32 * self.bits);
            }
        }
        Ok(words)
    }

    /// The codes `[groups, N]` of packed words, as a table of `ty`.
    pub fn unpack(&self, words: &[u32], ty: ScalarType) -> Result<Table> {
        if words.len() != self.packed_len() {
            return Err(Error::shape(
                "marlin_zeros",
                &[words.len()],
                format!("{:?} words", self.packed_shape()),
            ));
        }
        let (pack, mask) = (self.pack_factor(), u32::MAX >> (32 - self.bits));
        let mut codes = vec![0u8; self.groups * self.size_n];
        for (row, words) in codes.chunks_mut(self.size_n).zip(words.chunks(self.size_n / pack)) {
            for p in 0..self.size_n {
                row[self.column(p)] =
                    ((words[p / pack] >> ((p % pack) as u32 * self.bits)) & mask) as u8;
            }
        }
        Table::new(ty, self.groups, self.size_n, TableData::B8(codes))
    }
}

impl Layout for ZeroPointLayout {
    fn packed_shape(&self) -> [usize; 2] {
        [self.groups, self.size_n / self.pack_factor()]
    }

    fn offset(&self, group: usize, n: usize) -> Slot {
        assert!(group < self.groups && n < self.size_n);
        let base = n / 64 * 64;
        let p = (base..base + 64).find(|&p| self.column(p) == n).unwrap_or_default();
        let pack = self.pack_factor();
        Slot {
            element: group * (self.size_n / pack) + p / pack,
            bit: (p % pack) as u32 * self.bits,
            width: self.bits,
        }
    }

    fn locate(&self, element: usize, bit: u32) -> Place {
        assert!(element < self.packed_len() && bit < 32);
        let row_len = self.size_n / self.pack_factor();
        let p = element % row_len * self.pack_factor() + (bit / self.bits) as usize;
        Place { row: element / row_len, col: self.column(p), fragment: None }
    }
}
