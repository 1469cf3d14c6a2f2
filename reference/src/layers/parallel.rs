//! Tensor parallelism.

use crate::named::named;

named! {
    /// The dimension that tensor parallelism cuts.
    ParallelStyle {
        /// N is cut.
        Column "column",
        /// K is cut.
        Row "row",
    }
}

/// The rank and number of the ranks that share a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorParallel {
    /// Number of ranks.
    pub size: usize,
    /// This rank, below `size`.
    pub rank: usize,
    /// The dimension that is cut.
    pub style: ParallelStyle,
}
