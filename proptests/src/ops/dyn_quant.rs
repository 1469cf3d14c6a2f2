//! The packing operators of the Arm int4 path.

use marlinspike::Result;
use marlinspike::case::ActivationRounding;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use marlinspike::w4a8::packed::{Columns, LhsLayout, MR, NR, RhsLayout};
use marlinspike::w4a8::{Values, quantize};
use proptest::prelude::*;

use super::{fill, one_of};
use crate::Operation;

/// `_dyn_quant_pack_4bit_weight`: the packed bytes of a weight.
#[derive(Debug)]
pub struct DynQuantPackWeight;

/// Arguments of [`DynQuantPackWeight`].
#[derive(Debug, Clone)]
pub struct DynQuantWeightInput {
    /// `[size_n, size_k / 2]`: code + 8 in each nibble, even k low.
    pub weight_u4: Vec<u8>,
    /// `[size_n]` when channel-wise.
    pub scales_f32: Vec<f32>,
    /// bf16 bits `[size_n, size_k / group_size]` when group-wise.
    pub scales_bf16: Vec<u16>,
    /// `[size_n]`.
    pub bias: Option<Vec<f32>>,
    /// Rows.
    pub size_k: usize,
    /// Columns.
    pub size_n: usize,
    /// −1 or the group.
    pub group_size: i64,
    /// Columns per block.
    pub nr: usize,
}

impl DynQuantWeightInput {
    fn layout(&self) -> Result<RhsLayout> {
        let shape = Shape::new(self.size_k, self.size_n);
        RhsLayout::new(shape, GroupSize::from_config(self.group_size)?, self.nr)
    }
}

impl Operation for DynQuantPackWeight {
    const NAME: &'static str = "_dyn_quant_pack_4bit_weight";
    type Input = DynQuantWeightInput;
    type Element = u8;

    fn inputs() -> BoxedStrategy<DynQuantWeightInput> {
        let depths = one_of(&[
            (32usize, -1i64),
            (34, -1),
            (44, -1),
            (96, -1),
            (64, 32),
            (96, 32),
            (256, 64),
        ]);
        (depths, one_of(&[1usize, 3, 4, 5, 8, 9, 16]), one_of(&NR), fill(), any::<bool>())
            .prop_map(|((size_k, group_size), size_n, nr, fill, biased)| {
                let words = fill.words((size_n * size_k / 2).div_ceil(4));
                let mut weight_u4: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                weight_u4.truncate(size_n * size_k / 2);
                let group = if group_size < 0 { size_k } else { group_size as usize };
                let scales = fill.scales(size_n * (size_k / group), ScalarType::BFLOAT16, 16);
                let wide = |bits: &u16| f32::from_bits(u32::from(*bits) << 16);
                DynQuantWeightInput {
                    weight_u4,
                    scales_f32: match group_size {
                        -1 => scales.iter().map(wide).collect(),
                        _ => Vec::new(),
                    },
                    bias: biased.then(|| scales.iter().take(size_n).map(wide).collect()),
                    scales_bf16: if group_size < 0 { Vec::new() } else { scales },
                    size_k,
                    size_n,
                    group_size,
                    nr,
                }
            })
            .boxed()
    }

    fn expected(i: &DynQuantWeightInput) -> Result<Vec<u8>> {
        let shape = Shape::new(i.size_k, i.size_n);
        let codes = i.weight_u4.iter().flat_map(|b| [(b & 15) as i8 - 8, (b >> 4) as i8 - 8]);
        let (codes, bias) = (codes.collect(), i.bias.as_deref());
        let columns = match GroupSize::from_config(i.group_size)? {
            GroupSize::Channel => Columns::channel_wise(shape, codes, &i.scales_f32, bias)?,
            GroupSize::Of(g) => Columns::group_wise(shape, g, codes, i.scales_bf16.clone(), bias)?,
        };
        Ok(i.layout()?.pack(&columns)?.bytes().to_vec())
    }

    fn place(i: &DynQuantWeightInput, element: usize, bit: u32) -> String {
        i.layout().map_or_else(|e| e.to_string(), |l| l.locate(element, bit).to_string())
    }

    fn describe(i: &DynQuantWeightInput) -> String {
        let DynQuantWeightInput { size_k, size_n, group_size, nr, bias, .. } = i;
        let bias = bias.is_some();
        format!("size_k {size_k} size_n {size_n} group_size {group_size} nr {nr} bias {bias}")
    }
}

/// KleidiAI's `lhs_quant_pack_qai8dxp`: rows of activations to their packed bytes, those of rows
/// past M zero.
#[derive(Debug)]
pub struct DynQuantPackActivations;

/// Arguments of [`DynQuantPackActivations`].
#[derive(Debug, Clone)]
pub struct DynQuantActivationsInput {
    /// `[size_m, size_k]`.
    pub x: Vec<f32>,
    /// Rows.
    pub size_m: usize,
    /// Columns.
    pub size_k: usize,
    /// Rows per block.
    pub mr: usize,
    /// Rounding of ties.
    pub rounding: ActivationRounding,
}

impl DynQuantActivationsInput {
    fn layout(&self) -> Result<LhsLayout> {
        LhsLayout::new(self.size_m, self.size_k, self.mr)
    }
}

impl Operation for DynQuantPackActivations {
    const NAME: &'static str = "lhs_quant_pack_qai8dxp";
    type Input = DynQuantActivationsInput;
    type Element = u8;

    fn inputs() -> BoxedStrategy<DynQuantActivationsInput> {
        let rounding = one_of(&[ActivationRounding::HalfAway, ActivationRounding::HalfEven]);
        let sizes = (one_of(&[1usize, 2, 4, 5, 9]), one_of(&[8usize, 32, 33, 44, 96]), one_of(&MR));
        (sizes, rounding, any::<u64>(), 0u32..4)
            .prop_map(|((size_m, size_k, mr), rounding, seed, kind)| {
                let mut rng = Rng::new(seed);
                // Halves of a scale of 1 (the first two values span 255); any numbers; numbers
                // whose range is too small or too large for a scale.
                let x = (0..size_m * size_k).map(|i| match (kind, i % size_k) {
                    (0, 0) => -100.0,
                    (0, 1) => 155.0,
                    (0, _) => rng.below(400) as f32 / 2.0 - 100.0,
                    (1, _) => (rng.below(100_001) as f32 - 40_000.0) / 777.0,
                    (2, _) => f32::from_bits(rng.next_u32() & 0x8000_ffff),
                    _ => (rng.below(2001) as f32 - 1000.0) * 3e35,
                });
                let x = x.collect();
                DynQuantActivationsInput { x, size_m, size_k, mr, rounding }
            })
            .boxed()
    }

    fn expected(i: &DynQuantActivationsInput) -> Result<Vec<u8>> {
        let rows = quantize(&Values::F32(i.x.clone()), i.size_k, i.rounding)?;
        Ok(i.layout()?.pack(&rows)?.bytes().to_vec())
    }

    fn place(i: &DynQuantActivationsInput, element: usize, _bit: u32) -> String {
        i.layout().map_or_else(|e| e.to_string(), |l| l.locate(element).to_string())
    }

    fn describe(i: &DynQuantActivationsInput) -> String {
        let DynQuantActivationsInput { size_m, size_k, mr, rounding, .. } = i;
        format!("size_m {size_m} size_k {size_k} mr {mr} rounding {rounding}")
    }
}
