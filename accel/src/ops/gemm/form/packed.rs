//! What the owner of a packed weight states of it.

use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;

/// An upper bound of the magnitudes of all 16-bit scales. A smaller one makes the kernel faster, with the same bits; a
/// wrong one makes the result wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleBound {
    /// Any scales.
    None,
    /// All are below 1/2.
    BelowHalf,
    /// All are below 1/32.
    Below32nd,
}

/// The scales of a packed weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedScales {
    /// Of the type of the activations. Those of e4m3 codes are multiplied by 2^8 (float16) or 2^120 (bfloat16).
    Bits16 {
        /// Of their magnitudes.
        below: ScaleBound,
    },
    /// e8m0, at most 2^126.
    E8m0 {
        /// Whether none is above 2^7 (e4m3 codes) or 2 (e2m1 codes), which makes the kernel faster.
        is_narrow: bool,
    },
    /// e4m3 that are not negative.
    E4m3,
}

/// Sizes and types of a packed weight for 16-bit activations.
#[derive(Debug, Clone, Copy)]
pub struct Packed {
    /// Of each matrix.
    pub shape: Shape,
    /// Number of matrices.
    pub experts: usize,
    /// Type of activations, bias and outputs: float16 or bfloat16.
    pub dtype: ScalarType,
    /// Type of the codes.
    pub codes: ScalarType,
    /// Of the codes.
    pub scales: PackedScales,
    /// Number of scale groups of a column.
    pub groups: usize,
}
