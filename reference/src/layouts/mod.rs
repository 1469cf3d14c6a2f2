//! Kernel formats as objects: offset, pack, unpack, compare, locate.
//!
//! A layout is a bijection between elements of a matrix (a weight code at (k, n), a scale at
//! (group, n)) and bit ranges of a packed tensor. A layout is right if `unpack(pack(w)) == w` and
//! its bytes equal those of upstream's operators; no product is needed to test it.

pub mod block_scale;
pub mod cpu;
pub mod deepgemm;
pub mod e2m1;
pub mod flashinfer;
pub mod int8;
pub mod kleidi;
pub mod marlin;
pub mod packed_rows;
pub mod positions;
pub mod rows;

use std::fmt;

use serde::Serialize;

use cpu::CpuFormat;
use positions::Named;

/// The layouts by name, for viewers: [`positions::positions`] lists the values of one.
pub const ALL: &[&[Named]] = &[
    marlin::positions::ALL,
    block_scale::ALL,
    flashinfer::positions::ALL,
    deepgemm::ALL,
    kleidi::positions::ALL,
    e2m1::positions::ALL,
    int8::ALL,
];

/// Layouts of the experts of kernel libraries.
pub use flashinfer as experts;
/// Stacks of 4-bit experts for FlashInfer's and CUTLASS's kernels.
pub use flashinfer::{
    Alphas, ExpertBackend, ExpertLayout, Forgotten, Projection, activation_scales,
};
/// The layout that the kernels of the int4 path multiply from.
pub use kleidi as cpu_int4;

/// Int4 codes for CPU kernels.
pub static CPU_INT4: CpuFormat = kleidi::FORMAT;

/// e2m1 codes with a power of two for each 32 k, for CPU kernels.
pub static CPU_E2M1: CpuFormat = e2m1::FORMAT;

/// Int8 codes with a scale for each column, for CPU kernels.
pub static CPU_INT8: CpuFormat = int8::FORMAT;

/// Every format of the CPU kernels.
pub static CPU_FORMATS: [&CpuFormat; 3] = [&CPU_INT4, &CPU_E2M1, &CPU_INT8];

/// Bits `[bit, bit + width)` of element `element` of a packed tensor (row-major).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Index of the storage element (a 32-bit word, a 16-bit scale, a byte).
    pub element: usize,
    /// Lowest bit inside the element.
    pub bit: u32,
    /// Number of bits.
    pub width: u32,
}

/// The lane and register that hold a value of a packed weight in the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Fragment {
    /// Row of tiles: k / tile height.
    pub tile_k: usize,
    /// Column of tiles: n / tile width.
    pub tile_n: usize,
    /// Lane of the warp that loads it.
    pub lane: u32,
    /// Index of the m16n8 product, 8 of the tile's columns each, that it enters.
    pub mma_n: u32,
    /// Register of that product's B fragment, 0 or 1.
    pub register: u32,
    /// Position inside the dequantized register, from the low end.
    pub part: u32,
}

/// The matrix element that a bit of a packed tensor belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// k of a weight, group of a scale or zero point, 0 of a bias.
    pub row: usize,
    /// n.
    pub col: usize,
    /// Tile, lane and register, for weights.
    pub fragment: Option<Fragment>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fragment {
            Some(t) => write!(
                f,
                "(k {}, n {}) tile ({}, {}) lane {} mma {} b{}[{}]",
                self.row, self.col, t.tile_k, t.tile_n, t.lane, t.mma_n, t.register, t.part
            ),
            None => write!(f, "(group {}, n {})", self.row, self.col),
        }
    }
}

/// A bijection between the elements of a matrix and the bit ranges of a packed tensor.
pub trait Layout {
    /// Shape `[rows, cols]` of the packed tensor, in storage elements.
    fn packed_shape(&self) -> [usize; 2];

    /// Where the matrix element (`row`, `col`) is stored. `row` is k for weights and the group for
    /// scales and zero points. Panics if the element is outside the matrix.
    fn offset(&self, row: usize, col: usize) -> Slot;

    /// The matrix element of bit `bit` of storage element `element`. Panics if it is outside the
    /// packed tensor.
    fn locate(&self, element: usize, bit: u32) -> Place;

    /// Number of storage elements.
    fn packed_len(&self) -> usize {
        let [rows, cols] = self.packed_shape();
        rows * cols
    }
}

/// How two packed tensors differ under a layout.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// Matrix elements that differ.
    pub count: usize,
    /// Matrix elements compared.
    pub total: usize,
    /// The first difference in storage order.
    pub first: Option<FirstDifference>,
}

/// The first difference between two packed tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct FirstDifference {
    /// Bits that differ.
    pub slot: Slot,
    /// The matrix element there.
    pub place: Place,
    /// Expected bits of the slot.
    pub expected: u32,
    /// Found bits of the slot.
    pub found: u32,
}

/// Compares two packed tensors element by element, in storage order.
///
/// `values_per_element` is how many matrix elements share a storage element of `width` bits
/// each. Both slices must hold `layout.packed_len()` elements.
pub fn compare<T: Copy + Into<u32>>(
    layout: &impl Layout,
    width: u32,
    values_per_element: u32,
    expected: &[T],
    found: &[T],
) -> Difference {
    assert_eq!(expected.len(), layout.packed_len());
    assert_eq!(found.len(), layout.packed_len());
    let mask = u32::MAX >> (32 - width);
    let mut diff =
        Difference { count: 0, total: expected.len() * values_per_element as usize, first: None };
    for (element, (&e, &f)) in expected.iter().zip(found).enumerate() {
        let (e, f): (u32, u32) = (e.into(), f.into());
        if e == f {
            continue;
        }
        for bit in (0..values_per_element).map(|i| i * width) {
            let (expected, found) = (e >> bit & mask, f >> bit & mask);
            if expected != found {
                diff.count += 1;
                diff.first.get_or_insert_with(|| FirstDifference {
                    slot: Slot { element, bit, width },
                    place: layout.locate(element, bit),
                    expected,
                    found,
                });
            }
        }
    }
    diff
}
