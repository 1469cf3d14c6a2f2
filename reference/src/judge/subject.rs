//! An output and its expectation: the values that differ, and their positions.

use serde::Serialize;

use super::mistake::KnownMistake;
use crate::layouts::{Fragment, Layout, Place, Slot};
use crate::num::tensor::Tensor;

/// One value that differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Mismatch {
    /// Index into the output tensor.
    pub index: Vec<usize>,
    /// Lowest bit of the value inside the tensor element.
    pub bit: u32,
    /// Number of bits of the value.
    pub width: u32,
    /// Matrix of a stack, when the output has a leading axis of experts.
    pub expert: Option<usize>,
    /// Row of a weight, or column of activations.
    pub k: Option<usize>,
    /// Row of scales and zero points, or column of the scales of activations.
    pub group: Option<usize>,
    /// Column of a weight or of a product.
    pub n: Option<usize>,
    /// The tile, lane and register that load a value of a packed weight.
    pub fragment: Option<Fragment>,
    /// Expected bits, as hexadecimal.
    pub expected: String,
    /// Found bits, as hexadecimal.
    pub found: String,
}

impl Mismatch {
    /// A mismatch of a whole element of `width` bits in an output without a layout.
    pub(crate) fn element(
        index: Vec<usize>,
        width: u32,
        expert: Option<usize>,
        n: Option<usize>,
        expected: u32,
        found: u32,
    ) -> Self {
        Self {
            index,
            bit: 0,
            width,
            expert,
            k: None,
            group: None,
            n,
            fragment: None,
            expected: hex(expected, width),
            found: hex(found, width),
        }
    }
}

/// A value of `width` bits as hexadecimal.
pub(crate) fn hex(bits: u32, width: u32) -> String {
    format!("{bits:#0w$x}", w = width.div_ceil(4) as usize + 2)
}

/// The meaning of a row of the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rows {
    /// Input features of a weight.
    K,
    /// Groups of a weight's scales.
    Group,
    /// Input features of quantized activations, whose rows are the columns of the matrix.
    RowK,
    /// Groups of the scales of quantized activations, likewise.
    RowGroup,
    /// No meaning: a list.
    List,
}

impl Rows {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::K | Self::RowK => "k",
            Self::Group | Self::RowGroup => "group",
            Self::List => "row",
        }
    }

    /// What a column of the matrix is.
    pub(crate) fn column_label(self) -> &'static str {
        if self.are_of_activations() { "row" } else { "n" }
    }

    pub(super) fn are_of_activations(self) -> bool {
        matches!(self, Self::RowK | Self::RowGroup)
    }
}

/// A list of values without a layout: index `i` is row 0, column i.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plain {
    pub(crate) len: usize,
    pub(crate) width: u32,
}

impl Layout for Plain {
    fn packed_shape(&self) -> [usize; 2] {
        [1, self.len]
    }

    fn offset(&self, _row: usize, col: usize) -> Slot {
        Slot { element: col, bit: 0, width: self.width }
    }

    fn locate(&self, element: usize, _bit: u32) -> Place {
        Place { row: 0, col: element, fragment: None }
    }
}

/// A matrix `[N, K]` or `[N, groups]` as files store it, line by line; 4-bit values are stored two
/// per byte, the lower row in the low nibble.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lines {
    /// k or groups.
    pub(crate) rows: usize,
    /// n.
    pub(crate) cols: usize,
    /// Bits per value: 4, or all of an element.
    pub(crate) width: u32,
}

impl Lines {
    const fn per_element(self) -> usize {
        if self.width == 4 { 2 } else { 1 }
    }
}

impl Layout for Lines {
    fn packed_shape(&self) -> [usize; 2] {
        [self.cols, self.rows / self.per_element()]
    }

    fn offset(&self, row: usize, col: usize) -> Slot {
        let value = col * self.rows + row;
        let (element, part) = (value / self.per_element(), value % self.per_element());
        Slot { element, bit: part as u32 * 4, width: self.width }
    }

    fn locate(&self, element: usize, bit: u32) -> Place {
        let part = if self.width == 4 { bit as usize / 4 } else { 0 };
        let value = element * self.per_element() + part;
        Place { row: value % self.rows, col: value / self.rows, fragment: None }
    }
}

