//! Weights and zero points packed along N, as AWQ stores them.

use marlinspike::Result;
use marlinspike::formats::awq;
use marlinspike::layouts::Layout;
use marlinspike::layouts::marlin::{Activations, WeightLayout, ZeroPointLayout};
use marlinspike::num::array::into_vec;
use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::{Codes, Table, TableData};
use proptest::prelude::*;

use super::{fill, one_of};
use crate::Operation;
use crate::mutant::{Mutant, common, mutant};

/// `awq_marlin_repack`.
#[derive(Debug)]
pub struct AwqRepack;

/// Arguments of [`AwqRepack`].
#[derive(Debug, Clone)]
pub struct AwqInput {
    /// `[size_k, size_n / pack]`, AWQ's order inside a word.
    pub qweight: Vec<u32>,
    /// Rows.
    pub size_k: usize,
    /// Columns.
    pub size_n: usize,
    /// 4 or 8.
    pub num_bits: u32,
    /// Whether activations have 8 bits.
    pub is_a_8bit: bool,
}

impl AwqInput {
    fn layout(&self) -> Result<WeightLayout> {
        let act = if self.is_a_8bit { Activations::Bits8 } else { Activations::Bits16 };
        WeightLayout::new(Shape::new(self.size_k, self.size_n), self.num_bits, act)
    }
}

impl Operation for AwqRepack {
    const NAME: &'static str = "awq_marlin_repack";
    type Input = AwqInput;
    type Element = u32;

    fn inputs() -> BoxedStrategy<AwqInput> {
        let sizes = (one_of(&[32usize, 64, 128, 256]), one_of(&[64usize, 128, 192, 320]));
        (sizes, one_of(&[4u32, 8]), any::<bool>(), fill())
            .prop_map(|((size_k, size_n), num_bits, is_a_8bit, fill)| {
                let qweight = fill.words(size_k * size_n * num_bits as usize / 32);
                AwqInput { qweight, size_k, size_n, num_bits, is_a_8bit }
            })
            .boxed()
    }

    fn expected(i: &AwqInput) -> Result<Vec<u32>> {
        let (bits, order) = (i.num_bits, awq::column_order(i.num_bits));
        let pack = order.len();
        let layout = i.layout()?;
        let codes = Codes::from_fn(bits, layout.shape(), |k, n| {
            let word = i.qweight[k * (i.size_n / pack) + n / pack];
            let field = order.iter().position(|&column| column == n % pack).unwrap_or(0) as u32;
            (word >> (field * bits) & (u32::MAX >> (32 - bits))) as u8
        })?;
        layout.pack(&codes, None).map(into_vec)
    }

    fn width(i: &AwqInput) -> u32 {
        i.num_bits
    }

    fn place(i: &AwqInput, element: usize, bit: u32) -> String {
        i.layout().map_or_else(|e| e.to_string(), |l| l.locate(element, bit).to_string())
    }

    fn describe(i: &AwqInput) -> String {
        let AwqInput { size_k, size_n, num_bits, is_a_8bit, .. } = i;
        format!("size_k {size_k} size_n {size_n} num_bits {num_bits} is_a_8bit {is_a_8bit}")
    }
}

/// `awq_to_marlin_zero_points`.
#[derive(Debug)]
pub struct AwqZeroPoints;

/// Arguments of [`AwqZeroPoints`].
#[derive(Debug, Clone)]
pub struct AwqZerosInput {
    /// `[groups, size_n / pack]` in AWQ's order.
    pub qzeros: Vec<u32>,
    /// Groups.
    pub groups: usize,
    /// Columns.
    pub size_n: usize,
    /// 4 or 8.
    pub num_bits: u32,
    /// Whether activations have 8 bits.
    pub is_a_8bit: bool,
}

impl AwqZerosInput {
    /// Repacks the zero points, with field i of a word holding column `order[i]`.
    pub(crate) fn repacked(&self, order: &[usize]) -> Result<Vec<u32>> {
        let (bits, pack) = (self.num_bits, order.len());
        let mut codes = vec![0u8; self.groups * self.size_n];
        for (word, columns) in self.qzeros.iter().zip(codes.chunks_exact_mut(pack)) {
            for (i, &column) in order.iter().enumerate() {
                columns[column] = (word >> (i as u32 * bits) & (u32::MAX >> (32 - bits))) as u8;
            }
        }
        let ty = if bits == 4 { ScalarType::UINT4 } else { ScalarType::UINT8 };
        let table = Table::new(ty, self.groups, self.size_n, TableData::B8(codes))?;
        self.layout()?.pack(&table).map(into_vec)
    }

    fn layout(&self) -> Result<ZeroPointLayout> {
        let act = if self.is_a_8bit { Activations::Bits8 } else { Activations::Bits16 };
        ZeroPointLayout::new(self.groups, self.size_n, self.num_bits, act)
    }
}

impl Operation for AwqZeroPoints {
    const NAME: &'static str = "awq_to_marlin_zero_points";
    type Input = AwqZerosInput;
    type Element = u32;

    fn inputs() -> BoxedStrategy<AwqZerosInput> {
        let sizes = (1usize..5, one_of(&[64usize, 128, 192, 320]));
        (sizes, one_of(&[4u32, 8]), any::<bool>(), fill())
            .prop_map(|((groups, size_n), num_bits, is_a_8bit, fill)| {
                let qzeros = fill.words(groups * size_n * num_bits as usize / 32);
                AwqZerosInput { qzeros, groups, size_n, num_bits, is_a_8bit }
            })
            .boxed()
    }

    fn expected(input: &AwqZerosInput) -> Result<Vec<u32>> {
        input.repacked(awq::column_order(input.num_bits))
    }

    fn width(input: &AwqZerosInput) -> u32 {
        input.num_bits
    }

    fn place(i: &AwqZerosInput, element: usize, bit: u32) -> String {
        i.layout().map_or_else(|e| e.to_string(), |l| l.locate(element, bit).to_string())
    }

    fn describe(i: &AwqZerosInput) -> String {
        let AwqZerosInput { groups, size_n, num_bits, is_a_8bit, .. } = i;
        format!("groups {groups} size_n {size_n} num_bits {num_bits} is_a_8bit {is_a_8bit}")
    }
}

/// Wrong variants of the operations.
pub(crate) fn mutants() -> Vec<Mutant> {
    let mut all = vec![
        mutant::<AwqZeroPoints>("AWQ's interleave instead of its inverse", |i| {
            let inverse: &[usize] =
                if i.num_bits == 4 { &[0, 4, 1, 5, 2, 6, 3, 7] } else { &[0, 2, 1, 3] };
            i.repacked(inverse)
        }),
        mutant::<AwqZeroPoints>("AWQ's interleave not undone", |i| {
            let plain: &[usize] =
                if i.num_bits == 4 { &[0, 1, 2, 3, 4, 5, 6, 7] } else { &[0, 1, 2, 3] };
            i.repacked(plain)
        }),
    ];
    all.extend(common::<AwqZeroPoints>());
    all
}
