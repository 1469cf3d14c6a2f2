//! e4m3fn activations with a scale for each group of k of a row.

use super::{Quantized, absmax, finite_rows, matrix};
use crate::num::array::FloatView2;
use crate::num::element::E4m3fn;
use crate::{Error, Result};

/// e4m3fn codes, and a scale for each `group` values of a row: scale = max(max, 1e-10) · fl(1/448),
/// q = x / scale, saturating, to nearest even. Scales are `[rows, cols / group]`.
///
/// Upstream: `per_token_group_quant_fp8` (vLLM 0.21.0, its Triton kernel, which multiplies with the
/// rounded reciprocal), for weights in blocks.
///
/// # Errors
/// [`Error::Size`]: not rows of whole groups; [`Error::Value`]: not finite.
pub fn per_group_fp8<'a>(x: impl Into<FloatView2<'a>>, group: usize) -> Result<Quantized<E4m3fn>> {
    if group == 0 {
        return Err(Error::size("group of the activations", group, "1 or more"));
    }
    let x = x.into();
    let (rows, (x, _)) = (x.shape()[0], finite_rows(&x, group)?);
    let (mut codes, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    for values in x.chunks_exact(group) {
        let scale = absmax(values).max(1e-10) * (1.0 / 448.0);
        codes.extend(values.iter().map(|v| E4m3fn::from_f32_rne_saturating(v / scale)));
        scales.push(scale);
    }
    Ok(Quantized { codes: matrix(rows, codes), scales: matrix(rows, scales) })
}
