//! NVFP4: e2m1 weights, an e4m3fn scale for each 16 k, and a float32 scale over all.
//!
//! Source: vLLM 0.21.0 `compressed_tensors_w4a16_nvfp4.py` (stores a divisor), `modelopt.py`
//! (stores a multiplier, `weight_scale_2`), `marlin_utils_fp4.py`.

use crate::formats::blocks::BlockFormat;
use crate::formats::global_scale::{GlobalScale, GlobalStorage, multiplier};
use crate::formats::mistake::MistakeName;
use crate::formats::parts::{
    bias_table, bias_tensor, block_scales, byte_scales, expect_blocks, expect_type, full,
    nibble_shape, nibble_tensor,
};
use crate::formats::values::find;
use crate::formats::words::{codes_from_columns, words};
use crate::num::dims::GroupSize;
use crate::num::element::{E2m1, E4m3fn};
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::quantize::{Quantized, scaled_fp4};
use crate::weight::{Groups, Weight};
use crate::{Error, Result};

/// k per scale.
pub const BLOCK: usize = scaled_fp4::BLOCK;

/// The descriptor for configs, selection, cases and loaders.
pub static FORMAT: BlockFormat = BlockFormat {
    name: "nvfp4",
    element: ScalarType::FLOAT4_E2M1F,
    block: BLOCK,
    scale: ScalarType::FLOAT8_E4M3FN,
    scale_dtypes: &[DType::F8E4M3],
    compressed_tensors: "nvfp4-pack-quantized",
    compressed_tensors_scale: None,
    modelopt: &[("NVFP4", false), ("W4A16_NVFP4", true)],
    quant_method: Some("modelopt_fp4"),
    expert_methods: &[],
    weight_suffixes: &["weight_packed", "weight"],
    scale_suffixes: &["weight_scale"],
    global_suffixes: &["weight_global_scale", "weight_scale_2"],
    input_suffixes: &["input_global_scale", "input_scale"],
    fp8_activations: false,
    bias_scaled: Some(MistakeName {
        id: "upstream-nvfp4-bias-scaled",
        text: "a fault of vLLM 0.21.0's kernel (moe_wna16_marlin_gemm): the global scale is folded \
               into the router weights and multiplies the bias as well",
    }),
    scales_not_raised: Some(MistakeName {
        id: "nvfp4-factor-missing",
        text: "the block scales were not scaled to the top of their range",
    }),
    unpack: |t, name| {
        let (weight, weight_scale, bias) = (t.weight, t.weight_scale, t.bias);
        let Some((weight_global_scale, storage)) = t.global else {
            return Err(Error::missing(format!("{name}.weight_global_scale"), "the scheme"));
        };
        Nvfp4Tensors { weight, weight_scale, weight_global_scale, bias }.unpack(name, storage)
    },
    quantize: |x, global_scale| {
        let Quantized { codes, scales } = scaled_fp4::quantize(x, global_scale)?;
        Ok(Quantized { codes: codes.mapv(E2m1::to_bits), scales: scales.mapv(E4m3fn::to_bits) })
    },
};

/// The tensors of one matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Nvfp4Tensors<'a> {
    /// `[size_n, size_k / 2]` uint8, even k in the low nibble (`weight`, `weight_packed`).
    pub weight: Tensor<'a>,
    /// `[size_n, size_k / 16]` float8_e4m3fn.
    pub weight_scale: Tensor<'a>,
    /// `[]`, `[1]` or `[shards]` float32: `weight_global_scale` or `weight_scale_2`.
    pub weight_global_scale: Tensor<'a>,
    /// `[size_n]`.
    pub bias: Option<Tensor<'a>>,
}

impl Nvfp4Tensors<'_> {
    /// The weight; its global scale is the multiplier.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Dtype`]; [`Error::Value`] for a block scale that is NaN or
    /// negative (the kernel has no bit for its sign), a global scale that is not positive and
    /// finite, and shards that differ under
    /// [`Shards::Equal`](super::global_scale::Shards::Equal); [`Error::Size`] if K does not fill
    /// whole blocks.
    pub fn unpack(self, name: &str, scheme: GlobalStorage) -> Result<Weight<'static>> {
        let (shape, groups) = nibble_shape(&self.weight, BLOCK)?;
        let e4m3 = ScalarType::FLOAT8_E4M3FN;
        let sizes = [shape.size_n, groups];
        let scales = byte_scales(&self.weight_scale, &[DType::F8E4M3], e4m3, sizes)?;
        find(&self.weight_scale, e4m3, |v| v < 0.0, "a scale of 0 or more")?;
        let weight = Weight {
            name: name.to_owned(),
            ty: ScalarType::FLOAT4_E2M1F,
            scales,
            global_scale: Some(multiplier(&self.weight_global_scale, scheme)?),
            bias: bias_table(self.bias.as_ref(), shape.size_n)?,
            codes: codes_from_columns(4, shape, &words(self.weight.into_bytes()))?,
            zeros: None,
            groups: Groups::Uniform(GroupSize::Of(BLOCK)),
        };
        weight.validate()?;
        Ok(weight)
    }

    /// The tensors of `weight`. A divisor is the reciprocal of the multiplier in float32, so a
    /// round trip may change its last bit.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless the weight is e2m1 with e4m3fn scales per 16 k,
    /// [`Error::Missing`] without a global scale.
    pub fn pack(weight: &Weight<'_>, global: GlobalScale) -> Result<Nvfp4Tensors<'static>> {
        let name = &weight.name;
        expect_type("NVFP4", name, weight.ty, &[ScalarType::FLOAT4_E2M1F])?;
        expect_blocks("NVFP4", weight, BLOCK, ScalarType::FLOAT8_E4M3FN)?;
        let (suffix, stored) = match (global, weight.global_scale) {
            (_, None) => return Err(Error::missing(full(name, "global_scale"), "NVFP4")),
            (GlobalScale::Divisor, Some(x)) => ("weight_global_scale", 1.0 / x),
            (GlobalScale::Multiplier, Some(x)) => ("weight_scale_2", x),
        };
        let stored = vec![stored];
        Ok(Nvfp4Tensors {
            weight: nibble_tensor(weight)?,
            weight_scale: block_scales(weight, DType::F8E4M3)?,
            weight_global_scale: Tensor::from_vec(full(name, suffix), DType::F32, vec![1], stored)?,
            bias: bias_tensor(name, weight.bias.as_ref())?,
        })
    }
}
