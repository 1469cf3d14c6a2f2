//! Sizes whose mix-up has shipped as a bug, kept apart by type.
//!
//! The packed K of a GPTQ tensor (K / pack) passed where the logical K was meant picks the
//! wrong scale permutation; a group size of −1 used as a stride reads out of bounds.

use std::fmt;

use crate::{Error, Result};

/// Number of rows of the weight matrix as the product sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogicalK(pub usize);

/// Number of 32-bit rows that hold a [`LogicalK`] at some number of bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackedK(pub usize);

impl LogicalK {
    /// Packed rows at `bits` per value; fails unless they fill whole words.
    pub fn packed(self, bits: u32) -> Result<PackedK> {
        let pack = (32 / bits) as usize;
        if !self.0.is_multiple_of(pack) {
            return Err(Error::size("size_k", self.0, format!("a multiple of {pack}")));
        }
        Ok(PackedK(self.0 / pack))
    }
}

impl PackedK {
    /// Logical rows at `bits` per value.
    pub fn logical(self, bits: u32) -> LogicalK {
        LogicalK(self.0 * (32 / bits) as usize)
    }
}

/// How many consecutive k share a scale, as configured. `-1` in files is [`GroupSize::Channel`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupSize {
    /// One scale per output channel.
    Channel,
    /// One scale per this many k (never 0).
    Of(usize),
}

impl GroupSize {
    /// From a configuration's integer: −1 or a positive number.
    pub fn from_config(value: i64) -> Result<Self> {
        match value {
            -1 => Ok(Self::Channel),
            1.. => Ok(Self::Of(value as usize)),
            _ => Err(Error::size("group_size", value, "-1 or a positive number")),
        }
    }

    /// The integer that configurations and case files use.
    pub fn to_config(self) -> i64 {
        match self {
            Self::Channel => -1,
            Self::Of(g) => g as i64,
        }
    }

    /// Number of groups along `size_k`; fails unless the groups divide it.
    pub fn groups(self, size_k: LogicalK) -> Result<usize> {
        match self {
            Self::Channel => Ok(1),
            Self::Of(g) if size_k.0.is_multiple_of(g) => Ok(size_k.0 / g),
            Self::Of(g) => Err(Error::size("size_k", size_k.0, format!("a multiple of group {g}"))),
        }
    }

    /// Rows per group: the whole K when channel-wise.
    pub fn rows(self, size_k: LogicalK) -> usize {
        match self {
            Self::Channel => size_k.0,
            Self::Of(g) => g,
        }
    }

    /// Whether the kernel applies scales inside the product (`group_size < size_k`), which is
    /// what chooses between Marlin's two scale permutations (upstream `marlin_permute_scales`).
    pub fn is_grouped(self, size_k: LogicalK) -> bool {
        matches!(self, Self::Of(g) if g < size_k.0)
    }
}

impl fmt::Display for GroupSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.to_config())
    }
}

/// Shape of one weight matrix: `y[M, N] = x[M, K] · w[K, N]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows: input features.
    pub size_k: usize,
    /// Columns: output features.
    pub size_n: usize,
}

impl Shape {
    /// `K × N`.
    pub const fn new(size_k: usize, size_n: usize) -> Self {
        Self { size_k, size_n }
    }

    /// Number of values.
    pub const fn len(self) -> usize {
        self.size_k * self.size_n
    }

    /// Whether there are no values.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Rows, as a logical size.
    pub const fn k(self) -> LogicalK {
        LogicalK(self.size_k)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "K {} x N {}", self.size_k, self.size_n)
    }
}
