//! The block formats: small floats, each block of k with a scale of one byte. Microscaling formats
//! (OCP MX) have powers of two; others have a float scale under a global one.
//!
//! A [`BlockFormat`] describes one of them completely, so configs, selection, cases and loaders name
//! no format. A new format is a file with a `FORMAT` and an entry in
//! [`BLOCK_FORMATS`](super::BLOCK_FORMATS).

use std::fmt;
use std::hash::{Hash, Hasher};

use super::global_scale::GlobalStorage;
use super::mistake::MistakeName;
use crate::Result;
use crate::num::array::FloatView2;
use crate::num::dims::GroupSize;
use crate::num::element::E8m0;
use crate::num::scalar::{ScalarType, stored_type};
use crate::num::tensor::{DType, Tensor};
use crate::quantize::{self, Quantized};
use crate::weight::Weight;

/// k per scale of the Microscaling formats.
pub const MX_BLOCK: usize = 32;

/// Element types that powers of two are stored in.
pub const E8M0_DTYPES: [DType; 2] = [DType::U8, DType::F8E8M0];

/// The tensors of one matrix in a file.
#[derive(Debug, Clone)]
pub struct BlockTensors<'a> {
    /// Codes.
    pub weight: Tensor<'a>,
    /// Scales of blocks.
    pub weight_scale: Tensor<'a>,
    /// The scale over all blocks, and how it is stored.
    pub global: Option<(Tensor<'a>, GlobalStorage)>,
    /// `[size_n]`.
    pub bias: Option<Tensor<'a>>,
    /// Whether the codes have an additional axis for the blocks.
    pub in_blocks: bool,
}

/// Reads a matrix.
pub type UnpackBlocks = for<'a> fn(BlockTensors<'a>, &str) -> Result<Weight<'static>>;

/// Quantizes rows under a global scale: a code for each value and a scale for each block, one byte each.
/// A format without a global scale ignores it.
pub type QuantizeBlocks = for<'a> fn(FloatView2<'a>, f32) -> Result<Quantized<u8, u8>>;

/// One block format.
pub struct BlockFormat {
    /// Name in case files and reports.
    pub name: &'static str,
    /// Type of the codes.
    pub element: ScalarType,
    /// k per scale.
    pub block: usize,
    /// Type of the scales.
    pub scale: ScalarType,
    /// Element types that the scales are stored in, the first in new files.
    pub scale_dtypes: &'static [DType],
    /// Value of `format` in compressed-tensors configs.
    pub compressed_tensors: &'static str,
    /// Value of `scale_dtype` that compressed-tensors configs must have; `None`: any.
    pub compressed_tensors_scale: Option<&'static str>,
    /// Values of `quant_algo` in ModelOpt configs, each with whether activations stay 16 bits wide.
    pub modelopt: &'static [(&'static str, bool)],
    /// Value of `quant_method` that ModelOpt uses for the format.
    pub quant_method: Option<&'static str>,
    /// Values of `quant_method` in configs of checkpoints whose experts alone are quantized, in stacks; the
    /// first is the family's name.
    pub expert_methods: &'static [&'static str],
    /// Possible suffixes of the codes' tensor; the first that exists is used.
    pub weight_suffixes: &'static [&'static str],
    /// Possible suffixes of the scales' tensor.
    pub scale_suffixes: &'static [&'static str],
    /// Possible suffixes of the global scale's tensor; empty if the format has no global scale.
    pub global_suffixes: &'static [&'static str],
    /// Possible suffixes of the activations' global scale; empty if configs do not say whether
    /// activations are quantized.
    pub input_suffixes: &'static [&'static str],
    /// Whether Marlin also supports the format with e4m3 activations.
    pub fp8_activations: bool,
    /// The mistake of upstream's kernel that multiplies the bias by the global scale.
    pub bias_scaled: Option<MistakeName>,
    /// The mistake of block scales that stay where the checkpoint has them.
    pub scales_not_raised: Option<MistakeName>,
    /// Builds the weight of one matrix.
    pub unpack: UnpackBlocks,
    /// Quantizes rows.
    pub quantize: QuantizeBlocks,
}

impl BlockFormat {
    /// Rows of a weight per scale.
    pub const fn group_size(&self) -> GroupSize {
        GroupSize::Of(self.block)
    }

    /// Whether files may keep the experts of a layer in stacks, as gpt-oss does.
    pub const fn has_stacks(&self) -> bool {
        !self.expert_methods.is_empty()
    }

    /// Whether a float32 scale multiplies all blocks.
    pub const fn has_global_scale(&self) -> bool {
        !self.global_suffixes.is_empty()
    }

    /// Whether configs say that activations are quantized in the format too.
    pub const fn quantizes_activations(&self) -> bool {
        !self.input_suffixes.is_empty()
    }

    /// Name in messages.
    pub fn title(&self) -> String {
        self.name.to_uppercase()
    }

    /// Codes in a byte.
    pub const fn codes_per_byte(&self) -> usize {
        8 / self.element.size_bits() as usize
    }

    /// Element type of the scales' tensor in the kernel's format.
    pub fn kernel_scale_dtype(&self) -> DType {
        stored_type(self.scale).unwrap_or(DType::U8)
    }

    /// Element type of the codes' tensor.
    pub fn weight_dtype(&self) -> DType {
        if self.codes_per_byte() == 1 { DType::F8E4M3 } else { DType::U8 }
    }
}

/// [`BlockFormat::quantize`] of e2m1 with powers of two.
pub(super) fn quantize_e2m1(x: FloatView2<'_>, _global: f32) -> Result<Quantized<u8, u8>> {
    quantize_mx(x, ScalarType::FLOAT4_E2M1F, 2)
}

/// [`BlockFormat::quantize`] of e4m3 with powers of two.
pub(super) fn quantize_e4m3(x: FloatView2<'_>, _global: f32) -> Result<Quantized<u8, u8>> {
    quantize_mx(x, ScalarType::FLOAT8_E4M3FN, 0)
}

fn quantize_mx(x: FloatView2<'_>, ty: ScalarType, below: i32) -> Result<Quantized<u8, u8>> {
    let Quantized { codes, scales } = quantize::mx(x, ty, below)?;
    Ok(Quantized { codes, scales: scales.mapv(E8m0::to_bits) })
}

impl PartialEq for BlockFormat {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for BlockFormat {}

impl Hash for BlockFormat {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl fmt::Debug for BlockFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
