//! Zero points, and codes rewritten for fp8 activations.

use marlinspike::Result;
use marlinspike::formats::gptq;
use marlinspike::formats::integers::IntStorage;
use marlinspike::layouts::marlin::{int4_to_fp8_asymmetric, int4_to_fp8_symmetric};
use marlinspike::num::array::{into_vec, rows_of};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::weight::Table;
use proptest::prelude::*;

use super::{fill, one_of};
use crate::Operation;
use crate::mutant::{Mutant, common, mutant, with};

/// GPTQ's `qzeros` as zero points, one byte each.
#[derive(Debug)]
pub struct GptqZeroPoints;

/// Arguments of [`GptqZeroPoints`].
#[derive(Debug, Clone)]
pub struct GptqZerosInput {
    /// `[groups, size_n / pack]`.
    pub qzeros: Vec<u32>,
    /// Groups.
    pub groups: usize,
    /// Columns.
    pub size_n: usize,
    /// 4 or 8.
    pub num_bits: u32,
    /// Whether the file stores the zero itself (`gptq_v2`) and not zero − 1.
    pub v2: bool,
}

impl Operation for GptqZeroPoints {
    const NAME: &'static str = "gptq_zero_points";
    type Input = GptqZerosInput;
    type Element = u8;

    fn inputs() -> BoxedStrategy<GptqZerosInput> {
        let sizes = (1usize..4, one_of(&[64usize, 128, 192]));
        (sizes, one_of(&[4u32, 8]), any::<bool>(), fill())
            .prop_map(|((groups, size_n), num_bits, v2, fill)| {
                let qzeros = fill.words(groups * size_n * num_bits as usize / 32);
                GptqZerosInput { qzeros, groups, size_n, num_bits, v2 }
            })
            .boxed()
    }

    /// Uses the checkpoint reader on a matrix with groups of 32 rows.
    fn expected(i: &GptqZerosInput) -> Result<Vec<u8>> {
        let (n, pack, k) = (i.size_n, 32 / i.num_bits as usize, i.groups * 32);
        let tensors = gptq::GptqTensors {
            qweight: Tensor::from_vec(
                "qweight",
                DType::I32,
                vec![k / pack, n],
                vec![0; k / pack * n],
            )?,
            scales: Tensor::from_vec(
                "scales",
                DType::F16,
                vec![i.groups, n],
                vec![0x3c00u16; i.groups * n],
            )?,
            qzeros: Some(Tensor::from_vec(
                "qzeros",
                DType::I32,
                vec![i.groups, n / pack],
                i.qzeros.clone(),
            )?),
            g_idx: None,
            bias: None,
        };
        let storage = IntStorage {
            bits: i.num_bits,
            group_size: GroupSize::Of(32),
            symmetric: false,
            act_order: false,
        };
        let zeros = if i.v2 { gptq::ZeroPoints::V2 } else { gptq::ZeroPoints::V1 };
        let weight = tensors.unpack("weight", &storage, zeros)?;
        Ok(weight.zeros.iter().flat_map(Table::iter_bits).map(|b| b as u8).collect())
    }

    fn place(i: &GptqZerosInput, element: usize, _bit: u32) -> String {
        format!("(group {}, n {})", element / i.size_n, element % i.size_n)
    }

    fn describe(i: &GptqZerosInput) -> String {
        let GptqZerosInput { groups, size_n, num_bits, v2, .. } = i;
        format!("groups {groups} size_n {size_n} num_bits {num_bits} v2 {v2}")
    }
}

/// `marlin_int4_fp8_preprocess`.
#[derive(Debug)]
pub struct Preprocess;

/// Arguments of [`Preprocess`].
#[derive(Debug, Clone)]
pub struct PreprocessInput {
    /// Eight codes to a word; with zero points `[size_k, size_n / 8]`.
    pub qweight: Vec<u32>,
    /// `[groups, size_n / 8]`.
    pub qzeros: Option<Vec<u32>>,
    /// Columns.
    pub size_n: usize,
}

impl Operation for Preprocess {
    const NAME: &'static str = "marlin_int4_fp8_preprocess";
    type Input = PreprocessInput;
    type Element = u32;

    fn inputs() -> BoxedStrategy<PreprocessInput> {
        let sizes = (one_of(&[32usize, 64, 128]), one_of(&[64usize, 192]), 0u32..3);
        (sizes, fill(), proptest::option::of(fill()))
            .prop_map(|((size_k, size_n, halvings), fill, zeros)| {
                let qweight = fill.words(size_k * size_n / 8);
                let qzeros = zeros.map(|z| z.words((1 << halvings) * size_n / 8));
                PreprocessInput { qweight, qzeros, size_n }
            })
            .boxed()
    }

    fn expected(i: &PreprocessInput) -> Result<Vec<u32>> {
        match &i.qzeros {
            Some(zeros) => {
                let words = i.size_n / 8;
                let qweight = rows_of("qweight", &i.qweight, words)?;
                int4_to_fp8_asymmetric(qweight, rows_of("qzeros", zeros, words)?).map(into_vec)
            }
            None => Ok(int4_to_fp8_symmetric(&i.qweight)),
        }
    }

    fn width(_: &PreprocessInput) -> u32 {
        4
    }

    fn place(_: &PreprocessInput, element: usize, bit: u32) -> String {
        format!("code {} of word {element}", bit / 4)
    }

    fn describe(i: &PreprocessInput) -> String {
        let zeros = if i.qzeros.is_some() { "zero points" } else { "symmetric" };
        format!("{} words, size_n {}, {zeros}", i.qweight.len(), i.size_n)
    }
}

/// Wrong variants of the operations.
pub(crate) fn mutants() -> Vec<Mutant> {
    let mut all = vec![
        with::<GptqZeroPoints>("v2 zeros read as v1 and the reverse", |i| i.v2 ^= true),
        with::<GptqZeroPoints>("all zeros read as v1", |i| i.v2 = false),
        with::<GptqZeroPoints>("all zeros read as v2", |i| i.v2 = true),
        mutant::<Preprocess>("codes not rewritten", |i| Ok(i.qweight.clone())),
        mutant::<Preprocess>("zero points ignored", |i| Ok(int4_to_fp8_symmetric(&i.qweight))),
    ];
    all.extend(common::<GptqZeroPoints>());
    all.extend(common::<Preprocess>());
    all
}
