//! MXFP4: e2m1 weights with a power of two for each 32 k.
//!
//! Source: OCP Microscaling formats; vLLM 0.21.0 `marlin_utils_fp4.py`. gpt-oss stores the same
//! bytes as `blocks` and `scales`.

pub use super::mx::BLOCK;
use super::mx::{self, MxFormat};
use crate::formats::parts::{
    bias_table, bias_tensor, block_scales, byte_scales, expect_blocks, expect_type, full, sizes,
    unpacked,
};
use crate::formats::words::{codes_from_columns, columns_from_codes, words};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

/// The descriptor for configs, selection, cases and loaders.
pub static FORMAT: MxFormat = MxFormat {
    name: "mxfp4",
    element: ScalarType::FLOAT4_E2M1F,
    compressed_tensors: "mxfp4-pack-quantized",
    compressed_tensors_scale: None,
    modelopt: None,
    quant_method: None,
    weight_suffixes: &["weight_packed", "weight"],
    scale_suffixes: &["weight_scale"],
    fp8_activations: true,
    unpack: |t, name| {
        let tensors = if t.in_blocks {
            Mxfp4Tensors::from_blocks(t.weight, t.weight_scale, t.bias)?
        } else {
            Mxfp4Tensors { weight: t.weight, weight_scale: t.weight_scale, bias: t.bias }
        };
        tensors.unpack(name)
    },
    exponent_below: 2,
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
            scales: byte_scales(
                &self.weight_scale,
                &mx::SCALE_DTYPES,
                e8m0,
                [shape.size_n, groups],
            )?,
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

/// The logical shape of `[size_n, size_k / 2]` bytes, and the number of blocks along K.
pub(super) fn nibble_shape(weight: &Tensor<'_>, block: usize) -> Result<(Shape, usize)> {
    weight.expect_dtype(&[DType::U8])?;
    let [size_n, bytes] = sizes(weight)?;
    let shape = Shape::new(unpacked(weight, bytes, 2)?, size_n);
    let groups = GroupSize::Of(block).groups(shape.k())?;
    // Blocks of 16 fill whole words, so the check above implies this.
    shape.k().packed(4)?;
    Ok((shape, groups))
}

/// The codes as `[size_n, size_k / 2]` bytes.
pub(super) fn nibble_tensor(weight: &Weight<'_>) -> Result<Tensor<'static>> {
    let Shape { size_k, size_n } = weight.shape();
    let columns = columns_from_codes(&weight.codes);
    let name = full(&weight.name, "weight");
    Tensor::from_vec(name, DType::U8, vec![size_n, size_k / 2], columns)
}
