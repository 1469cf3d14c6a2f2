//! The CPU formats: weights in blocks of whole columns, described as data.
//!
//! Files, conversion and kernels find a format in [`CPU_FORMATS`], so they name none. A new format
//! is a layout with a [`CpuFormat`] and an entry there.

use std::fmt;

use super::CPU_FORMATS;
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::weight::Weight;
use crate::{Error, Result};

/// The sizes of one packed matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuSizes {
    /// Rows of the matrix's scales.
    pub groups: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Bytes of the matrix.
    pub packed_len: usize,
}

/// Tables that follow the blocks of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct CpuTables {
    /// A zero point for each group and column.
    pub zero_points: bool,
    /// The order of rows by their groups (act-order).
    pub act_order: bool,
}

impl CpuTables {
    /// Blocks alone.
    pub const NONE: Self = Self { zero_points: false, act_order: false };
}

/// A format of weights for CPU kernels that quantize activations to int8.
pub struct CpuFormat {
    /// Name in descriptions of packed layers.
    pub name: &'static str,
    /// Name in messages.
    pub title: &'static str,
    /// Type of the codes.
    pub element: ScalarType,
    /// How the activations' scales are chosen, for reports.
    pub activations: &'static str,
    /// Possible numbers of columns of a block, the default first.
    pub nr: &'static [usize],
    /// The sizes of a matrix `[K, N]`, for a group size, columns of a block and tables.
    pub sizes: fn(Shape, GroupSize, usize, CpuTables) -> Result<CpuSizes>,
    /// Packs whole columns, for columns of a block.
    pub pack: fn(&Weight<'_>, usize) -> Result<Vec<u8>>,
}

impl PartialEq for CpuFormat {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for CpuFormat {}

impl fmt::Debug for CpuFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CpuFormat").field(&self.name).finish()
    }
}

impl CpuFormat {
    /// The format of this name.
    pub fn from_name(name: &str) -> Option<&'static Self> {
        CPU_FORMATS.into_iter().find(|format| format.name == name)
    }

    /// Checks the number of columns of a block.
    ///
    /// # Errors
    /// [`Error::Size`] unless the format has such blocks.
    pub(super) fn check_nr(nr: usize, known: &[usize]) -> Result<()> {
        match known.contains(&nr) {
            true => Ok(()),
            false => Err(Error::size("nr", nr, format!("one of {known:?}"))),
        }
    }
}
