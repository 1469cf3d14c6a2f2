//! Requantization of FP8 blocks to scales that are powers of two, for DeepGEMM on Blackwell.

use bytemuck::allocation::cast_vec;
use serde_json::{Value, json};

use crate::Result;
use crate::judge::compare::Rows;
use crate::num::array::rows_of;
use crate::num::element::E4m3fn;
use crate::num::tensor::DType;
use crate::ops::Operation;
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Defined, Expected, Form, Mistake, ids, known};
use crate::ops::draw::{Rng, e4m3, positive_values};
use crate::ops::fp8_blocks::BlockSize;
use crate::ops::schema::{CaseError, Inputs, Reader, TensorRule, positive};
use crate::ops::tensors::{E4M3, F32, input, is, output};
use crate::quantize::{ceil_to_ue8m0, per_block_fp8, requantize_ue8m0};

/// Config of `requant_weight_ue8m0_inplace`: FP8 blocks whose scales become powers of two.
///
/// in: `weight` `[N, K]` e4m3fn, `weight_scale` `[⌈N / n⌉, ⌈K / k⌉]` f32 of blocks `[n, k]`. out: the same
/// names, types and shapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequantUe8m0Config {
    /// Rows of the weight.
    pub size_n: usize,
    /// Columns of the weight.
    pub size_k: usize,
    /// Rows and columns that share a scale.
    pub block: BlockSize,
}

impl RequantUe8m0Config {
    fn blocks(&self) -> [usize; 2] {
        [self.size_n.div_ceil(self.block.n), self.size_k.div_ceil(self.block.k)]
    }
}

impl Operation for RequantUe8m0Config {
    fn keys() -> &'static [&'static str] {
        &["size_n", "size_k", "weight_block_size"]
    }

    fn read(r: &Reader<'_>) -> Result<Self, CaseError> {
        let sizes = r.sizes("weight_block_size")?.unwrap_or_else(|| vec![128, 128]);
        let [n, k] = sizes[..] else {
            let found = serde_json::json!(sizes);
            return Err(r.refuse("weight_block_size", found, "rows and columns of a block"));
        };
        let block = BlockSize { n, k };
        Ok(Self { size_n: r.size("size_n")?, size_k: r.size("size_k")?, block })
    }

    fn json(&self) -> Value {
        json!({
            "size_n": self.size_n, "size_k": self.size_k,
            "weight_block_size": [self.block.n, self.block.k],
        })
    }

    fn tensors(&self, _experts: usize) -> Result<Vec<TensorRule>> {
        let (weight, scales) = ([is(self.size_n), is(self.size_k)], self.blocks().map(is));
        Ok(vec![
            input("weight", E4M3, &weight),
            input("weight_scale", F32, &scales),
            output("weight", E4M3, &weight),
            output("weight_scale", F32, &scales),
        ])
    }

    fn check_inputs(&self, inputs: &Inputs<'_>) -> Result<()> {
        positive(&inputs["weight_scale"])
    }

    /// Whole blocks, parts of blocks in both directions, and small blocks.
    fn lattice() -> Result<Vec<Self>> {
        let small = BlockSize { n: 4, k: 8 };
        let sizes =
            [(128, 128, BlockSize::DEEPSEEK), (130, 200, BlockSize::DEEPSEEK), (9, 20, small)];
        Ok(sizes.map(|(size_n, size_k, block)| Self { size_n, size_k, block }).into())
    }

    fn computation(&self, case: &Case<'_>) -> Result<Option<Box<dyn Defined>>> {
        Ok(Some(Box::new(Requantization::new(case, self)?)))
    }

    fn mistakes() -> Vec<&'static str> {
        ids::<Requantization>()
    }

    fn draw_inputs(&self, case: &mut Case<'static>, rng: &mut Rng) -> Result<()> {
        case.add_input("weight", e4m3(rng, vec![self.size_n, self.size_k])?);
        case.add_input("weight_scale", positive_values(rng, self.blocks().to_vec())?);
        Ok(())
    }
}

/// How the operation is done: as defined, or by mistake.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Defined,
    /// Scales are rounded up; codes keep their bits.
    ScalesOnly,
    /// Codes are requantized; scales keep their bits.
    CodesOnly,
    /// Scales become the next power of two of the old ones, and codes follow.
    OldScales,
    /// New scales are not rounded to powers of two.
    NotRounded,
    /// The old scales were divided by.
    Inverted,
}

