//! The hub: one quantized matrix, independent of the file that it comes from and of the kernel that
//! reads it. Every checkpoint format produces a [`Weight`], every layout consumes one.
//!
//! From a float matrix to a kernel's bytes:
//!
//! ```
//! use marlinspike::layouts::kleidi::RhsLayout;
//! use marlinspike::num::element::f16;
//! use marlinspike::quantize::quantize_weights;
//! use marlinspike::weight::Groups;
//! use marlinspike::{GroupSize, MarlinOptions, ScalarType, pack_marlin};
//! use ndarray::Array2;
//!
//! let group_size = GroupSize::Of(32);
//! let w = Array2::from_shape_fn((128, 64), |(k, n)| f16::from_f32((k + n) as f32 / 512.0 - 0.2));
//! let mut weight = quantize_weights(w.view(), ScalarType::UINT4B8, group_size)?
//!     .into_weight(Groups::Uniform(group_size))?;
//!
//! // Marlin's tensors of a stack of one matrix: `qweight`, `scales`.
//! let options = MarlinOptions::new(ScalarType::FLOAT16);
//! let marlin = pack_marlin(std::slice::from_ref(&weight), options)?;
//! assert_eq!(marlin.qweight.shape(), [1, 128 / 16, 64 * 16 / 8]);
//!
//! // The bytes of Arm's int4 kernels, whose group scales are bfloat16.
//! weight.scales = weight.scales.rounded(ScalarType::BFLOAT16);
//! let arm = RhsLayout::new(weight.shape(), group_size, 8)?.pack_weight(&weight)?;
//! assert!(arm.bytes().len() > 128 * 64 / 2);
//! # Ok::<(), marlinspike::Error>(())
//! ```

mod codes;
mod dequantize;
mod slice;
mod table;

pub use codes::Codes;
pub use table::{Table, TableData};

use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::{Error, Result};

/// Which group each row k belongs to.
#[derive(Debug, Clone, PartialEq)]
pub enum Groups {
    /// Row k belongs to group k / group_size (channel-wise: to group 0).
    Uniform(GroupSize),
    /// act-order: row k belongs to group `g_idx[k]`, one of the scale table's rows.
    Indexed {
        /// `[size_k]` group of each row, in checkpoint order. For a tensor-parallel rank: its slice,
        /// with the groups of the whole matrix.
        g_idx: Vec<u32>,
        /// The configured group size.
        group_size: GroupSize,
    },
}

impl Groups {
    /// The configured group size.
    pub fn group_size(&self) -> GroupSize {
        match *self {
            Self::Uniform(g) => g,
            Self::Indexed { group_size, .. } => group_size,
        }
    }

    /// Group of row `k` of a matrix.
    pub fn group_of(&self, k: usize) -> usize {
        match self {
            Self::Uniform(GroupSize::Channel) => 0,
            Self::Uniform(GroupSize::Of(g)) => k / g,
            Self::Indexed { g_idx, .. } => g_idx[k] as usize,
        }
    }
}

/// One quantized weight matrix `[size_k, size_n]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Weight<'a> {
    /// The module, for error messages (`model.layers.0.mlp.up_proj`).
    pub name: String,
    /// The type of the codes.
    pub ty: ScalarType,
    /// The codes `[size_k, size_n]`.
    pub codes: Codes<'a>,
    /// Scales `[groups, size_n]`, in the checkpoint's own type.
    pub scales: Table,
    /// Zero points `[groups, size_n]` as codes (asymmetric types only).
    pub zeros: Option<Table>,
    /// The group of each row.
    pub groups: Groups,
    /// Second-level scale of NVFP4, as a multiplier of the dequantized value.
    pub global_scale: Option<f32>,
    /// Bias `[1, size_n]`.
    pub bias: Option<Table>,
}

impl Weight<'_> {
    /// Matrix shape.
    pub fn shape(&self) -> Shape {
        self.codes.shape()
    }

    /// Whether a code is e4m3's NaN.
    pub fn has_nan_codes(&self) -> bool {
        // NaN: all bits but the sign are set.
        let nan = |word: &u32| word.to_le_bytes().iter().any(|b| b & 0x7f == 0x7f);
        self.ty == ScalarType::FLOAT8_E4M3FN && self.codes.words().iter().any(nan)
    }

    /// Checks that the parts agree: table shapes, group range.
    pub fn validate(&self) -> Result<()> {
        let Shape { size_k, size_n } = self.shape();
        let groups = self.scales.rows();
        if self.scales.cols() != size_n {
            return Err(Error::shape(
                format!("{}: scales", self.name),
                &[groups, self.scales.cols()],
                format!("[groups, {size_n}]"),
            ));
        }
        if let Some(zeros) = &self.zeros
            && (zeros.rows(), zeros.cols()) != (groups, size_n)
        {
            return Err(Error::shape(
                format!("{}: zeros", self.name),
                &[zeros.rows(), zeros.cols()],
                format!("[{groups}, {size_n}]"),
            ));
        }
        match &self.groups {
            Groups::Uniform(g) => {
                let expected = g.groups(self.shape().k())?;
                if groups != expected {
                    return Err(Error::shape(
                        format!("{}: scales", self.name),
                        &[groups, size_n],
                        format!("[{expected}, {size_n}] for group_size {g}"),
                    ));
                }
            }
            Groups::Indexed { g_idx, .. } => {
                if g_idx.len() != size_k {
                    return Err(Error::shape(
                        format!("{}: g_idx", self.name),
                        &[g_idx.len()],
                        format!("[{size_k}]"),
                    ));
                }
                if let Some(k) = g_idx.iter().position(|&g| g as usize >= groups) {
                    return Err(Error::value(
                        format!("{}: g_idx", self.name),
                        &[k],
                        g_idx[k],
                        format!("a group below {groups}"),
                    ));
                }
            }
        }
        Ok(())
    }
}
