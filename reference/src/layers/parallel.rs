//! Tensor parallelism.

use crate::named::named;

named! {
    /// Which dimension tensor parallelism cuts.
    ParallelStyle {
        /// N is cut.
        Column "column",
        /// K is cut.
        Row "row",
    }
}

/// A rank's place among the ranks that share a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorParallel {
    /// Number of ranks.
    pub size: usize,
    /// This rank, below `size`.
    pub rank: usize,
    /// Which dimension is cut.
    pub style: ParallelStyle,
}
