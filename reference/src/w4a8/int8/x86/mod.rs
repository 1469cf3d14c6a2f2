//! Kernels for x86-64.
//!
//! Byte products take one unsigned and one signed factor: q + 128 and w. 128·Σw, which is the same for
//! every row, is stored with the weights. All sums are integers modulo 2^32, which are exact in the end.
#![allow(unsafe_code)]

mod amx;
mod avx2;
mod avx512;

pub use amx::AmxInt8;

use super::kernel::{Int8Run, Kernel};
use crate::w4a8::Panel;
use crate::w4a8::panel::for_rows;
use crate::w4a8::x86::is_intel;

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

impl Avx2 {
    /// The kernel, if this CPU supports it.
    pub fn new() -> Option<Self> {
        let there = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        there.then_some(Self(()))
    }
}

impl Kernel for Avx2 {
    fn name(&self) -> &'static str {
        "avx2"
    }

    fn unsigned(&self) -> bool {
        true
    }

    fn run(&self, panel: Panel<'_>, rhs: Int8Run<'_>, y: &mut [f32], stride: usize) {
        // SAFETY: the function needs AVX2 and FMA; `new`, the only constructor of this type, detected
        // both.
        unsafe { for_rows!(panel.rows(), avx2::avx2[](panel, rhs, y, stride)) }
    }
}

/// AVX2 with byte dot products (AVX-VNNI).
#[derive(Debug, Clone, Copy)]
pub struct AvxVnni(());

impl AvxVnni {
    /// The kernel, if this CPU supports it.
    pub fn new() -> Option<Self> {
        let there = Avx2::new().is_some() && is_x86_feature_detected!("avxvnni");
        there.then_some(Self(()))
    }
}

impl Kernel for AvxVnni {
    fn name(&self) -> &'static str {
        "avx-vnni"
    }

    fn unsigned(&self) -> bool {
        true
    }

    fn run(&self, panel: Panel<'_>, rhs: Int8Run<'_>, y: &mut [f32], stride: usize) {
        // SAFETY: the function needs AVX2, FMA and AVX-VNNI; `new`, the only constructor of this type,
        // detected all of them.
        unsafe { for_rows!(panel.rows(), avx2::avx_vnni[](panel, rhs, y, stride)) }
    }
}

/// AVX-512 with byte dot products (VNNI).
#[derive(Debug, Clone, Copy)]
pub struct Avx512Vnni {
    /// Whether one row is faster if four blocks are read at once: on Intel's CPUs, not on AMD's.
    four_streams: bool,
}

impl Avx512Vnni {
    /// The kernel, if this CPU supports it.
    pub fn new() -> Option<Self> {
        let there = Avx2::new().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512vnni");
        there.then(|| Self { four_streams: is_intel() })
    }

    /// The kernel with either order of reading.
    #[cfg(test)]
    fn with_streams(self, four_streams: bool) -> Self {
        Self { four_streams }
    }
}

impl Kernel for Avx512Vnni {
    fn name(&self) -> &'static str {
        "avx512-vnni"
    }

    fn unsigned(&self) -> bool {
        true
    }

    fn run(&self, panel: Panel<'_>, rhs: Int8Run<'_>, y: &mut [f32], stride: usize) {
        // SAFETY: the functions need AVX-512 F and VNNI, AVX2 and FMA; `new`, the only constructor of
        // this type, detected all of them.
        unsafe {
            match panel.rows() {
                1 if self.four_streams => avx512::run::<1, 4, 1>(panel, rhs, y, stride),
                1 => avx512::run::<1, 1, 4>(panel, rhs, y, stride),
                2 => avx512::run::<2, 2, 2>(panel, rhs, y, stride),
                rows => for_rows!(2.., rows, avx512::pairs[](panel, rhs, y, stride)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layouts::int8::{Int8Layout, PackedInt8};
    use crate::num::dims::Shape;
    use crate::w4a8::{LinearWorkspace, Values};

    /// Both orders of reading, on every CPU, around the edges of four blocks.
    #[test]
    fn one_row_reads_blocks_in_either_order() {
        let Some(kernel) = Avx512Vnni::new() else { return };
        for size_n in [1, 16, 63, 64, 65, 130, 160] {
            let layout = Int8Layout::new(Shape::new(68, size_n)).unwrap();
            let bytes: Vec<u8> =
                (0..layout.packed_len()).map(|i| (i * 2_654_435_761 / 512) as u8 & 0x3f).collect();
            let weight = PackedInt8::new("w", layout, bytes).unwrap();
            let x = Values::F32((0..68).map(|k| (k * 37 % 41) as f32 - 20.0).collect());
            let of = |kernel: Avx512Vnni| {
                let linear =
                    super::super::Linear::new(weight.clone()).with_kernel(Box::new(kernel));
                let mut y = Values::F32(vec![0.0; size_n]);
                let (x, out) = (x.view(68).unwrap(), y.view_mut(size_n).unwrap());
                linear.forward(x, &mut LinearWorkspace::default(), out).unwrap();
                y.bits()
            };
            let [one, four] = [false, true].map(|four| of(kernel.with_streams(four)));
            assert_eq!(one, four, "{size_n}");
        }
    }
}
