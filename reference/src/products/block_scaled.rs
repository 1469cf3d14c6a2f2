//! Products of activations and weights that are both NVFP4.
//!
//! Σ (a·sa)·(w·sw) over e2m1 codes a, w and their e4m3 block scales is exact like every other
//! product: a code times its scale has 6 significant bits. The f32 sum is multiplied by alpha (the
//! product of the global multipliers of activations and weight, rounded to f32) and rounded to the
//! output's type (vLLM 0.21.0: `g1_alphas` = `w13_weight_scale_2` · `w13_input_scale`, the epilogue
//! D = alpha · accumulator).

use super::bound::{Adder, Class, Order, Reduction};
use super::bounded::Bounded;
use super::columns::Rule;
use super::judge::Judge;
use super::recipe::{Extras, Recipe};
use super::rows::Rows;
use super::schedule::{Step, StepOp};
use super::tensor_core::BlockScaledUnit;
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

const E2M1: ScalarType = ScalarType::FLOAT4_E2M1F;
const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;
/// k per scale.
const BLOCK: usize = 16;

/// Rows of activations quantized by `quantize::scaled_fp4::quantize`.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockScaledRows {
    size_k: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
    /// Multiplier of the dequantized value: 1 / the quantizer's global scale.
    global: f32,
}

impl BlockScaledRows {
    /// Builds rows from `codes` `[M, size_k]`, one per byte, `scales` `[M, size_k / 16]`, and a
    /// global multiplier.
    ///
    /// # Errors
    /// [`Error::Size`] if K is not a multiple of 16 or the multiplier is not positive and finite;
    /// [`Error::Shape`] if codes and scales differ in their rows; [`Error::Value`] for a code of
    /// more than 4 bits or a scale that is NaN or negative.
    pub fn new(size_k: usize, codes: Vec<u8>, scales: Vec<u8>, global: f32) -> Result<Self> {
        if size_k == 0 || !size_k.is_multiple_of(BLOCK) {
            return Err(Error::size("size_k", size_k, format!("a positive multiple of {BLOCK}")));
        }
        if !(global.is_finite() && global > 0.0) {
            let expected = "a positive finite number";
            return Err(Error::size("multiplier of the activations", global, expected));
        }
        if !codes.len().is_multiple_of(size_k) || codes.len() / BLOCK != scales.len() {
            let expected = format!("codes [M, {size_k}] and scales [M, {}]", size_k / BLOCK);
            return Err(Error::shape("activations", &[codes.len(), scales.len()], expected));
        }
        if let Some(i) = codes.iter().position(|&c| c > 15) {
            let at = [i / size_k, i % size_k];
            return Err(Error::value("activation codes", &at, codes[i], "4 bits"));
        }
        if let Some(i) = scales.iter().position(|&s| s > 0x7e) {
            let at = [i / (size_k / BLOCK), i % (size_k / BLOCK)];
            let found = format!("{:#x}", scales[i]);
            return Err(Error::value("activation scales", &at, found, "0 or more, no NaN"));
        }
        Ok(Self { size_k, codes, scales, global })
    }

    /// Code times block scale, exactly.
    fn values(&self) -> Result<Rows> {
        let value = |(i, &code): (usize, &u8)| {
            E2M1.to_f64(code.into()) * E4M3.to_f64(self.scales[i / BLOCK].into())
        };
        Rows::new(self.size_k, self.codes.iter().enumerate().map(value).collect())
    }
}

/// A product of NVFP4 activations with one NVFP4 weight.
#[derive(Debug, Clone)]
pub struct BlockScaledProduct<'p> {
    rows: &'p BlockScaledRows,
    /// The weight, its global scale replaced by alpha.
    weight: Weight<'p>,
    alpha: f32,
    recipe: Recipe,
}

impl<'p> BlockScaledProduct<'p> {
    /// `rows` times `weight`, in `dtype`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a weight that is not e2m1 with e4m3 scales for each 16 k, or has
    /// a bias or zero points, and for another `dtype` than float16 and bfloat16; [`Error::Missing`]
    /// without a global scale; [`Error::Size`] if K differs or alpha is not a normal number;
    /// [`Error::Value`] for a scale that is NaN or negative (units ignore its sign).
    pub fn new(rows: &'p BlockScaledRows, weight: &Weight<'p>, dtype: ScalarType) -> Result<Self> {
        weight.validate()?;
        let name = &weight.name;
        let blocks = Groups::Uniform(GroupSize::Of(BLOCK));
        if (weight.ty, weight.scales.ty()) != (E2M1, E4M3) || weight.groups != blocks {
            let what = format!("{name}: {} with scales of {}", weight.ty, weight.scales.ty());
            return Err(Error::unsupported(what, format!("{E2M1}, {E4M3} for each {BLOCK} k")));
        }
        if !matches!(dtype, ScalarType::FLOAT16 | ScalarType::BFLOAT16) {
            return Err(Error::unsupported(format!("outputs of {dtype}"), "float16 or bfloat16"));
        }
        if let Some(i) = weight.scales.iter_bits().position(|s| s > 0x7e) {
            let at = [i / weight.scales.cols(), i % weight.scales.cols()];
            let found = format!("{:#x}", weight.scales.bits(at[0], at[1]));
            let expected = "0 or more, no NaN";
            return Err(Error::value(format!("{name}: scales"), &at, found, expected));
        }
        if weight.zeros.is_some() || weight.bias.is_some() {
            let what = format!("{name}: zero points or a bias");
            return Err(Error::unsupported(what, "the product has neither"));
        }
        let Some(global) = weight.global_scale else {
            return Err(Error::missing(format!("{name}.global_scale"), "block-scaled products"));
        };
        if weight.shape().size_k != rows.size_k {
            return Err(Error::size(format!("{name}: size_k"), weight.shape().size_k, rows.size_k));
        }
        let alpha = global * rows.global;
        if !alpha.is_normal() {
            let what = format!("{name}: product of the global scales");
            return Err(Error::size(what, alpha, "a normal number"));
        }
        let f32 = ScalarType::FLOAT32;
        let steps =
            [Step { op: StepOp::GlobalScale, ty: f32 }, Step { op: StepOp::Round, ty: dtype }];
        let recipe = Recipe {
            rule: Rule::Exact,
            power: 0,
            moves_bits: false,
            steps: steps.into(),
            any_order: false,
            dtype,
            operands: dtype,
        };
        Ok(Self {
            rows,
            weight: Weight { global_scale: Some(alpha), ..weight.clone() },
            alpha,
            recipe,
        })
    }

