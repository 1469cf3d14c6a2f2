//! Scales and biases.

use marlinspike::Result;
use marlinspike::layouts::Layout;
use marlinspike::layouts::marlin::{
    Activations, ScaleLayout, ScalePermutation, e8m0_scales, process_int8_scales,
};
use marlinspike::num::dims::{GroupSize, LogicalK};
use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::{Table, TableData};
use proptest::prelude::*;

use super::{dtype, fill, one_of};
use crate::Operation;
use crate::mutant::{Mutant, common, mutant, with};

pub(super) const SIZES_N: &[usize] = &[64, 128, 192, 320];

/// `(group, n)` of an element of row-major `[groups, size_n]` in kernel order.
pub(super) fn place(layout: Result<ScaleLayout>, element: usize) -> String {
    layout.map_or_else(|e| e.to_string(), |l| l.locate(element, 0).to_string())
}

fn halves(table: &Table) -> Vec<u16> {
    table.iter_bits().map(|b| b as u16).collect()
}

pub(super) fn bytes(table: &Table) -> Vec<u8> {
    table.iter_bits().map(|b| b as u8).collect()
}

/// `marlin_permute_scales`.
#[derive(Debug)]
pub struct PermuteScales;

/// Arguments of [`PermuteScales`].
#[derive(Debug, Clone)]
pub struct ScalesInput {
    /// `[groups, size_n]`, 16-bit floats.
    pub scales: Vec<u16>,
    /// Rows of the matrix.
    pub size_k: usize,
    /// Columns.
    pub size_n: usize,
    /// −1 or the group.
    pub group_size: i64,
    /// Whether activations have 8 bits.
    pub is_a_8bit: bool,
}

impl ScalesInput {
    /// Scales in the order chosen by `size_k`.
    pub(crate) fn permuted(&self, size_k: usize) -> Result<Vec<u16>> {
        let table = TableData::B16(self.scales.clone());
        let rows = self.scales.len() / self.size_n;
        let table = Table::new(ScalarType::FLOAT16, rows, self.size_n, table)?;
        self.layout(size_k)?.pack(&table).map(|t| halves(&t))
    }

    fn layout(&self, size_k: usize) -> Result<ScaleLayout> {
        let act = if self.is_a_8bit { Activations::Bits8 } else { Activations::Bits16 };
        let group = GroupSize::from_config(self.group_size)?;
        let order = ScalePermutation::choose(group, LogicalK(size_k), act);
        let rows = self.scales.len() / self.size_n;
        ScaleLayout::new(rows, self.size_n, order, ScalarType::FLOAT16)
    }
}

impl Operation for PermuteScales {
    const NAME: &'static str = "marlin_permute_scales";
    type Input = ScalesInput;
    type Element = u16;

    fn inputs() -> BoxedStrategy<ScalesInput> {
        let sizes = (one_of(&[128usize, 256, 512]), one_of(SIZES_N));
        (sizes, one_of(&[-1i64, 32, 64, 128]), proptest::bool::weighted(0.2), fill())
            .prop_map(|((size_k, size_n), group_size, is_a_8bit, fill)| {
                let groups = if group_size < 0 { 1 } else { size_k / group_size as usize };
                let scales = fill.scales(groups * size_n, ScalarType::FLOAT16, 0);
                ScalesInput { scales, size_k, size_n, group_size, is_a_8bit }
            })
            .boxed()
    }

    fn expected(input: &ScalesInput) -> Result<Vec<u16>> {
        input.permuted(input.size_k)
    }

    fn place(input: &ScalesInput, element: usize, _bit: u32) -> String {
        place(input.layout(input.size_k), element)
    }

    fn describe(i: &ScalesInput) -> String {
        let ScalesInput { size_k, size_n, group_size, is_a_8bit, .. } = i;
        format!("size_k {size_k} size_n {size_n} group_size {group_size} is_a_8bit {is_a_8bit}")
    }
}

