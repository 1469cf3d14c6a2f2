//! The weights that this project's CUDA products read: one table for `inspect` and for the kernels.

use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;

/// Least compute capability of the kernels.
pub const CUDA_CAPABILITY: (u32, u32) = (8, 0);

/// How a kernel reads scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CudaScales {
    /// In the type of the activations, 16 bits.
    SixteenBit,
    /// Powers of two.
    E8m0,
    /// Positive e4m3.
    E4m3,
}

/// The k per scale that a kernel takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CudaGroups {
    /// 32, a multiple of 64, or all of k.
    From32,
    /// A multiple of 64, or all of k.
    From64,
    /// One size alone.
    Of(usize),
}

/// A kind of weight that the CUDA products read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CudaWeight {
    /// The meaning of a code.
    pub ty: ScalarType,
    /// Whether each group has a zero point.
    pub zeros: bool,
    /// Scales.
    pub scales: CudaScales,
    /// k per scale.
    pub groups: CudaGroups,
    /// Whether act-order may give groups several sizes.
    pub act_order: bool,
}

const fn row(ty: ScalarType, scales: CudaScales, groups: CudaGroups) -> CudaWeight {
    CudaWeight { ty, zeros: false, scales, groups, act_order: false }
}

/// Every kind.
pub static CUDA_WEIGHTS: [CudaWeight; 7] = {
    use CudaGroups::{From32, From64, Of};
    use CudaScales::{E4m3, E8m0, SixteenBit};
    [
        CudaWeight { act_order: true, ..row(ScalarType::UINT4B8, SixteenBit, From32) },
        CudaWeight { act_order: true, ..row(ScalarType::UINT8B128, SixteenBit, From32) },
        CudaWeight { zeros: true, ..row(ScalarType::UINT4, SixteenBit, From32) },
        row(ScalarType::FLOAT8_E4M3FN, SixteenBit, From64),
        row(ScalarType::FLOAT8_E4M3FN, E8m0, Of(32)),
        row(ScalarType::FLOAT4_E2M1F, E8m0, Of(32)),
        row(ScalarType::FLOAT4_E2M1F, E4m3, Of(16)),
    ]
};

impl CudaGroups {
    /// Whether `group_size` is among them.
    pub const fn contain(self, group_size: GroupSize) -> bool {
        match (self, group_size) {
            (Self::From32 | Self::From64, GroupSize::Channel) => true,
            (Self::From32, GroupSize::Of(32)) => true,
            (Self::From32 | Self::From64, GroupSize::Of(g)) => g.is_multiple_of(64),
            (Self::Of(size), GroupSize::Of(g)) => g == size,
            (Self::Of(_), GroupSize::Channel) => false,
        }
    }
}

impl std::fmt::Display for CudaGroups {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::From32 => f.write_str("groups of 32, of a multiple of 64, or of all k"),
            Self::From64 => f.write_str("groups of a multiple of 64, or of all k"),
            Self::Of(size) => write!(f, "groups of {size}"),
        }
    }
}
