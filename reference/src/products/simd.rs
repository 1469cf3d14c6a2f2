//! The exact product's inner loop compiled for wider vectors than the target's baseline.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]

use super::kernel::{self, Ends, Lanes, Pass, ROWS, SignLanes, Track};

/// [`kernel::body`] with the widest vectors that the machine has; false when it has none beyond
/// the baseline and nothing was done.
pub(super) fn run(
    rows: [&[f64]; ROWS],
    tile: &[Lanes],
    pass: Pass<'_>,
    tracks: &mut [Track; ROWS],
) -> bool {
    #[target_feature(enable = "avx2")]
    fn avx2(rows: [&[f64]; ROWS], tile: &[Lanes], pass: Pass<'_>, tracks: &mut [Track; ROWS]) {
        kernel::body(rows, tile, pass, tracks);
    }
    #[target_feature(enable = "avx512f")]
    fn avx512(rows: [&[f64]; ROWS], tile: &[Lanes], pass: Pass<'_>, tracks: &mut [Track; ROWS]) {
        kernel::body(rows, tile, pass, tracks);
    }
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the only requirement of `avx512` is AVX-512F, checked above (a cached load).
        unsafe { avx512(rows, tile, pass, tracks) }
        true
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: the only requirement of `avx2` is AVX2, checked above (a cached load).
        unsafe { avx2(rows, tile, pass, tracks) }
        true
    } else {
        false
    }
}

/// [`kernel::ends`] with the widest vectors that the machine has; `None` when it has none beyond
/// the baseline.
pub(super) fn ends(tile: &[Lanes]) -> Option<Ends> {
    #[target_feature(enable = "avx2")]
    fn avx2(tile: &[Lanes]) -> Ends {
        kernel::ends(tile)
    }
    #[target_feature(enable = "avx512f")]
    fn avx512(tile: &[Lanes]) -> Ends {
        kernel::ends(tile)
    }
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the only requirement of `avx512` is AVX-512F, checked above (a cached load).
        Some(unsafe { avx512(tile) })
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: the only requirement of `avx2` is AVX2, checked above (a cached load).
        Some(unsafe { avx2(tile) })
    } else {
        None
    }
}

/// [`kernel::sign_words`] likewise; false when nothing was done.
pub(super) fn signs(tile: &[Lanes], out: &mut Vec<[SignLanes; 2]>) -> bool {
    #[target_feature(enable = "avx2")]
    fn avx2(tile: &[Lanes], out: &mut Vec<[SignLanes; 2]>) {
        kernel::sign_words(tile, out);
    }
    #[target_feature(enable = "avx512f")]
    fn avx512(tile: &[Lanes], out: &mut Vec<[SignLanes; 2]>) {
        kernel::sign_words(tile, out);
    }
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the only requirement of `avx512` is AVX-512F, checked above (a cached load).
        unsafe { avx512(tile, out) }
        true
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: the only requirement of `avx2` is AVX2, checked above (a cached load).
        unsafe { avx2(tile, out) }
        true
    } else {
        false
    }
}
