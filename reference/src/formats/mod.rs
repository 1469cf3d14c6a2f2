//! Checkpoint bytes to [`crate::weight::Weight`], one file per format, and back.
//!
//! Each format is a struct of its tensors with two methods: `unpack` builds a weight, and its
//! inverse `pack` builds the tensors. Names, shapes and element types are checked first, then
//! invalid values; every error names the tensor.
//!
//! | format | weight | scales | more |
//! | --- | --- | --- | --- |
//! | [`gptq`] | `qweight` `[K/pack, N]` int32 | `scales` `[G, N]` | `qzeros` `[G, N/pack]`, `g_idx` `[K]` |
//! | [`awq`] | `qweight` `[K, N/pack]` int32 | `scales` `[G, N]` | `qzeros` `[G, N/pack]` |
//! | [`compressed_tensors`] | `weight_packed` `[N, K/pack]` int32, or `weight` `[N, K]` int8 | `weight_scale` `[N, G]` | `weight_zero_point`, `weight_shape`, `weight_g_idx` |
//! | [`fp8`] | `weight` `[N, K]` e4m3fn | `weight_scale`, `weight_scale_inv` | |
//! | [`int8`] | `weight` `[N, K]` int8 | `weight_scale` | `input_scale`, `input_zero_point` |
//! | [`mxfp8`] | `weight` `[N, K]` e4m3fn | `weight_scale` `[N, K/32]` e8m0 | |
//! | [`mxfp4`] | `weight` `[N, K/2]` uint8 | `weight_scale` `[N, K/32]` e8m0 | `blocks`, `scales` of gpt-oss |
//! | [`nvfp4`] | `weight` `[N, K/2]` uint8 | `weight_scale` `[N, K/16]` e4m3fn | a global scale |

pub mod awq;
pub mod blocks;
pub mod compressed_tensors;
pub mod fp8;
pub mod global_scale;
pub mod gptq;
pub mod int8;
pub mod integers;
pub mod mistake;
pub mod mxfp4;
pub mod mxfp8;
pub mod nvfp4;
mod parts;
mod values;
mod words;

use std::fmt;

use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;

pub use crate::num::scalar::float_type;
pub use values::expect_finite;
pub(crate) use values::unflatten;
pub use words::transpose_words;
pub(crate) use words::transposed;

use blocks::BlockFormat;
use integers::{IntFormat, Interleave, Packing};

/// A quantization format: how a file or a case stores a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// Integers with real scales.
    Int(&'static IntFormat),
    /// e4m3fn with real scales.
    Fp8,
    /// Small floats with a scale of one byte per block.
    Block(&'static BlockFormat),
}

/// Every format that cases hold, in the order in which messages list them.
pub static ALL: [Format; 6] = [
    Format::Int(&gptq::FORMAT),
    Format::Int(&awq::FORMAT),
    Format::Fp8,
    Format::Block(&mxfp8::FORMAT),
    Format::Block(&nvfp4::FORMAT),
    Format::Block(&mxfp4::FORMAT),
];

/// Every block format, in the order in which messages list them.
pub static BLOCK_FORMATS: [&BlockFormat; 3] = [&nvfp4::FORMAT, &mxfp4::FORMAT, &mxfp8::FORMAT];

/// The block format of these codes in blocks of this size.
pub fn block_format(element: ScalarType, group_size: GroupSize) -> Option<&'static BlockFormat> {
    BLOCK_FORMATS.into_iter().find(|f| f.element == element && f.group_size() == group_size)
}

/// Titles of the formats that `include` selects, for messages: `MXFP8, MXFP4`.
pub fn titles(include: impl Fn(Format) -> bool) -> String {
    let titles = ALL.into_iter().filter(|&format| include(format)).map(Format::title);
    titles.collect::<Vec<_>>().join(", ")
}

/// Names of the formats that `include` selects, for messages: `mxfp8, mxfp4`.
pub fn names(include: impl Fn(Format) -> bool) -> String {
    let names = ALL.into_iter().filter(|&format| include(format)).map(Format::name);
    names.collect::<Vec<_>>().join(", ")
}

/// The integer formats that cases hold.
pub fn int_formats() -> impl Iterator<Item = &'static IntFormat> {
    ALL.into_iter().filter_map(|format| match format {
        Format::Int(format) => Some(format),
        _ => None,
    })
}

/// Every order of columns that an integer format has.
pub fn interleaves() -> impl Iterator<Item = &'static Interleave> {
    int_formats().filter_map(|format| match format.packing {
        Packing::AlongN(interleave) => Some(interleave),
        _ => None,
    })
}

impl Format {
    /// Name in case files and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int(format) => format.name,
            Self::Fp8 => "fp8",
            Self::Block(format) => format.name,
        }
    }

    /// Name in messages.
    pub fn title(self) -> String {
        self.name().to_uppercase()
    }

    /// Every format with its name.
    pub fn named() -> [(&'static str, Self); ALL.len()] {
        ALL.map(|format| (format.name(), format))
    }

    /// The weight types that the format can hold.
    pub fn weight_types(self) -> &'static [ScalarType] {
        match self {
            Self::Int(format) => format.case_types,
            Self::Fp8 => &[ScalarType::FLOAT8_E4M3FN],
            Self::Block(format) => std::slice::from_ref(&format.element),
        }
    }

    /// The group size that the format itself fixes.
    pub const fn fixed_group(self) -> Option<GroupSize> {
        match self {
            Self::Block(format) => Some(format.group_size()),
            _ => None,
        }
    }

    /// Whether rows may belong to groups by `g_idx`.
    pub const fn has_act_order(self) -> bool {
        matches!(self, Self::Int(IntFormat { act_order: true, .. }))
    }

    /// Whether files may keep the experts of a layer in stacks.
    pub const fn has_stacks(self) -> bool {
        matches!(self, Self::Block(format) if format.has_stacks())
    }

    /// Whether a float32 scale multiplies all blocks.
    pub const fn has_global_scale(self) -> bool {
        matches!(self, Self::Block(format) if format.has_global_scale())
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
