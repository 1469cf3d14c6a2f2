//! The exact product's inner loop with the widest vectors that the machine has.

use super::columns::TILE;
use super::kernel::{self, Lanes, Pass, ROWS, SignLanes, Track};
use super::rows::Range;
#[cfg(target_arch = "x86_64")]
use super::simd;

/// One pass of `rows` over a tile of columns `[size_k, TILE]`.
pub(super) fn run(
    rows: [&[f64]; ROWS],
    tile: &[Lanes],
    pass: Pass<'_>,
    tracks: &mut [Track; ROWS],
) {
    #[cfg(target_arch = "x86_64")]
    if simd::run(rows, tile, pass, tracks) {
        return;
    }
    kernel::body(rows, tile, pass, tracks);
}

/// The range of each column of a tile.
pub(super) fn ranges(tile: &[Lanes]) -> [Range; TILE] {
    #[cfg(target_arch = "x86_64")]
    if let Some(ends) = simd::ends(tile) {
        return ends.ranges();
    }
    kernel::ends(tile).ranges()
}

/// Appends to `out`, for each 64 rows of a tile, the masks of negative and of nonzero values.
pub(super) fn signs(tile: &[Lanes], out: &mut Vec<[SignLanes; 2]>) {
    #[cfg(target_arch = "x86_64")]
    if simd::signs(tile, out) {
        return;
    }
    kernel::sign_words(tile, out);
}
