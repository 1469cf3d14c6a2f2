//! MXFP8: e4m3fn weights with a power of two for each 32 k.
//!
//! Source: OCP Microscaling formats; vLLM 0.21.0 `marlin_utils_fp8.py`
//! (`prepare_mxfp8_layer_for_marlin`).

pub use super::blocks::MX_BLOCK as BLOCK;
use super::blocks::{BlockFormat, E8M0_DTYPES, quantize_e4m3};
use crate::formats::parts::{
    bias_table, bias_tensor, block_scales, byte_scales, expect_blocks, expect_type, full, sizes,
};
use crate::formats::words::{codes_from_columns, columns_from_codes, words};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

/// The descriptor for configs, selection, cases and loaders.
pub static FORMAT: BlockFormat = BlockFormat {
    name: "mxfp8",
    element: ScalarType::FLOAT8_E4M3FN,
    block: BLOCK,
    scale: ScalarType::FLOAT8_E8M0FNU,
    scale_dtypes: &E8M0_DTYPES,
    compressed_tensors: "mxfp8-quantized",
    compressed_tensors_scale: Some("uint8"),
    modelopt: &[("MXFP8", true)],
    quant_method: Some("modelopt_mxfp8"),
    expert_methods: &[],
    weight_suffixes: &["weight", "weight_packed"],
    scale_suffixes: &["weight_scale", "weight_scale_inv"],
    global_suffixes: &[],
    input_suffixes: &[],
    fp8_activations: false,
    bias_scaled: None,
    scales_not_raised: None,
    unpack: |t, name| {
        Mxfp8Tensors { weight: t.weight, weight_scale: t.weight_scale, bias: t.bias }.unpack(name)
    },
    quantize: quantize_e4m3,
};

/// The tensors of one matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Mxfp8Tensors<'a> {
    /// `[size_n, size_k]` float8_e4m3fn.
    pub weight: Tensor<'a>,
    /// `[size_n, size_k / 32]` e8m0, as bytes or under its own type.
    pub weight_scale: Tensor<'a>,
    /// `[size_n]`.
    pub bias: Option<Tensor<'a>>,
}

impl<'a> Mxfp8Tensors<'a> {
    /// The same tensors without padding around the scales: the first `size_n` rows and
    /// `size_k / 32` columns. Some writers pad the scales to a kernel's tiles; the padding is never
    /// read (upstream removes it in `prepare_mxfp8_*_for_marlin`).
    ///
    /// # Errors
    /// [`Error::Shape`] if there are too few scales.
    pub fn without_padding(self) -> Result<Mxfp8Tensors<'a>> {
        let [size_n, size_k] = self.weight.dims2()?;
        let [rows, columns] = self.weight_scale.dims2()?;
        let (groups, name) = (size_k / BLOCK, self.weight_scale.name().to_owned());
        if (rows, columns) == (size_n, groups) {
            return Ok(self);
        }
        if rows < size_n || columns < groups {
            let expected = format!("at least [{size_n}, {groups}]");
            return Err(Error::shape(name, self.weight_scale.shape(), expected));
        }
        let dtype = self.weight_scale.dtype();
        self.weight_scale.expect_dtype(&[DType::U8, DType::F8E8M0])?;
        let bytes = self.weight_scale.bytes();
        let kept: Vec<u8> =
            (0..size_n).flat_map(|n| &bytes[n * columns..n * columns + groups]).copied().collect();
        let weight_scale = Tensor::new(name, dtype, vec![size_n, groups], kept)?;
        Ok(Mxfp8Tensors { weight_scale, ..self })
    }
}

impl Mxfp8Tensors<'_> {
    /// The weight. NaN codes are kept.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Dtype`]; [`Error::Value`] for a NaN scale; [`Error::Size`] if K
    /// does not fill whole blocks.
    pub fn unpack(self, name: &str) -> Result<Weight<'static>> {
        self.weight.expect_dtype(&[DType::F8E4M3])?;
        let [size_n, size_k] = sizes(&self.weight)?;
        let shape = Shape::new(size_k, size_n);
        let groups = GroupSize::Of(BLOCK).groups(shape.k())?;
        let e8m0 = ScalarType::FLOAT8_E8M0FNU;
        let weight = Weight {
            name: name.to_owned(),
            ty: ScalarType::FLOAT8_E4M3FN,
            scales: byte_scales(&self.weight_scale, &E8M0_DTYPES, e8m0, [size_n, groups])?,
            bias: bias_table(self.bias.as_ref(), size_n)?,
            codes: codes_from_columns(8, shape, &words(self.weight.into_bytes()))?,
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
    /// [`Error::Unsupported`] unless the weight is e4m3fn with e8m0 scales per 32 k.
    pub fn pack(weight: &Weight<'_>) -> Result<Mxfp8Tensors<'static>> {
        let name = &weight.name;
        expect_type("MXFP8", name, weight.ty, &[ScalarType::FLOAT8_E4M3FN])?;
        expect_blocks("MXFP8", weight, BLOCK, ScalarType::FLOAT8_E8M0FNU)?;
        let Shape { size_k, size_n } = weight.shape();
        let columns = columns_from_codes(&weight.codes);
        let shape = vec![size_n, size_k];
        Ok(Mxfp8Tensors {
            weight: Tensor::from_vec(full(name, "weight"), DType::F8E4M3, shape, columns)?,
            weight_scale: block_scales(weight, DType::U8)?,
            bias: bias_tensor(name, weight.bias.as_ref())?,
        })
    }
}