    /// The multiplier of the sum.
    pub fn alpha(&self) -> f32 {
        self.alpha
    }

    /// The class of every kernel that computes this product with `unit`, in any order of its
    /// instructions and with partial sums in f32.
    ///
    /// The unit aligns a term by the exponent of its scales, which may exceed the exponent of the
    /// product. The class drops as many fraction bits as the rows and columns require.
    ///
    /// # Errors
    /// Returns an error for invalid rows, which [`BlockScaledRows::new`] excludes.
    pub fn class(&self, unit: &BlockScaledUnit) -> Result<Class> {
        let largest = |codes: &mut dyn Iterator<Item = u32>| {
            codes.filter_map(|code| unit.scale_exponent(code as u8)).max()
        };
        let (size_n, groups) = (self.weight.shape().size_n, self.rows.size_k / BLOCK);
        let above = |scales: Option<i32>, values: super::Range| match scales {
            Some(exponent) if values.bits() > 0 => (exponent - (values.high - 1)).max(0),
            _ => 0,
        };
        let values = self.rows.values()?;
        let of_rows = (0..values.rows()).map(|m| {
            let mut scales = self.rows.scales[m * groups..][..groups].iter().map(|&s| s.into());
            above(largest(&mut scales), values.range(m))
        });
        let scale = |g, n| self.weight.scales.bits(g, n);
        let of_columns = (0..size_n).map(|n| {
            let value = |k| {
                let code = self.weight.codes.get(k, n).into();
                E2M1.to_f64(code) * E4M3.to_f64(scale(k / BLOCK, n))
            };
            let range = super::Range::of((0..self.rows.size_k).map(value));
            above(largest(&mut (0..groups).map(|g| scale(g, n))), range)
        });
        let slack = of_rows.max().unwrap_or(0) + of_columns.max().unwrap_or(0);
        Ok(Class {
            name: "block-scaled-any-order".to_owned(),
            adder: Adder::MatrixUnit {
                products: unit.size_k,
                fraction_bits: (unit.fraction_bits - slack).max(2) as u32,
                kept_bits: 24,
            },
            order: Order::Any,
            reduction: Reduction::F32 { steps: 1 },
            scales_in_unit: true,
        })
    }

    /// Exact result and bounds of every output, row by row, under `class`.
    ///
    /// # Errors
    /// As [`Judge::bounds`].
    pub fn bounds(&self, class: &Class) -> Result<Vec<Bounded>> {
        let (weight, recipe) = (&self.weight, &self.recipe);
        let judge = Judge { weight, order: None, recipe, class, extras: Extras::default() };
        judge.bounds(&self.rows.values()?, None)
    }

    /// The output bits of a kernel that runs the instructions of `unit` in ascending k, starting
    /// from zero; a partial last instruction is padded with zeros.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a unit with other scales than NVFP4.
    pub fn in_order(&self, unit: &BlockScaledUnit) -> Result<Vec<u32>> {
        if (unit.scales, unit.block) != (E4M3, BLOCK) {
            let what = format!("{} for each {} k", unit.scales, unit.block);
            return Err(Error::unsupported(what, format!("{E4M3} for each {BLOCK} k")));
        }
        let (size_k, groups) = (self.rows.size_k, self.rows.size_k / BLOCK);
        let whole = size_k.next_multiple_of(unit.size_k);
        let padded = |mut values: Vec<u8>, len: usize| {
            values.resize(len, 0);
            values
        };
        let side =
            |codes: Vec<u8>, scales: Vec<u8>| (padded(codes, whole), padded(scales, whole / BLOCK));
        let columns: Vec<_> = (0..self.weight.shape().size_n)
            .map(|n| {
                let codes = (0..size_k).map(|k| self.weight.codes.get(k, n)).collect();
                side(codes, (0..groups).map(|g| self.weight.scales.bits(g, n) as u8).collect())
            })
            .collect();
        let mut out = Vec::new();
        for (codes, scales) in self.rows.codes.chunks(size_k).zip(self.rows.scales.chunks(groups)) {
            let (a, sa) = side(codes.to_vec(), scales.to_vec());
            for (n, (b, sb)) in columns.iter().enumerate() {
                let k = a.chunks(unit.size_k).zip(b.chunks(unit.size_k));
                let s = sa.chunks(unit.size_k / BLOCK).zip(sb.chunks(unit.size_k / BLOCK));
                let sum =
                    k.zip(s).fold(0, |c, ((a, b), (sa, sb))| unit.accumulate([a, b], [sa, sb], c));
                let chain = self.recipe.chain(&self.weight, Extras::default(), 0, n);
                let value = chain.run(f64::from(f32::from_bits(sum)));
                out.push(self.recipe.dtype.encode_rne(value));
            }
        }
        Ok(out)
    }
}