/// `requant_weight_ue8m0_inplace`.
#[derive(Debug, Clone)]
struct Requantization {
    config: RequantUe8m0Config,
    codes: Vec<u8>,
    scales: Vec<f32>,
    way: Way,
}

impl Requantization {
    fn new(case: &Case<'_>, c: &RequantUe8m0Config) -> Result<Self> {
        let scales = case.input("weight_scale")?.elements::<f32>().into_owned();
        let codes = case.input("weight")?.bytes().to_vec();
        Ok(Self { config: c.clone(), codes, scales, way: Way::Defined })
    }

    /// The number of the block of element `i`.
    fn block(&self, i: usize) -> usize {
        let c = &self.config;
        i / c.size_k / c.block.n * c.blocks()[1] + i % c.size_k / c.block.k
    }

    /// The weight's values under `scale`.
    fn values(&self, scale: impl Fn(f32) -> f32) -> Vec<f32> {
        let value = |(i, &code): (usize, &u8)| {
            E4m3fn::from_bits(code).to_f32() * scale(self.scales[self.block(i)])
        };
        self.codes.iter().enumerate().map(value).collect()
    }

    /// Codes and scales.
    fn made(&self) -> Result<(Vec<u8>, Vec<f32>)> {
        let c = &self.config;
        let block = [c.block.n, c.block.k];
        let quantized = |values: &[f32], ue8m0| {
            let made = per_block_fp8(rows_of("weight", values, c.size_k)?, block, ue8m0)?;
            let (codes, scales) = made.into_vecs();
            Ok::<_, crate::Error>((cast_vec(codes), scales))
        };
        match self.way {
            Way::Defined | Way::ScalesOnly | Way::CodesOnly => {
                let codes = self.codes.iter().map(|&b| E4m3fn::from_bits(b)).collect();
                let codes = crate::quantize::matrix(c.size_n, codes);
                let scales = crate::quantize::matrix(c.blocks()[0], self.scales.clone());
                let (codes, scales) = requantize_ue8m0(&codes, &scales, block)?.into_vecs();
                Ok(match self.way {
                    Way::ScalesOnly => (self.codes.clone(), scales),
                    Way::CodesOnly => (cast_vec(codes), self.scales.clone()),
                    _ => (cast_vec(codes), scales),
                })
            }
            Way::OldScales => {
                let scales: Vec<f32> = self.scales.iter().map(|&s| ceil_to_ue8m0(s)).collect();
                let values = self.values(|s| s).into_iter().enumerate();
                let code = |(i, v): (usize, f32)| {
                    E4m3fn::from_f32_rne_saturating(v / scales[self.block(i)]).to_bits()
                };
                Ok((values.map(code).collect(), scales))
            }
            Way::NotRounded => quantized(&self.values(|s| s), false),
            Way::Inverted => quantized(&self.values(|s| 1.0 / s), true),
        }
    }
}

impl Computation for Requantization {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let c = &self.config;
        let (codes, scales) = self.made()?;
        let [rows, cols] = c.blocks();
        Ok(vec![
            Expected {
                name: "weight".to_owned(),
                dtype: DType::F8E4M3,
                shape: vec![c.size_n, c.size_k],
                elements: codes.iter().map(|&b| b.into()).collect(),
                form: Form::lines(Rows::K, [c.size_k, c.size_n], 8, None),
            },
            Expected {
                name: "weight_scale".to_owned(),
                dtype: DType::F32,
                shape: vec![rows, cols],
                elements: scales.iter().map(|s| s.to_bits()).collect(),
                form: Form::lines(Rows::Group, [cols, rows], 32, None),
            },
        ])
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "codes-not-requantized", "the scales were rounded up, the codes were not requantized" =>
                |c| c.way = Way::ScalesOnly;
            "scale-not-replaced", "the codes were requantized, the scales were not replaced" =>
                |c| c.way = Way::CodesOnly;
            "old-scales-rounded", "the old scales were rounded up, where new ones follow from the values" =>
                |c| c.way = Way::OldScales;
            "scale-not-rounded", "the new scales are no powers of two" =>
                |c| c.way = Way::NotRounded;
            "scale-inverted", "codes were divided by their scales where they are multiplied" =>
                |c| c.way = Way::Inverted;
        }
    }
}
