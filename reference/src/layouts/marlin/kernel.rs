//! Selection of the instruction set for the packing loops.

use super::repack::{gather_rows, pack_tile_row};
use super::tile::TileMap;

/// An instruction set for which the packing loops are compiled. All give the same words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kernel {
    /// The target's baseline (SSE2, NEON).
    Portable,
    /// AVX2; constructed only after detection.
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Kernel {
    /// The fastest kernel here.
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            return Self::Avx2;
        }
        Self::Portable
    }

    /// [`gather_rows`] on this kernel.
    pub(super) fn gather_rows(
        self,
        source: &[u32],
        width: usize,
        bits: u32,
        perm: &[u32],
        out: &mut Vec<u32>,
    ) {
        match self {
            Self::Portable => gather_rows(source, width, bits, perm, out),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => super::simd::gather_rows_avx2(source, width, bits, perm, out),
        }
    }

    /// [`pack_tile_row`] on this kernel.
    pub(super) fn pack_tile_row(self, map: TileMap, n: usize, rows: &[u32], out: &mut [u32]) {
        match self {
            Self::Portable => pack_tile_row(map, n, rows, out),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => super::simd::pack_tile_row_avx2(map, n, rows, out),
        }
    }
}
