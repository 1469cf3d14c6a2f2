//! Kernels for x86-64 beyond its baseline.
//!
//! Their byte products take one unsigned and one signed factor. Weights enter as w + 8 (the nibble with
//! its top bit flipped), and 8·Σq, which is the same for every column, is subtracted from a group's
//! sum. These are integers and exact (modulo 2^32, like the definition's sums). The float operations
//! are those of [`portable`](super::portable).
#![allow(unsafe_code)]

pub(super) mod amx;
mod avx512;
mod stream;
#[cfg(test)]
mod tests;
mod tile;

pub use amx::AmxInt8;
use std::arch::x86_64::{__cpuid_count, CpuidResult};

pub(super) use amx::chains as tile_chains;

use super::panel::for_rows;
use super::{Blocks, Kernel, Panel, Run, Tile};

/// The kernels of this module that this CPU supports, slowest first.
pub(super) fn kernels() -> Vec<Box<dyn Kernel>> {
    let avx2 = Avx2::new().map(|k| Box::new(k) as Box<dyn Kernel>);
    let avx_vnni = AvxVnni::new().map(|k| Box::new(k) as Box<dyn Kernel>);
    let avx512 = Avx512Vnni::new().map(|k| Box::new(k) as Box<dyn Kernel>);
    let amx = AmxInt8::new().map(|k| Box::new(k) as Box<dyn Kernel>);
    avx2.into_iter().chain(avx_vnni).chain(avx512).chain(amx).collect()
}

/// AVX2 and FMA.
#[derive(Debug, Clone, Copy)]
pub struct Avx2(());

impl Kernel for Avx2 {
    fn new() -> Option<Self> {
        let there = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        there.then_some(Self(()))
    }

    fn name(&self) -> &'static str {
        "avx2"
    }

    fn tile(&self, blocks: Blocks<'_>, tile: &mut Tile) {
        // SAFETY: the functions need AVX2 and FMA; `new`, the only constructor of this type,
        // detected both.
        unsafe {
            match blocks.rhs_layout.nr() {
                4 => for_rows!(blocks.panel.rows(), tile::avx2[1](blocks, tile)),
                _ => for_rows!(blocks.panel.rows(), tile::avx2[2](blocks, tile)),
            }
        }
    }
}

/// AVX2 with byte dot products (AVX-VNNI).
#[derive(Debug, Clone, Copy)]
pub struct AvxVnni(());

impl Kernel for AvxVnni {
    fn new() -> Option<Self> {
        let there = Avx2::new().is_some() && is_x86_feature_detected!("avxvnni");
        there.then_some(Self(()))
    }

    fn name(&self) -> &'static str {
        "avx-vnni"
    }

    fn tile(&self, blocks: Blocks<'_>, tile: &mut Tile) {
        // SAFETY: the functions need AVX2, FMA and AVX-VNNI; `new`, the only constructor of this
        // type, detected all of them.
        unsafe {
            match blocks.rhs_layout.nr() {
                4 => for_rows!(blocks.panel.rows(), tile::avx_vnni[1](blocks, tile)),
                _ => for_rows!(blocks.panel.rows(), tile::avx_vnni[2](blocks, tile)),
            }
        }
    }
}

/// AVX-512 with byte dot products (VNNI).
#[derive(Debug, Clone, Copy)]
pub struct Avx512Vnni {
    narrow: Avx2,
    /// Whether one row is faster if four blocks are read at once: on Intel's CPUs, not on AMD's.
    four_streams: bool,
}

/// A leaf of CPUID.
// The intrinsic is unsafe in Rust 1.89 and safe in later versions.
#[allow(unused_unsafe)]
fn cpuid(leaf: u32, subleaf: u32) -> CpuidResult {
    // SAFETY: Every x86-64 CPU has the instruction.
    unsafe { __cpuid_count(leaf, subleaf) }
}

/// Whether CPUID names Intel.
pub(super) fn is_intel() -> bool {
    let id = cpuid(0, 0);
    [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
}

#[cfg(test)]
impl Avx512Vnni {
    /// The kernel with either order of reading.
    fn with_streams(self, four_streams: bool) -> Self {
        Self { four_streams, ..self }
    }
}

impl Kernel for Avx512Vnni {
    fn new() -> Option<Self> {
        let there = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        let narrow = Avx2::new().filter(|_| there)?;
        Some(Self { narrow, four_streams: is_intel() })
    }

    fn name(&self) -> &'static str {
        "avx512-vnni"
    }

    fn tile(&self, blocks: Blocks<'_>, tile: &mut Tile) {
        match blocks.rhs_layout.nr() {
            // SAFETY: the function needs AVX-512 F, VL and VNNI, AVX2 and FMA; `new`, the only
            // constructor of this type, detected all of them.
            4 => unsafe {
                for_rows!(blocks.panel.rows(), tile::avx512_narrow[](blocks, tile));
            },
            _ => self.narrow.tile(blocks, tile),
        }
    }

    fn run(&self, panel: Panel<'_>, rhs: Run<'_>, y: &mut [f32], stride: usize) {
        match (rhs.layout.nr(), panel.rows()) {
            (4, _) => self.run_by_tiles(panel, rhs, y, stride),
            // SAFETY: as in `tile`.
            (_, 1) if !rhs.layout.is_channel_wise() => unsafe {
                match self.four_streams {
                    true => stream::run::<1, 4>(panel, rhs, y, stride),
                    false => stream::run::<1, 1>(panel, rhs, y, stride),
                }
            },
            // SAFETY: as in `tile`.
            (_, 2) if !rhs.layout.is_channel_wise() => unsafe {
                stream::run::<2, 1>(panel, rhs, y, stride);
            },
            // SAFETY: as in `tile`.
            _ => unsafe { for_rows!(panel.rows(), avx512::run[](panel, rhs, y, stride)) },
        }
    }
}
