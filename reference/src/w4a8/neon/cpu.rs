//! Proofs that the CPU has the instructions: their constructors detect them.

use std::arch::is_aarch64_feature_detected;

/// Dot products of bytes: Armv8.2 with dotprod, and all from Armv8.4.
#[derive(Debug, Clone, Copy)]
pub struct NeonDotprod(());

impl NeonDotprod {
    pub(in crate::w4a8) fn detect() -> Option<Self> {
        is_aarch64_feature_detected!("dotprod").then_some(Self(()))
    }
}

/// Matrix products of bytes (i8mm; all from Armv8.6), with dot products for single rows.
#[derive(Debug, Clone, Copy)]
pub struct NeonI8mm(NeonDotprod);

impl NeonI8mm {
    pub(in crate::w4a8) fn detect() -> Option<Self> {
        let dotprod = NeonDotprod::detect()?;
        is_aarch64_feature_detected!("i8mm").then_some(Self(dotprod))
    }

    /// The proof for dot products.
    pub(in crate::w4a8) fn dotprod(self) -> NeonDotprod {
        self.0
    }
}
