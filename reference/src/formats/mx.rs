//! The Microscaling formats (OCP MX): small floats in blocks of 32 k, each block with a power of two.
//!
//! An [`MxFormat`] describes one of them completely, so configs, selection, cases and loaders name
//! no format. A new format is a file with a `FORMAT` and an entry in
//! [`MX_FORMATS`](super::MX_FORMATS).

use std::fmt;
use std::hash::{Hash, Hasher};

use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::weight::Weight;
use crate::{Result, quantize};

/// k per scale.
pub const BLOCK: usize = 32;

/// Type of the scales.
pub const SCALE_TYPE: ScalarType = ScalarType::FLOAT8_E8M0FNU;

/// Element types that the scales are stored in.
pub const SCALE_DTYPES: [DType; 2] = [DType::U8, DType::F8E8M0];

/// The tensors of one matrix in a file.
#[derive(Debug, Clone)]
pub struct MxTensors<'a> {
    /// Codes.
    pub weight: Tensor<'a>,
    /// e8m0 scales.
    pub weight_scale: Tensor<'a>,
    /// `[size_n]`.
    pub bias: Option<Tensor<'a>>,
    /// Whether the codes have gpt-oss's form, with an additional axis for the blocks.
    pub in_blocks: bool,
}

/// Codes and scales of quantized rows, one byte each.
pub type Quantized = (Vec<u8>, Vec<u8>);

/// One Microscaling format.
pub struct MxFormat {
    /// Name in case files and reports.
    pub name: &'static str,
    /// Type of the codes.
    pub element: ScalarType,
    /// Value of `format` in compressed-tensors configs.
    pub compressed_tensors: &'static str,
    /// Value of `scale_dtype` that compressed-tensors configs must have; `None`: any.
    pub compressed_tensors_scale: Option<&'static str>,
    /// Value of `quant_algo` in ModelOpt configs, if ModelOpt writes the format.
    pub modelopt: Option<&'static str>,
    /// Value of `quant_method` that ModelOpt uses for the format.
    pub quant_method: Option<&'static str>,
    /// Possible suffixes of the codes' tensor; the first that exists is used.
    pub weight_suffixes: &'static [&'static str],
    /// Possible suffixes of the scales' tensor.
    pub scale_suffixes: &'static [&'static str],
    /// Whether Marlin also supports the format with e4m3 activations.
    pub fp8_activations: bool,
    /// Builds the weight of one matrix.
    pub unpack: for<'a> fn(MxTensors<'a>, &str) -> Result<Weight<'static>>,
    /// Subtracted from the exponent of the block's largest magnitude to get the exponent of the
    /// scale.
    pub exponent_below: i32,
}

impl MxFormat {
    /// Rows of a weight per scale.
    pub const GROUP_SIZE: GroupSize = GroupSize::Of(BLOCK);

    /// Codes and scales of rows of `cols` columns, one byte each.
    ///
    /// # Errors
    /// As [`quantize::mx`].
    pub fn quantize(&self, x: &[f32], cols: usize) -> Result<Quantized> {
        quantize::mx(x, cols, self.element, self.exponent_below)
    }

    /// Codes in a byte.
    pub const fn codes_per_byte(&self) -> usize {
        8 / self.element.size_bits() as usize
    }

    /// Element type of the codes' tensor.
    pub fn weight_dtype(&self) -> DType {
        if self.codes_per_byte() == 1 { DType::F8E4M3 } else { DType::U8 }
    }
}

impl PartialEq for MxFormat {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for MxFormat {}

impl Hash for MxFormat {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl fmt::Debug for MxFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
