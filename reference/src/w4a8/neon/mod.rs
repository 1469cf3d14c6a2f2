//! Kernels for aarch64: dot products of bytes (dotprod), and 2 x 2 products of them (i8mm).
//!
//! A 16-byte piece of a weight block is two columns of eight k, and a piece of two activation rows has
//! the same shape: they are the operands of `smmla` without rearrangement. The other instructions
//! limit the speed, so there are as few of them as possible:
//!
//! - A nibble becomes a byte in one instruction, as 16·w: `shl` for the low one, `and` for the high
//!   one. Integer sums are 16·Σqw.
//! - The sums of a group start from the bits of 1.5·2^19, whose ULP is 2^-4. The sum's bits are then
//!   the float 1.5·2^19 + Σqw, as long as |16·Σqw| fits the mantissa's 2^22: for groups of at most
//!   256 k. One subtraction gives Σqw exactly; a conversion costs several times as much on most cores.
//! - The start value is loaded, since the load pipe is otherwise idle.
//! - Sums keep the 2 x 2 order of `smmla` until the last group is added.
//! - Sixteen rows share the bytes of four columns (`pair`). That needs every register, so the
//!   compiler must not reorder the instructions.
//! - Without i8mm, several rows multiply by lanes (`lanes`): the halves of two pieces are exchanged,
//!   so that a lane is a column, and a row's codes are used as loaded.
//!
//! The float operations and their operands are the definition's, so the bits are the same.
#![cfg_attr(target_arch = "aarch64", allow(unsafe_code))]

use super::Kernel;

/// The kernels of this module that this CPU supports, slowest first.
pub(super) fn kernels() -> Vec<Box<dyn Kernel>> {
    #[cfg(target_arch = "aarch64")]
    {
        let dotprod = NeonDotprod::new().map(|k| Box::new(k) as Box<dyn Kernel>);
        let i8mm = NeonI8mm::new().map(|k| Box::new(k) as Box<dyn Kernel>);
        dotprod.into_iter().chain(i8mm).collect()
    }
    #[cfg(not(target_arch = "aarch64"))]
    Vec::new()
}

#[cfg(target_arch = "aarch64")]
mod cpu;
#[cfg(target_arch = "aarch64")]
mod dot;
#[cfg(target_arch = "aarch64")]
mod ends;
#[cfg(target_arch = "aarch64")]
mod lanes;
#[cfg(target_arch = "aarch64")]
mod matrix;
#[cfg(target_arch = "aarch64")]
pub(super) mod ops;
#[cfg(target_arch = "aarch64")]
mod pair;
#[cfg(target_arch = "aarch64")]
mod results;
#[cfg(target_arch = "aarch64")]
mod sums;

#[cfg(target_arch = "aarch64")]
pub use cpu::{NeonDotprod, NeonI8mm};

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use super::cpu::{NeonDotprod, NeonI8mm};
    use super::results::Rows;
    use super::{dot, matrix, pair};
    use crate::w4a8::{Blocks, Kernel, Panel, Run, Tile};

    impl Kernel for NeonDotprod {
        fn new() -> Option<Self> {
            Self::detect()
        }

        fn name(&self) -> &'static str {
            "neon-dotprod"
        }

        fn tile(&self, blocks: Blocks<'_>, tile: &mut Tile) {
            let rhs = one_block(blocks);
            // SAFETY: the function needs dotprod; `detect`, the only constructor of this
            // type, detected it.
            unsafe { dot::each_block(*self, blocks.panel, rhs, tile) };
        }

        fn run(&self, panel: Panel<'_>, rhs: Run<'_>, y: &mut [f32], stride: usize) {
            let rows = Rows::new(y, panel.rows(), stride, rhs.columns);
            // SAFETY: as in `tile`.
            unsafe { dot::each_block(*self, panel, rhs, rows) };
        }
    }

    impl Kernel for NeonI8mm {
        fn new() -> Option<Self> {
            Self::detect()
        }

        fn name(&self) -> &'static str {
            "neon-i8mm"
        }

        fn tile(&self, blocks: Blocks<'_>, tile: &mut Tile) {
            let rhs = one_block(blocks);
            // SAFETY: the function needs dotprod and i8mm; `detect`, the only constructor of this
            // type, detected both.
            unsafe { matrix::each_block(*self, blocks.panel, rhs, tile) };
        }

        fn run(&self, panel: Panel<'_>, rhs: Run<'_>, y: &mut [f32], stride: usize) {
            let rows = Rows::new(y, panel.rows(), stride, rhs.columns);
            // SAFETY: as in `tile`.
            unsafe { matrix::each_block(*self, panel, rhs, rows) };
        }

        fn run_pair(&self, panels: [Panel<'_>; 2], rhs: Run<'_>, y: &mut [f32], stride: usize) {
            if !pair::fits(panels, rhs.layout) {
                return self.run_one_by_one(panels, rhs, y, stride);
            }
            let rows = panels[0].rows() + panels[1].rows();
            let rows = Rows::new(y, rows, stride, rhs.columns);
            // SAFETY: as in `tile`.
            unsafe { pair::each_block(*self, panels, rhs, rows) };
        }
    }

    /// A single block as a run.
    fn one_block(blocks: Blocks<'_>) -> Run<'_> {
        Run { layout: blocks.rhs_layout, bytes: blocks.rhs, columns: blocks.rhs_layout.nr() }
    }
}

#[cfg(all(test, target_arch = "aarch64", target_os = "linux"))]
mod tests {
    use std::arch::asm;

    /// The features that the system reports equal those in the CPU's registers.
    #[test]
    fn kernels_are_those_that_the_cpu_has() {
        let (isar0, isar1): (u64, u64);
        // SAFETY: Linux allows programs to read these registers.
        unsafe {
            asm!("mrs {}, id_aa64isar0_el1", out(reg) isar0, options(nomem, nostack));
            asm!("mrs {}, id_aa64isar1_el1", out(reg) isar1, options(nomem, nostack));
        }
        let (dotprod, i8mm) = (isar0 >> 44 & 0xf != 0, isar1 >> 52 & 0xf != 0);
        let expected: &[&str] = match (dotprod, i8mm) {
            (true, true) => &["neon-dotprod", "neon-i8mm"],
            (true, false) => &["neon-dotprod"],
            (false, _) => &[],
        };
        let found: Vec<&str> = super::kernels().iter().map(|k| k.name()).collect();
        assert_eq!(found, expected, "dotprod {dotprod}, i8mm {i8mm}");
        let fastest = crate::w4a8::fastest();
        assert!(expected.last().is_none_or(|&last| fastest.name() == last), "{fastest:?}");
    }
}
