//! Kernels for x86-64.
//!
//! Their byte products take one unsigned and one signed factor. A table look-up turns a code into
//! 2w + 12, and 12·Σq, which is the same for every column, is subtracted from a group's sum.
#![allow(unsafe_code)]

mod avx2;
mod avx512;

use super::kernel::{E2m1Run, Kernel};
use super::{DOUBLED, OFFSET};
use crate::w4a8::Panel;
use crate::w4a8::panel::for_rows;

/// The kernels of this module that this CPU supports, slowest first.
pub(super) fn kernels() -> Vec<Box<dyn Kernel>> {
    let avx2 = Avx2::new().map(|k| Box::new(k) as Box<dyn Kernel>);
    let avx512 = Avx512Vnni::new().map(|k| Box::new(k) as Box<dyn Kernel>);
    avx2.into_iter().chain(avx512).collect()
}

/// 2w + 12 by code, in each quarter of a vector.
const TABLE: [u8; 64] = {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        table[i] = (DOUBLED[i % 16] as i32 + OFFSET) as u8;
        i += 1;
    }
    table
};

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

    fn run(&self, panel: Panel<'_>, rhs: E2m1Run<'_>, y: &mut [f32], stride: usize) {
        // SAFETY: the function needs AVX2 and FMA; `new`, the only constructor of this type, detected
        // both.
        unsafe { for_rows!(panel.rows(), avx2::run[](panel, rhs, y, stride)) }
    }
}

/// AVX-512 with byte dot products (VNNI).
#[derive(Debug, Clone, Copy)]
pub struct Avx512Vnni(());

impl Avx512Vnni {
    /// The kernel, if this CPU supports it.
    pub fn new() -> Option<Self> {
        let there = Avx2::new().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vnni");
        there.then_some(Self(()))
    }
}

impl Kernel for Avx512Vnni {
    fn name(&self) -> &'static str {
        "avx512-vnni"
    }

    fn run(&self, panel: Panel<'_>, rhs: E2m1Run<'_>, y: &mut [f32], stride: usize) {
        // SAFETY: the function needs AVX-512 F, BW and VNNI, AVX2 and FMA; `new`, the only constructor
        // of this type, detected all of them.
        unsafe { for_rows!(panel.rows(), avx512::run[](panel, rhs, y, stride)) }
    }
}
