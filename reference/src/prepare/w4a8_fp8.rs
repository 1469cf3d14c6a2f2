//! int4 weights with e4m3 activations: groups of int4 become e4m3 codes under one f32 scale for each
//! column.
//!
//! Source: vLLM 0.21.0 `convert_bf16_scales_to_fp8` and `CutlassW4A8LinearKernel`; CUTLASS's mixed-input
//! main loop reads each weight from a table of the products of its group's scale with the 16 codes.

use crate::num::array::rows_of;
use crate::num::dims::GroupSize;
use crate::num::element::E4m3fn;
use crate::num::scalar::ScalarType;
use crate::quantize::per_token_fp8;
use crate::weight::{Codes, Groups, Table, TableData, Weight};
use crate::{Error, Result};

/// The weight that the kernel multiplies: e4m3 codes with one scale for each column.
///
/// A column's group scales are quantized to e4m3 under one f32 scale
/// ([`per_token_fp8`]), divided by 8 and rounded again, so that 8 times a scale is in range; the column's
/// scale is 8 times as large. A weight is its code, −8 to 7, times its group's e4m3 scale, rounded to e4m3.
///
/// # Errors
/// [`Error::Unsupported`] for weights other than `uint4b8` or `int4` without zero points and act-order;
/// [`Error::Value`] for scales that are not finite.
pub fn to_e4m3(weight: &Weight<'_>) -> Result<Weight<'static>> {
    weight.validate()?;
    let Groups::Uniform(group_size) = weight.groups else {
        let what = format!("{}: act-order", weight.name);
        return Err(Error::unsupported(what, "uniform groups of int4"));
    };
    let int4 = [ScalarType::UINT4B8, ScalarType::INT4].contains(&weight.ty);
    if !int4 || weight.zeros.is_some() {
        let what = format!("{}: {}", weight.name, weight.ty);
        return Err(Error::unsupported(what, "symmetric int4, to multiply e4m3 activations"));
    }
    let shape = weight.shape();
    let groups = weight.scales.rows();
    let value = |i: usize| weight.scales.value(i % groups, i / groups) as f32;
    let values: Vec<f32> = (0..shape.size_n * groups).map(value).collect();
    let quantized = per_token_fp8(rows_of(&weight.name, &values, groups)?, None)?;
    let (codes, of_columns) = quantized.into_vecs();
    let eighth = |code: &E4m3fn| {
        E4m3fn::from_f32_rne_saturating(
            ScalarType::FLOAT8_E4M3FN.to_f64(code.to_bits().into()) as f32 / 8.0,
        )
    };
    let scales: Vec<f32> = codes
        .iter()
        .map(eighth)
        .map(|s| ScalarType::FLOAT8_E4M3FN.to_f64(s.to_bits().into()) as f32)
        .collect();
    let group = |k: usize| match group_size {
        GroupSize::Of(size) => k / size,
        GroupSize::Channel => 0,
    };
    let code = |k: usize, n: usize| {
        let q = weight.ty.to_f64(weight.codes.get(k, n).into()) as f32;
        E4m3fn::from_f32_rne_saturating(q * scales[n * groups + group(k)]).to_bits()
    };
    let bits = of_columns.iter().map(|scale| (scale * 8.0).to_bits()).collect();
    Ok(Weight {
        name: weight.name.clone(),
        ty: ScalarType::FLOAT8_E4M3FN,
        codes: Codes::from_fn(8, shape, code)?,
        scales: Table::new(ScalarType::FLOAT32, 1, shape.size_n, TableData::B32(bits))?,
        zeros: None,
        groups: Groups::Uniform(GroupSize::Channel),
        global_scale: None,
        bias: weight.bias.clone(),
    })
}
