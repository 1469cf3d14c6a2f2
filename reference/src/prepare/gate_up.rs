//! The order of gate and up in w13.

use crate::weight::Weight;
use crate::{Error, Result};

/// Order of the columns of w13 (output features; rows of the file's `[N, K]` matrix).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GateUp {
    /// gate 0, up 0, gate 1, up 1, ...: gpt-oss's files, and its kernels in Marlin and Triton.
    Interleaved,
    /// All of gate, then all of up (w1, w3): every other file.
    Halves,
    /// All of up, then all of gate (w3, w1): FlashInfer's CUTLASS kernels.
    SwappedHalves,
}

impl GateUp {
    /// Column of feature `i` of gate (`up` false) or up, of `intermediate` features each.
    pub const fn column(self, i: usize, up: bool, intermediate: usize) -> usize {
        match self {
            Self::Interleaved => 2 * i + up as usize,
            Self::Halves => i + if up { intermediate } else { 0 },
            Self::SwappedHalves => i + if up { 0 } else { intermediate },
        }
    }

    /// For each column of this order, the column that holds the same feature in `from`.
    pub fn columns_from(self, from: Self, intermediate: usize) -> Vec<usize> {
        let mut columns = vec![0; 2 * intermediate];
        for i in 0..intermediate {
            for up in [false, true] {
                columns[self.column(i, up, intermediate)] = from.column(i, up, intermediate);
            }
        }
        columns
    }
}

/// w13 in another order, its scales and bias with it. `reorder(reorder(w, a, b), b, a)` is `w`.
///
/// # Errors
/// [`Error::Size`] when the number of columns is odd.
pub fn reorder(w13: &Weight<'_>, from: GateUp, to: GateUp) -> Result<Weight<'static>> {
    let intermediate = intermediate(w13)?;
    w13.gather_columns(&to.columns_from(from, intermediate))
}

/// Features of gate, which are those of up.
pub(super) fn intermediate(w13: &Weight<'_>) -> Result<usize> {
    let size_n = w13.shape().size_n;
    if size_n.is_multiple_of(2) {
        return Ok(size_n / 2);
    }
    Err(Error::size(format!("{}: size_n", w13.name), size_n, "an even number, gate and up"))
}
