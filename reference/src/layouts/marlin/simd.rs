//! The packing loops compiled for wider vectors than the target's baseline.
#![cfg_attr(target_arch = "x86_64", allow(unsafe_code))]

#[cfg(target_arch = "x86_64")]
use super::{repack, tile::TileMap};

/// [`repack::pack_tile_row`] with AVX2. Panics on a machine without it.
#[cfg(target_arch = "x86_64")]
pub(super) fn pack_tile_row_avx2(map: TileMap, size_n: usize, rows: &[u32], out: &mut [u32]) {
    #[target_feature(enable = "avx2")]
    fn inner(map: TileMap, size_n: usize, rows: &[u32], out: &mut [u32]) {
        repack::pack_tile_row(map, size_n, rows, out);
    }
    assert!(is_x86_feature_detected!("avx2"));
    // SAFETY: the only requirement of `inner` is AVX2, checked on the line above (a cached load).
    unsafe { inner(map, size_n, rows, out) }
}

/// [`repack::gather_rows`] with AVX2. Panics on a machine without it.
#[cfg(target_arch = "x86_64")]
pub(super) fn gather_rows_avx2(
    source: &[u32],
    width: usize,
    bits: u32,
    perm: &[u32],
    out: &mut Vec<u32>,
) {
    #[target_feature(enable = "avx2")]
    fn inner(source: &[u32], width: usize, bits: u32, perm: &[u32], out: &mut Vec<u32>) {
        repack::gather_rows(source, width, bits, perm, out);
    }
    assert!(is_x86_feature_detected!("avx2"));
    // SAFETY: the only requirement of `inner` is AVX2, checked on the line above (a cached load).
    unsafe { inner(source, width, bits, perm, out) }
}
