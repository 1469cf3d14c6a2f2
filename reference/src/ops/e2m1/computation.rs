//! The packed bytes and the product, and known mistakes as modifications of them.

use super::{E2m1LinearConfig, one_nan, plain_nan};
use crate::Result;
use crate::judge::OutputReport;
use crate::judge::compare::Rows;
use crate::layouts::e2m1::{E2m1Layout, E2m1Rows, GROUP};
use crate::num::scalar::{ScalarType, f32_to_bf16_rtz};
use crate::num::tensor::DType;
use crate::ops::case::Case;
use crate::ops::computation::{Computation, Expected, Form, Mistake, bitwise, known};
use crate::ops::schema::stored;
use crate::w4a8::Values;
use crate::w4a8::e2m1::scalar::{self, Steps};
use crate::w4a8::e2m1::{QuantizedGroups, quantize_groups};

/// `mxfp4_int8_linear`.
#[derive(Debug, Clone)]
pub(super) struct Product {
    config: E2m1LinearConfig,
    layout: E2m1Layout,
    rows: QuantizedGroups,
    x: Vec<f32>,
    blocks: Vec<u8>,
    scales: Vec<u8>,
    bias: Option<Vec<f32>>,
    steps: Steps,
    /// Whether bf16 results are truncated.
    truncated: bool,
}

impl Product {
    pub(super) fn new(case: &Case<'_>, c: &E2m1LinearConfig) -> Result<Self> {
        let x = Values::from_tensor(case.input("x")?)?;
        let bias = match c.has_bias {
            true => Some(case.input("bias")?.elements::<f32>().into_owned()),
            false => None,
        };
        Ok(Self {
            config: c.clone(),
            layout: c.layout()?,
            rows: quantize_groups(&x, c.size_k)?,
            x: x.to_f32(),
            blocks: case.input("weight")?.bytes().to_vec(),
            scales: case.input("weight_scale")?.bytes().to_vec(),
            bias,
            steps: Steps::default(),
            truncated: false,
        })
    }

    fn weight(&self) -> E2m1Rows<'_> {
        E2m1Rows { blocks: &self.blocks, scales: &self.scales, bias: self.bias.as_deref() }
    }

    fn y(&self) -> Result<Vec<u32>> {
        let ty = self.config.dtype;
        let y = scalar::product_with(&self.rows, self.weight(), self.steps)?;
        let y = match self.truncated && ty == ScalarType::BFLOAT16 {
            true => y.into_iter().map(|y| f32_to_bf16_rtz(y).into()).collect(),
            false => Values::from_f32(y, ty)?.bits(),
        };
        Ok(one_nan(y, ty))
    }

    /// The rows again, by another rule: the largest magnitude of a group, and how x · (127 / largest)
    /// becomes a code.
    fn requantize(&mut self, groups: usize, code: fn(f32) -> f32) {
        let (size_k, span) = (self.rows.size_k, GROUP * groups);
        for (m, row) in self.x.chunks_exact(size_k).enumerate() {
            for (s, part) in row.chunks(span).enumerate() {
                let largest = part.iter().fold(0f32, |a, x| a.max(x.abs()));
                if largest < f32::MIN_POSITIVE * 256.0 {
                    continue;
                }
                let from = m * size_k + s * span;
                let codes = &mut self.rows.codes[from..][..part.len()];
                for (q, x) in codes.iter_mut().zip(part) {
                    *q = code(x * (127.0 / largest)) as i8;
                }
                self.rows.half_scales[from / GROUP..][..part.len() / GROUP].fill(largest / 254.0);
            }
        }
    }
}

/// Compares every output that the case has. The sign and payload of a NaN depend on the processor and are
/// not compared.
pub(super) fn judge(case: &Case<'_>, c: &E2m1LinearConfig) -> Result<Vec<OutputReport>> {
    let product = Product::new(case, c)?;
    let Some(found) = case.output("y") else { return bitwise(case, &product) };
    let plain = plain_nan(found)?;
    let mut case = case.clone();
    case.add_output("y", plain);
    bitwise(&case, &product)
}

impl Computation for Product {
    fn outputs(&self) -> Result<Vec<Expected>> {
        let c = &self.config;
        let packed = self.layout.pack(self.weight(), |n| n)?.into_bytes();
        let width = c.dtype.size_bits();
        Ok(vec![
            Expected {
                name: "rhs_packed".to_owned(),
                dtype: DType::U8,
                shape: vec![packed.len()],
                form: Form::list(packed.len(), 8),
                elements: packed.into_iter().map(u32::from).collect(),
            },
            Expected {
                name: "y".to_owned(),
                dtype: stored(c.dtype),
                shape: vec![c.size_m, c.size_n],
                elements: self.y()?,
                form: Form::lines(Rows::List, [c.size_n, c.size_m], width, None),
            },
        ])
    }

    fn mistakes() -> Vec<Mistake<Self>> {
        known! {
            "nibbles-exchanged", "high and low nibbles are exchanged" =>
                |c| c.blocks.iter_mut().for_each(|b| *b = b.rotate_left(4));
            "e8m0-code-0-as-zero", "the scale code 0, 2^-127, was read as zero" => |c| {
                for (codes, &scale) in c.blocks.chunks_exact_mut(GROUP / 2).zip(&c.scales) {
                    if scale == 0 {
                        codes.fill(0);
                    }
                }
            };
            "group-off-by-one", "each group has the scale of the next one" => |c| {
                for row in c.scales.chunks_exact_mut(c.config.size_k / GROUP) {
                    row.rotate_left(1);
                }
            };
            "bias-missing", "the bias is left out" => |c| c.bias = None;
            "accumulation-not-fused", "products with scales are rounded before they are added" =>
                |c| c.steps.unfused = true;
            "groups-descending", "groups are added from the last to the first" =>
                |c| c.steps.descending = true;
            "offset-kept", "the offset that makes doubled weights unsigned is not subtracted" =>
                |c| c.steps.offset_kept = true;
            "int8-accumulation-overflow", "products were added in 16 bits, where large sums saturate" =>
                |c| c.steps.saturated = true;
            "scale-not-halved", "weights are doubled, and the scale is not halved" =>
                |c| c.rows.half_scales.iter_mut().for_each(|s| *s *= 2.0);
            "codes-truncated", "activations are cut off to codes, not rounded" =>
                |c| c.requantize(1, f32::trunc);
            "rounding-half-away", "halves are rounded away from zero, not to even" =>
                |c| c.requantize(1, f32::round);
            "scale-per-token", "activations have a scale for each token, not for each group" =>
                |c| c.requantize(c.config.size_k / GROUP, f32::round_ties_even);
            "output-truncated", "y is cut off, not rounded" => |c| c.truncated = true;
        }
    }
}
