//! Judges quantized activations that a `linear` case holds next to their source. They are inputs of
//! the product but outputs of a quantizer, so they are compared with `in.x`.

use super::LinearConfig;
use crate::Result;
use crate::judge::OutputReport;
use crate::moe::layer::input_global_scale;
use crate::moe::widen;
use crate::num::dims::Shape;
use crate::num::scalar::ScalarType;
use crate::ops::case::Case;
use crate::ops::quant::source::Source;
use crate::ops::stated_rows::StatedRows;
use crate::quantize::StatedActivations;

/// Reports on `a_q` and `a_scales`; empty if the case lacks them or their source.
pub(crate) fn linear(case: &Case<'_>, c: &LinearConfig) -> Result<Vec<OutputReport>> {
    let stated = |name: &str| case.inputs.get(name);
    let (Some(ty), Some(x), Some(codes), Some(scales)) =
        (c.quant.input_dtype, stated("x"), stated("a_q"), stated("a_scales"))
    else {
        return Ok(Vec::new());
    };
    let dtype = c.quant.dtype;
    let x: Vec<f32> = x.elements::<u16>().iter().map(|&bits| widen(dtype, bits)).collect();
    let factor = match ty {
        ScalarType::INT8 => {
            let source = Source::new(case, &c.quant, "", Shape::new(c.size_k, c.size_n));
            input_global_scale(&source.weights()?)
        }
        _ => 1.0,
    };
    let scales = scales.elements::<f32>();
    let (codes, scales) = (codes.bytes(), &scales[..]);
    let found = StatedActivations { x: &x, cols: c.size_k, dtype, ty, factor, codes, scales };
    StatedRows {
        names: ["a_q", "a_scales"],
        source: "in.x",
        role: "an input of the product, ",
        declared: c.quantizer,
        found,
    }
    .judge()
}
