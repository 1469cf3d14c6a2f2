//! One product.

use super::Kernel;
use crate::layouts::e2m1::PackedE2m1;
use crate::w4a8::linear::LinearOf;
use crate::w4a8::quantize::ActivationRounding;

/// A packed weight with its kernel.
pub type Linear<'a> = LinearOf<PackedE2m1<'a>, dyn Kernel>;

impl<'a> Linear<'a> {
    /// `weight` `[K, N]`, run by the fastest kernel of this CPU.
    pub fn new(weight: PackedE2m1<'a>) -> Self {
        Self::of(weight, ActivationRounding::HalfEven)
    }
}
