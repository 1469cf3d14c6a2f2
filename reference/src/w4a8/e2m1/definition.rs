//! The layer's definition: products of unpacked weights in plain loops, without the engine.

use super::moe::E2m1Layer;
use super::quantize_groups;
use super::scalar::product;
use crate::Result;
use crate::layouts::e2m1::{E2m1Rows, PackedE2m1};
use crate::moe::layer::Routed;
use crate::w4a8::Values;

impl E2m1Layer<'_> {
    /// `[M, H]` of `x` `[M, H]`, in its type, for given experts and weights; expert −1 is none.
    ///
    /// Gate and up, the activated rows and the rows of down are rounded to the type of `x`. Weighted rows
    /// are added in f32, in the order of experts, and the sum is rounded once.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) and [`Error::Value`](crate::Error::Value) for inputs, ids and
    /// weights that do not agree.
    pub fn definition(&self, x: &Values, routed: Routed<'_>) -> Result<Values> {
        self.plain(x, routed, |x, weights, local| linear(x, &weights.get(local)))
    }
}

/// The product with one matrix.
fn linear(x: &Values, weight: &PackedE2m1<'_>) -> Result<Values> {
    let rows = quantize_groups(x, weight.layout().shape().size_k)?;
    let weight = weight.unpack();
    let parts =
        E2m1Rows { blocks: &weight.blocks, scales: &weight.scales, bias: Some(&weight.bias) };
    product(&rows, parts, x.ty())
}