/// `marlin_permute_bias`.
#[derive(Debug)]
pub struct PermuteBias;

/// Arguments of [`PermuteBias`].
#[derive(Debug, Clone)]
pub struct BiasInput {
    /// `[size_n]`, 16-bit floats.
    pub bias: Vec<u16>,
}

impl Operation for PermuteBias {
    const NAME: &'static str = "marlin_permute_bias";
    type Input = BiasInput;
    type Element = u16;

    fn inputs() -> BoxedStrategy<BiasInput> {
        (one_of(SIZES_N), fill())
            .prop_map(|(n, fill)| BiasInput { bias: fill.scales(n, ScalarType::FLOAT16, 0) })
            .boxed()
    }

    fn expected(input: &BiasInput) -> Result<Vec<u16>> {
        let n = input.bias.len();
        let table = Table::new(ScalarType::FLOAT16, 1, n, TableData::B16(input.bias.clone()))?;
        ScaleLayout::bias(n, ScalarType::FLOAT16)?.pack(&table).map(|t| halves(&t))
    }

    fn place(input: &BiasInput, element: usize, _bit: u32) -> String {
        place(ScaleLayout::bias(input.bias.len(), ScalarType::FLOAT16), element)
    }

    fn describe(input: &BiasInput) -> String {
        format!("size_n {}", input.bias.len())
    }
}

/// `marlin_act_int8_process_scales`: the output is the scales' bits and then those of the f32
/// factor.
#[derive(Debug)]
pub struct Int8Scales;

/// Arguments of [`Int8Scales`].
#[derive(Debug, Clone)]
pub struct Int8Input {
    /// `[groups, size_n]` in kernel order.
    pub scales: Vec<u16>,
    /// Columns.
    pub size_n: usize,
    /// Type of the scales.
    pub dtype: ScalarType,
}

impl Operation for Int8Scales {
    const NAME: &'static str = "marlin_act_int8_process_scales";
    type Input = Int8Input;
    type Element = u32;

    fn inputs() -> BoxedStrategy<Int8Input> {
        (one_of(SIZES_N), 2usize..5, dtype(), fill())
            .prop_map(|(size_n, groups, dtype, fill)| Int8Input {
                scales: fill.scales(groups * size_n, dtype, 0),
                size_n,
                dtype,
            })
            .boxed()
    }

    fn expected(i: &Int8Input) -> Result<Vec<u32>> {
        let rows = i.scales.len() / i.size_n;
        let table = Table::new(i.dtype, rows, i.size_n, TableData::B16(i.scales.clone()))?;
        let processed = process_int8_scales(&table)?;
        let factor = processed.input_global_scale.to_bits();
        Ok(processed.scales.iter_bits().chain([factor]).collect())
    }

    fn place(i: &Int8Input, element: usize, _bit: u32) -> String {
        if element == i.scales.len() {
            return "the factor of the activation scales".to_owned();
        }
        format!("scale {} of row {}", element % i.size_n, element / i.size_n)
    }

    fn describe(i: &Int8Input) -> String {
        format!("{} scales [{}, {}]", i.dtype, i.scales.len() / i.size_n, i.size_n)
    }
}

/// `mxfp4_marlin_process_scales` and `mxfp8_marlin_process_scales`, permutation included.
#[derive(Debug)]
pub struct MxScales;

/// Arguments of [`MxScales`].
#[derive(Debug, Clone)]
pub struct MxInput {
    /// `[size_k / 32, size_n]` e8m0 bytes.
    pub scales: Vec<u8>,
    /// Rows of the matrix.
    pub size_k: usize,
    /// Columns.
    pub size_n: usize,
    /// Type through which upstream passes the scales.
    pub dtype: ScalarType,
    /// Whether activations are e4m3 (MXFP4 only).
    pub fp8_activations: bool,
}

