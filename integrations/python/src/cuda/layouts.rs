//! Layouts and quantizers.

use marlinspike::layouts::marlin::ScalePermutation;
use marlinspike::num::dims::Shape;
use marlinspike::quantize::Int8Rule;
use marlinspike_accel::ops::{
    RepackSizes, awq_marlin_repack_on_device, fp8_on_device, gptq_marlin_repack_on_device,
    int8_on_device, marlin_permute_scales_on_device,
};
use pyo3::prelude::*;

use super::{Memory, Place, View};
use crate::error::{Failed, raised};
use crate::products::half_named;

/// Words of a checkpoint in Marlin's layout. `sizes`: experts, K, N, bits, and whether activations have 8 bits.
#[pyfunction]
pub(crate) fn cuda_repack(
    py: Python<'_>,
    place: Place,
    is_awq: bool,
    qweight: Memory,
    perm: Option<Memory>,
    sizes: (usize, usize, usize, u32, bool),
    out: Memory,
) -> PyResult<()> {
    let (experts, size_k, size_n, num_bits, is_a_8bit) = sizes;
    let shape = Shape::new(size_k, size_n);
    let sizes = RepackSizes { experts, shape, num_bits, is_a_8bit };
    py.detach(|| {
        let view = View::new(place, None)?;
        let (qweight, mut out) = (view.take(qweight), view.take(out));
        if is_awq {
            return awq_marlin_repack_on_device(view.device(), &qweight, sizes, &mut out);
        }
        let perm = view.optional(perm);
        gptq_marlin_repack_on_device(view.device(), &qweight, perm.as_ref(), sizes, &mut out)
    })
    .failed()
}

/// 16-bit scales `[rows, N]` in the kernel's order.
#[pyfunction]
pub(crate) fn cuda_permute_scales(
    py: Python<'_>,
    place: Place,
    scales: Memory,
    size_n: usize,
    is_grouped: bool,
    out: Memory,
) -> PyResult<()> {
    let order = if is_grouped { ScalePermutation::Grouped } else { ScalePermutation::Single };
    py.detach(|| {
        let view = View::new(place, None)?;
        let (scales, mut out) = (view.take(scales), view.take(out));
        marlin_permute_scales_on_device(view.device(), &scales, size_n, order, &mut out)
    })
    .failed()
}

/// Codes `[M, K]` and scales `[M, 1]`: int8 by `rule`, or e4m3fn where that is `fp8`.
#[pyfunction]
pub(crate) fn cuda_quantize(
    py: Python<'_>,
    place: Place,
    dtype: &str,
    rule: &str,
    scale_ub: Option<f32>,
    size_k: usize,
    memory: (Memory, Memory, Memory),
) -> PyResult<()> {
    let dtype = half_named(dtype)?;
    let upper = scale_ub.unwrap_or(f32::INFINITY);
    if upper.is_nan() || upper <= 0.0 {
        return Err(raised(format!("scale_ub: found {upper}, expected a positive number")));
    }
    let int8 = match rule {
        "fp8" => None,
        "quotient" => Some(Int8Rule::Quotient),
        "product" => Some(Int8Rule::Product),
        other => return Err(raised(format!("rule: found {other}, expected quotient or product"))),
    };
    py.detach(|| {
        let view = View::new(place, None)?;
        let (x, codes, scales) = memory;
        let (x, mut codes, mut scales) = (view.take(x), view.take(codes), view.take(scales));
        let device = view.device();
        match int8 {
            None => fp8_on_device(device, &x, dtype, size_k, upper, &mut codes, &mut scales),
            Some(rule) => int8_on_device(device, &x, dtype, size_k, rule, &mut codes, &mut scales),
        }
    })
    .failed()
}
