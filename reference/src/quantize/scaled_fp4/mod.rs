//! Values to NVFP4 (`scaled_fp4_quant`): 16 values under an e4m3 scale and a global scale. Codes are unpacked, one per byte.

mod kernel;

pub use kernel::{KernelDifference, kernel_difference};
pub(crate) use kernel::{ties_away, with_ties_away};

use super::{Quantized, absmax, finite_rows, matrix};
use crate::num::array::FloatView2;
use crate::num::element::{E2m1, E4m3fn};
use crate::{Error, Result};

/// k per scale.
pub const BLOCK: usize = 16;

/// 1 / x, or 1e-8 for zero, as in upstream's emulation.
fn reciprocal(x: f32) -> f32 {
    1.0 / if x == 0.0 { 1e8 } else { x }
}

/// e2m1 codes and e4m3fn scales of 16 values each, under `global_scale` (448 · 6 / largest value,
/// usually): scale = e4m3(global · (max · fl(1/6))), limited to 448; q = x · 1/(scale · 1/global),
/// to nearest even, limited to 6. Upstream: `ref_nvfp4_quant`.
///
/// Every operation is in f32, and the reciprocal of 0 is 1e-8. 16-bit activations are widened
/// first. A negative value that rounds to zero is −0 (code 8), as with the conversion instruction.
/// GPU kernels use approximate reciprocals: see [`kernel_difference`].
///
/// # Errors
/// [`Error::Size`]: not rows of whole blocks, or a global scale that is not positive and finite;
/// [`Error::Value`]: not finite.
pub fn quantize<'a>(
    x: impl Into<FloatView2<'a>>,
    global_scale: f32,
) -> Result<Quantized<E2m1, E4m3fn>> {
    let x = x.into();
    let (rows, (x, _)) = (x.shape()[0], finite_rows(&x, BLOCK)?);
    if !(global_scale.is_finite() && global_scale > 0.0) {
        return Err(Error::size("global scale", global_scale, "a positive finite number"));
    }
    let (mut codes, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    for block in x.chunks_exact(BLOCK) {
        let scale = (global_scale * (absmax(block) * (1.0 / 6.0))).min(448.0);
        let scale = E4m3fn::from_f32_rne_saturating(scale);
        let factor = reciprocal(scale.to_f32() * reciprocal(global_scale));
        let code = |v: &f32| {
            let scaled = if *v == 0.0 { *v } else { v * factor };
            E2m1::from_f32_rne_saturating(scaled)
        };
        codes.extend(block.iter().map(code));
        scales.push(scale);
    }
    Ok(Quantized { codes: matrix(rows, codes), scales: matrix(rows, scales) })
}
