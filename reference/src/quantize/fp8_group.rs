//! e4m3fn activations with a scale for each group of k of a row.

use super::{Quantized, absmax, expect_rows};
use crate::num::scalar::f32_to_e4m3fn_rne_saturating;
use crate::{Error, Result};

/// e4m3fn codes, and a scale for each `group` values of a row: scale = max(max, 1e-10) · fl(1/448),
/// q = x / scale, saturating, to nearest even. Scales are `[rows, cols / group]`.
///
/// Upstream: `per_token_group_quant_fp8` (vLLM 0.21.0, its Triton kernel, which multiplies with the
/// rounded reciprocal), for weights in blocks.
///
/// # Errors
/// [`Error::Size`], [`Error::Shape`]: not rows of whole groups; [`Error::Value`]: not finite.
pub fn per_group_fp8(x: &[f32], cols: usize, group: usize) -> Result<Quantized<u8>> {
    if group == 0 {
        return Err(Error::size("group of the activations", group, "1 or more"));
    }
    expect_rows(x, cols, group)?;
    let (mut codes, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    for values in x.chunks_exact(group) {
        let scale = absmax(values).max(1e-10) * (1.0 / 448.0);
        codes.extend(values.iter().map(|v| f32_to_e4m3fn_rne_saturating(v / scale)));
        scales.push(scale);
    }
    Ok(Quantized { codes, scales })
}
