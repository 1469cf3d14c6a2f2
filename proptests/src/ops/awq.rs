//! Weights and zero points packed along N, as AWQ stores them.

use marlinspike::Result;
use marlinspike::check::add_outputs;
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
use crate::bug::Bug;
use crate::bug::edit::{self, nibbles};
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

/// int4 with zero points, on one device, in small shapes.
const ZEROS: &str = "checkpoint_format=awq,weight_type=uint4,input_dtype=null,\
                     tensor_parallel.size=null,size_k=128,size_n=64|192";

/// Bugs of the bank in the order of columns and in zero points.
pub(crate) fn bugs() -> Vec<Bug> {
    vec![
        Bug::of_linear(
            7,
            "GPTQ v2 zeros read as v1 (off by one)",
            "V#26092, V#38966",
            ZEROS,
            &["zero-off-by-one"],
            |case| {
                let next = |word: u32| {
                    (0..8).fold(0, |w, i| w | (((word >> (4 * i)) + 1) & 15) << (4 * i))
                };
                edit::input::<u32>(case, "qzeros", |zeros, _| {
                    zeros.iter_mut().for_each(|word| *word = next(*word));
                })?;
                add_outputs(case)
            },
        ),
        Bug::of_linear(
            13,
            "AWQ interleave undone with the permutation instead of its inverse",
            "common in ports",
            ZEROS,
            &["awq-interleave-inverted", "interleave-inverted"],
            |case| {
                // Column c is taken from nibble order[c]; it is nibble i with order[i] = c.
                let order = awq::column_order(4);
                let from = |i: usize| order[order[i]];
                edit::input::<u32>(case, "qweight", |words, _| {
                    words.iter_mut().for_each(|word| *word = nibbles(*word, from));
                })?;
                add_outputs(case)
            },
        ),
        Bug::of_linear(
            44,
            "zero points not subtracted",
            "common in ports",
            ZEROS,
            &["zeros-missing"],
            |case| {
                edit::input::<u32>(case, "qzeros", |zeros, _| zeros.fill(0))?;
                add_outputs(case)
            },
        ),
    ]
}
