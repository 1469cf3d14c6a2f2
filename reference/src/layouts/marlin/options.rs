//! The options of the kernel format, and the weights that it supports.

use super::{Activations, ScalePermutation};
use crate::num::scalar::ScalarType;
use crate::weight::Weight;
use crate::{Error, Result};

/// Type of the activations that enter the matrix unit (upstream `input_dtype`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum InputDtype {
    /// The model's own 16-bit type.
    #[default]
    Model,
    /// int8, quantized per token.
    Int8,
    /// e4m3, quantized per token.
    Fp8,
}

impl InputDtype {
    /// From a configuration's `input_dtype`: none, [`ScalarType::INT8`] or
    /// [`ScalarType::FLOAT8_E4M3FN`]; another type is [`Error::Unsupported`].
    pub fn from_config(input_dtype: Option<ScalarType>) -> Result<Self> {
        match input_dtype {
            None => Ok(Self::Model),
            Some(ScalarType::INT8) => Ok(Self::Int8),
            Some(ScalarType::FLOAT8_E4M3FN) => Ok(Self::Fp8),
            Some(ty) => {
                Err(Error::unsupported(format!("input_dtype {ty}"), "int8 or float8_e4m3fn"))
            }
        }
    }

    /// Width class that determines the weight's layout.
    pub fn activations(self) -> Activations {
        match self {
            Self::Model => Activations::Bits16,
            Self::Int8 | Self::Fp8 => Activations::Bits8,
        }
    }
}

/// The options of the kernel format.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    /// The model's 16-bit type: scales and biases are converted to it.
    pub dtype: ScalarType,
    /// Activations inside the product.
    pub input_dtype: InputDtype,
    /// NVFP4: the scale factor to use instead of the computed one.
    pub scale_factor: Option<f32>,
    /// int8 activations, if the weights are a part of a stack that is packed in parts: the largest
    /// scale of the whole stack, in the model's type. The scales are then processed even if this
    /// part has only one group.
    pub int8_scale_max: Option<f32>,
    /// act-order: the permutation of each matrix to use instead of the stable sort. Each must
    /// sort its `g_idx`.
    pub perms: Option<&'a [Vec<u32>]>,
    /// The scale permutation to use instead of the one chosen by the matrix's own K.
    pub scale_permutation: Option<ScalePermutation>,
}

impl Options<'_> {
    /// 16-bit activations of `dtype` and defaults for everything else.
    pub fn new(dtype: ScalarType) -> Self {
        Self {
            dtype,
            input_dtype: InputDtype::Model,
            scale_factor: None,
            int8_scale_max: None,
            perms: None,
            scale_permutation: None,
        }
    }
}

/// Returns an error for combinations that upstream refuses.
pub(super) fn check_types(weight: &Weight<'_>, options: &Options<'_>) -> Result<()> {
    let dtype = options.dtype;
    if !matches!(dtype, ScalarType::FLOAT16 | ScalarType::BFLOAT16) {
        return Err(Error::unsupported(format!("activations of {dtype}"), "float16 or bfloat16"));
    }
    let what =
        || format!("{}: {} weights with {:?} input", weight.name, weight.ty, options.input_dtype);
    match (weight.ty, options.input_dtype) {
        (ScalarType::UINT4B8 | ScalarType::UINT4, _) => Ok(()),
        (ScalarType::UINT8B128 | ScalarType::FLOAT8_E4M3FN, InputDtype::Model) => Ok(()),
        (ScalarType::FLOAT4_E2M1F, InputDtype::Model) => Ok(()),
        (ScalarType::FLOAT4_E2M1F, InputDtype::Fp8) if weight.global_scale.is_none() => Ok(()),
        (ScalarType::UINT8B128, _) => {
            Err(Error::unsupported(what(), "Marlin has no W8A8-int8 kernel"))
        }
        (ScalarType::FLOAT8_E4M3FN, _) => {
            Err(Error::unsupported(what(), "Marlin has no W8A8 kernel"))
        }
        (ScalarType::FLOAT4_E2M1F, _) => {
            let expected = "16-bit activations, or fp8 without a global scale of the weight";
            Err(Error::unsupported(what(), expected))
        }
        _ => Err(Error::unsupported(what(), "Marlin has no kernel for this weight type")),
    }
}