/// Storage elements, zero-extended.
pub(crate) type Elements = Vec<u32>;

/// The elements of an 8, 16 or 32-bit tensor.
pub(crate) fn elements(tensor: &Tensor<'_>) -> Elements {
    match tensor.dtype().bytes() {
        1 => tensor.elements::<u8>().iter().map(|&x| x.into()).collect(),
        2 => tensor.elements::<u16>().iter().map(|&x| x.into()).collect(),
        _ => tensor.elements::<u32>().into_owned(),
    }
}

/// A known mistake that computes the elements of an output.
pub(crate) type Candidate<'c> = KnownMistake<'c, (), Elements>;

/// An output to judge.
pub(crate) struct Subject<'c> {
    pub(crate) name: String,
    pub(crate) found: &'c Tensor<'c>,
    pub(crate) expected: Elements,
    pub(crate) layout: Box<dyn Layout + 'c>,
    /// Shape of one matrix in values.
    pub(crate) shape: [usize; 2],
    pub(crate) rows: Rows,
    /// Bits per value; a storage element holds as many as fit.
    pub(crate) width: u32,
    pub(crate) experts: usize,
    /// Whether the tensor has a leading axis of experts.
    pub(crate) stacked: bool,
    pub(crate) candidates: Vec<Candidate<'c>>,
}

impl Subject<'_> {
    pub(super) fn element_bits(&self) -> u32 {
        self.found.dtype().bits() as u32
    }

    /// Values in storage order that differ: (element of the whole tensor, bit).
    pub(crate) fn differences<'a>(
        &'a self,
        found: &'a [u32],
    ) -> impl Iterator<Item = (usize, u32)> + 'a {
        let (width, bits) = (self.width, self.element_bits());
        let mask = u32::MAX >> (32 - width);
        self.expected.iter().zip(found).enumerate().filter(|(_, (e, f))| e != f).flat_map(
            move |(i, (e, f))| {
                let differs = e ^ f;
                (0..bits)
                    .step_by(width as usize)
                    .filter_map(move |bit| (differs >> bit & mask != 0).then_some((i, bit)))
            },
        )
    }

    /// The expert and matrix position of the value at storage position (`element`, `bit`).
    pub(crate) fn place(&self, element: usize, bit: u32) -> (usize, Place) {
        let per = self.layout.packed_len().max(1);
        (element / per, self.layout.locate(element % per, bit))
    }

    pub(super) fn mismatch(&self, found: &[u32], element: usize, bit: u32) -> Mismatch {
        let (expert, place) = self.place(element, bit);
        let mask = u32::MAX >> (32 - self.width);
        let row = |of: [Rows; 2]| of.contains(&self.rows).then_some(place.row);
        Mismatch {
            index: unravel(element, self.found.shape()),
            bit,
            width: self.width,
            expert: self.stacked.then_some(expert),
            k: row([Rows::K, Rows::RowK]),
            group: row([Rows::Group, Rows::RowGroup]),
            n: matches!(self.rows, Rows::K | Rows::Group).then_some(place.col),
            fragment: place.fragment,
            expected: hex(self.expected[element] >> bit & mask, self.width),
            found: hex(found[element] >> bit & mask, self.width),
        }
    }

    /// The values of one matrix, row-major.
    pub(crate) fn matrix(&self, tensor: &[u32], expert: usize) -> Vec<u32> {
        let per = self.layout.packed_len();
        let mask = u32::MAX >> (32 - self.width);
        let mut values = vec![0; self.shape[0] * self.shape[1]];
        for (element, &word) in tensor[expert * per..][..per].iter().enumerate() {
            for bit in (0..self.element_bits()).step_by(self.width as usize) {
                let place = self.layout.locate(element, bit);
                values[place.row * self.shape[1] + place.col] = word >> bit & mask;
            }
        }
        values
    }

    /// Places of all mismatches: (expert, row, column).
    pub(crate) fn places<'a>(
        &'a self,
        found: &'a [u32],
    ) -> impl Iterator<Item = (usize, Place)> + 'a {
        self.differences(found).map(|(element, bit)| self.place(element, bit))
    }
}

/// Row-major index of element `i`.
fn unravel(mut i: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (d, &len) in shape.iter().enumerate().rev() {
        index[d] = i % len.max(1);
        i /= len.max(1);
    }
    index
}
