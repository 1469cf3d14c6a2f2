//! Kernels for aarch64: dot products of bytes (dotprod), and 2 x 2 products of them (i8mm).
//!
//! A 16-byte piece of a weight block is two columns of eight k, a piece of two activation rows has
//! the same shape: the operands of `smmla` as they stand in memory. What costs is all the rest, so
//! there is as little of it as can be:
//!
//! - A nibble becomes a byte in one instruction, as 16·w: `shl` for the low one, `and` for the high
//!   one. Integer sums are 16·Σqw.
//! - The sums of a group begin at the bits of 1.5·2^19, whose last place is 2^-4. The sum's bits
//!   are then the float 1.5·2^19 + Σqw, as long as |16·Σqw| stays within the mantissa's 2^22: for
//!   groups of at most [`NARROW`] k. One subtraction gives Σqw, exactly; a conversion costs
//!   several times as much on most cores.
//! - The start value comes by a load and the scales by general registers: both idle otherwise.
//! - Sums keep the 2 x 2 order of `smmla` until the last group is added.
//!
//! Every float operation is the definition's, on the same values, so the bits are the same.
#![cfg_attr(target_arch = "aarch64", allow(unsafe_code))]

use super::Kernel;

/// The kernels of this module that this CPU supports, the slowest first.
pub(super) fn kernels() -> Vec<Box<dyn Kernel>> {
    #[cfg(target_arch = "aarch64")]
    {
        let dotprod = aarch64::NeonDotprod::new().map(|k| Box::new(k) as Box<dyn Kernel>);
        let i8mm = aarch64::NeonI8mm::new().map(|k| Box::new(k) as Box<dyn Kernel>);
        dotprod.into_iter().chain(i8mm).collect()
    }
    #[cfg(not(target_arch = "aarch64"))]
    Vec::new()
}

#[cfg(target_arch = "aarch64")]
mod dot;
#[cfg(target_arch = "aarch64")]
mod matrix;
#[cfg(target_arch = "aarch64")]
mod ops;
#[cfg(target_arch = "aarch64")]
mod sums;

#[cfg(target_arch = "aarch64")]
pub use aarch64::{NeonDotprod, NeonI8mm};

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use std::arch::aarch64::*;
    use std::arch::is_aarch64_feature_detected;

    use super::{dot, matrix};
    use crate::w4a8::panel::Panel;
    use crate::w4a8::{Blocks, Kernel, Run, Tile};

    /// Dot products of bytes: Armv8.2 with dotprod, and all from Armv8.4.
    #[derive(Debug, Clone, Copy)]
    pub struct NeonDotprod(());

    impl Kernel for NeonDotprod {
        fn new() -> Option<Self> {
            is_aarch64_feature_detected!("dotprod").then_some(Self(()))
        }

        fn name(&self) -> &'static str {
            "neon-dotprod"
        }

        fn tile(&self, blocks: Blocks<'_>, tile: &mut Tile) {
            // SAFETY: the function needs dotprod; `new`, which alone makes a value of this type,
            // found it.
            unsafe { dot::tile(blocks, tile) }
        }

        fn run(&self, panel: Panel<'_>, rhs: Run<'_>, y: &mut [f32], stride: usize) {
            run(self, panel, rhs, y, stride);
        }
    }

    /// Matrix products of bytes (i8mm; all from Armv8.6), with dot products for single rows.
    #[derive(Debug, Clone, Copy)]
    pub struct NeonI8mm(());

    impl Kernel for NeonI8mm {
        fn new() -> Option<Self> {
            let there =
                is_aarch64_feature_detected!("dotprod") && is_aarch64_feature_detected!("i8mm");
            there.then_some(Self(()))
        }

        fn name(&self) -> &'static str {
            "neon-i8mm"
        }

        fn tile(&self, blocks: Blocks<'_>, tile: &mut Tile) {
            // SAFETY: the functions need dotprod and i8mm; `new`, which alone makes a value of
            // this type, found both.
            unsafe {
                match blocks.panel.rows() {
                    1 => dot::tile(blocks, tile),
                    _ => matrix::tile(blocks, tile),
                }
            }
        }

        fn run(&self, panel: Panel<'_>, rhs: Run<'_>, y: &mut [f32], stride: usize) {
            run(self, panel, rhs, y, stride);
        }
    }

    /// [`Kernel::run`], with bias and clamp in vectors.
    fn run(kernel: &impl Kernel, panel: Panel<'_>, rhs: Run<'_>, y: &mut [f32], stride: usize) {
        let (nr, mut tile) = (rhs.layout.nr(), Tile::default());
        let bias_at = rhs.layout.block_bytes() - 4 * nr;
        for (b, block) in rhs.bytes.chunks_exact(rhs.layout.block_bytes()).enumerate() {
            kernel.tile(Blocks { panel, rhs_layout: rhs.layout, rhs: block }, &mut tile);
            let columns = nr.min(rhs.columns - b * nr);
            for (m, sums) in tile.iter().enumerate().take(panel.rows()) {
                let out = &mut y[m * stride + b * nr..][..columns];
                for (quad, y) in out.chunks_mut(4).enumerate() {
                    let bias = &block[bias_at + 16 * quad..][..16];
                    let mut done = [0.0; 4];
                    let sums = &sums[4 * quad..][..4];
                    // SAFETY: each pointer is to 16 bytes: slices of 4 and 16, an array of 4.
                    unsafe {
                        let bias = vreinterpretq_f32_u8(vld1q_u8(bias.as_ptr()));
                        let sum = vaddq_f32(vld1q_f32(sums.as_ptr()), bias);
                        // Minimum and maximum keep NaN.
                        let y = vminq_f32(sum, vdupq_n_f32(f32::MAX));
                        vst1q_f32(done.as_mut_ptr(), vmaxq_f32(y, vdupq_n_f32(f32::MIN)));
                    }
                    y.copy_from_slice(&done[..y.len()]);
                }
            }
        }
    }
}