impl MxInput {
    fn layout(&self) -> Result<ScaleLayout> {
        let act = if self.fp8_activations { Activations::Bits8 } else { Activations::Bits16 };
        let group = GroupSize::Of(32);
        let order = ScalePermutation::choose(group, LogicalK(self.size_k), act);
        ScaleLayout::new(self.size_k / 32, self.size_n, order, self.dtype)
    }
}

impl Operation for MxScales {
    const NAME: &'static str = "mxfp_marlin_process_scales";
    type Input = MxInput;
    type Element = u8;

    fn inputs() -> BoxedStrategy<MxInput> {
        (one_of(&[64usize, 128, 256]), one_of(SIZES_N), dtype(), any::<bool>(), fill())
            .prop_map(|(size_k, size_n, dtype, fp8_activations, fill)| {
                let max = if dtype == ScalarType::FLOAT16 { 142 } else { 249 };
                let scales = fill.bytes(size_k / 32 * size_n, max);
                MxInput { scales, size_k, size_n, dtype, fp8_activations }
            })
            .boxed()
    }

    fn expected(i: &MxInput) -> Result<Vec<u8>> {
        let data = TableData::B8(i.scales.clone());
        let table = Table::new(ScalarType::FLOAT8_E8M0FNU, i.size_k / 32, i.size_n, data)?;
        e8m0_scales(&table, i.dtype, i.layout()?, i.fp8_activations).map(|t| bytes(&t))
    }

    fn place(i: &MxInput, element: usize, _bit: u32) -> String {
        let quads = |l: ScaleLayout| if i.fp8_activations { l } else { l.with_quads() };
        place(i.layout().map(quads), element)
    }

    fn describe(i: &MxInput) -> String {
        let MxInput { size_k, size_n, dtype, fp8_activations, .. } = i;
        format!("size_k {size_k} size_n {size_n} via {dtype} fp8 activations {fp8_activations}")
    }
}

/// Wrong variants of the operations.
pub(crate) fn mutants() -> Vec<Mutant> {
    let mut all = vec![
        mutant::<PermuteScales>("w13: order chosen with the intermediate size as K", |i| {
            i.permuted(i.size_n / 2)
        }),
        mutant::<PermuteScales>("order chosen with the packed K", |i| i.permuted(i.size_k / 8)),
        with::<PermuteScales>("order of 16-bit activations under 8-bit ones", |i| {
            i.is_a_8bit = false;
        }),
        mutant::<PermuteScales>("not permuted", |i| Ok(i.scales.clone())),
        mutant::<PermuteBias>("bias not permuted", |i| Ok(i.bias.clone())),
        mutant::<PermuteBias>("bias in the grouped order", |i| {
            let column = |p: usize| p / 64 * 64 + p % 8 * 8 + p % 64 / 8;
            Ok((0..i.bias.len()).map(|p| i.bias[column(p)]).collect())
        }),
        mutant::<Int8Scales>("factor left out", |i| {
            let mut out = Int8Scales::expected(i)?;
            if let Some(last) = out.last_mut() {
                *last = 1f32.to_bits();
            }
            Ok(out)
        }),
        mutant::<Int8Scales>("scales left as floats", |i| {
            let mut out = Int8Scales::expected(i)?;
            for (slot, &s) in out.iter_mut().zip(&i.scales) {
                *slot = s.into();
            }
            Ok(out)
        }),
        mutant::<MxScales>("not reordered in fours, or reordered under fp8 activations", |i| {
            let out = MxScales::expected(i)?;
            Ok(out.chunks_exact(4).flat_map(|q| [q[0], q[2], q[1], q[3]]).collect())
        }),
        mutant::<MxScales>("6 not added under fp8 activations", |i| {
            let less = if i.fp8_activations { 6 } else { 0 };
            Ok(MxScales::expected(i)?.into_iter().map(|b| b.wrapping_sub(less)).collect())
        }),
    ];
    all.extend(common::<PermuteScales>());
    all.extend(common::<PermuteBias>());
    all.extend(common::<Int8Scales>());
    all.extend(common::<MxScales>());
    all
}
