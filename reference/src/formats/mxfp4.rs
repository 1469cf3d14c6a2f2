//! MXFP4: e2m1 weights with a power of two for each 32 k.
//!
//! Source: OCP Microscaling formats; vLLM 0.21.0 `marlin_utils_fp4.py`. gpt-oss stores the same
//! bytes as `blocks` and `scales`.

pub use super::blocks::MX_BLOCK as BLOCK;
use super::blocks::{BlockFormat, E8M0_DTYPES, quantize_e2m1};
use crate::formats::parts::{
    bias_table, bias_tensor, block_scales, byte_scales, expect_blocks, expect_type, nibble_shape,
    nibble_tensor, unpacked,
};
use crate::formats::words::{codes_from_columns, words};
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

/// The descriptor for configs, selection, cases and loaders.
pub static FORMAT: BlockFormat = BlockFormat {
    name: "mxfp4",
    element: ScalarType::FLOAT4_E2M1F,
    block: BLOCK,
    scale: ScalarType::FLOAT8_E8M0FNU,
    scale_dtypes: &E8M0_DTYPES,
    compressed_tensors: "mxfp4-pack-quantized",
    compressed_tensors_scale: None,
    modelopt: &[],
    quant_method: None,
    expert_methods: &["mxfp4", "gpt_oss_mxfp4"],
    weight_suffixes: &["weight_packed", "weight"],
    scale_suffixes: &["weight_scale"],
    global_suffixes: &[],
    input_suffixes: &[],
    fp8_activations: true,
    bias_scaled: None,
    scales_not_raised: None,
    unpack: |t, name| {
        let tensors = if t.in_blocks {
            Mxfp4Tensors::from_blocks(t.weight, t.weight_scale, t.bias)?
        } else {
            Mxfp4Tensors { weight: t.weight, weight_scale: t.weight_scale, bias: t.bias }
        };
        tensors.unpack(name)
    },
    quantize: quantize_e2m1,
};

/// Bytes of a block's codes.
const BLOCK_BYTES: usize = BLOCK / 2;

/// The tensors of one matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Mxfp4Tensors<'a> {
    /// `[size_n, size_k / 2]` uint8, even k in the low nibble (`weight`, `weight_packed`).
    pub weight: Tensor<'a>,
    /// `[size_n, size_k / 32]` e8m0, as bytes or under its own type.
    pub weight_scale: Tensor<'a>,
    /// `[size_n]`.
    pub bias: Option<Tensor<'a>>,
}

impl<'a> Mxfp4Tensors<'a> {
    /// The same tensors from gpt-oss's form: `blocks` `[size_n, size_k / 32, 16]` uint8.
    ///
    /// # Errors
    /// [`Error::Shape`] if the last axis is not 16.
    pub fn from_blocks(
        blocks: Tensor<'a>,
        scales: Tensor<'a>,
        bias: Option<Tensor<'a>>,
    ) -> Result<Self> {
        let [size_n, groups, bytes] = blocks.dims3()?;
        if bytes != BLOCK_BYTES {
            let expected = format!("[size_n, size_k / {BLOCK}, {BLOCK_BYTES}]");
            return Err(Error::shape(blocks.name(), blocks.shape(), expected));
        }
        let (name, dtype) = (blocks.name().to_owned(), blocks.dtype());
        let row = unpacked(&blocks, groups, BLOCK_BYTES)?;
        let weight = Tensor::new(name, dtype, vec![size_n, row], blocks.into_bytes())?;
        Ok(Self { weight, weight_scale: scales, bias })
    }

    /// The tensors in gpt-oss's form: `blocks`, `scales` and bias.
    ///
    /// # Errors
    /// [`Error::Shape`] if a row of `weight` does not fill whole blocks.
    pub fn into_blocks(self) -> Result<[Option<Tensor<'a>>; 3]> {
        let [size_n, row] = self.weight.dims2()?;
        if !row.is_multiple_of(BLOCK_BYTES) {
            let expected = format!("rows of a multiple of {BLOCK_BYTES} bytes");
            return Err(Error::shape(self.weight.name(), self.weight.shape(), expected));
        }
        let (name, dtype) = (self.weight.name().to_owned(), self.weight.dtype());
        let shape = vec![size_n, row / BLOCK_BYTES, BLOCK_BYTES];
        let blocks = Tensor::new(name, dtype, shape, self.weight.into_bytes())?;
        Ok([Some(blocks), Some(self.weight_scale), self.bias])
    }

    /// The weight.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Dtype`]; [`Error::Value`] for a NaN scale; [`Error::Size`] if K
    /// does not fill whole blocks.
    pub fn unpack(self, name: &str) -> Result<Weight<'static>> {
        let (shape, groups) = nibble_shape(&self.weight, BLOCK)?;
        let e8m0 = ScalarType::FLOAT8_E8M0FNU;
        let weight = Weight {
            name: name.to_owned(),
            ty: ScalarType::FLOAT4_E2M1F,
            scales: byte_scales(&self.weight_scale, &E8M0_DTYPES, e8m0, [shape.size_n, groups])?,
            bias: bias_table(self.bias.as_ref(), shape.size_n)?,
            codes: codes_from_columns(4, shape, &words(self.weight.into_bytes()))?,
            zeros: None,
            groups: Groups::Uniform(GroupSize::Of(BLOCK)),
            global_scale: None,
        };
        weight.validate()?;
        Ok(weight)
    }

    /// The tensors of `weight`, its scales as bytes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless the weight is e2m1 with e8m0 scales per 32 k.
    pub fn pack(weight: &Weight<'_>) -> Result<Mxfp4Tensors<'static>> {
        let name = &weight.name;
        expect_type("MXFP4", name, weight.ty, &[ScalarType::FLOAT4_E2M1F])?;
        expect_blocks("MXFP4", weight, BLOCK, ScalarType::FLOAT8_E8M0FNU)?;
        Ok(Mxfp4Tensors {
            weight: nibble_tensor(weight)?,
            weight_scale: block_scales(weight, DType::U8)?,
            bias: bias_tensor(name, weight.bias.as_ref())?,
        })
    }
}
