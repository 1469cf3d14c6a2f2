//! The two matrices of an expert.

/// A matrix of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Projection {
    /// Gate (w1) and up (w3) merged, N = 2 · intermediate size with w1 first, or only up.
    W13,
    /// Down: N = hidden size, K = intermediate size.
    W2,
}

/// Rows of the epilogue's tile in the kernels whose weights are shuffled.
pub(super) const EPILOGUE_TILE_M: usize = 128;
