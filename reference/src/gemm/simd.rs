//! The exact product's inner loop compiled for wider vectors than the target's baseline.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]

use super::kernel::{self, Lanes, Pass, ROWS, Track};

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
