//! int4 weights with e4m3 activations: groups of int4 become e4m3 codes under one f32 scale for each
//! column.
//!
//! Source: vLLM 0.21.0 `convert_bf16_scales_to_fp8` and `CutlassW4A8LinearKernel`; CUTLASS's mixed-input
//! main loop reads each weight from a table of the products of its group's scale with the 16 codes.

use crate::num::dims::{GroupSize, Shape};
use crate::num::element::E4m3fn;
use crate::num::scalar::ScalarType;
use crate::weight::{Codes, Groups, Table, TableData, Weight};
use crate::{Error, Result};

const E4M3: ScalarType = ScalarType::FLOAT8_E4M3FN;

/// The least scale of a quantized row, 1 / (448 · 512).
const LEAST_SCALE: f32 = 1.0 / (448.0 * 512.0);

/// The scales of a prepared weight: a weight is its code, −8 to 7, times its group's scale, rounded to
/// e4m3, times its column's scale.
#[derive(Debug, Clone, PartialEq)]
pub struct PreparedScales {
    /// `[N, groups]`: numbers of e4m3.
    pub groups: Vec<f32>,
    /// `[N]`.
    pub columns: Vec<f32>,
}

/// The shape and the number of groups of a weight that the kernel takes.
fn expect_int4(weight: &Weight<'_>) -> Result<(Shape, usize)> {
    weight.validate()?;
    if !matches!(weight.groups, Groups::Uniform(_)) {
        let what = format!("{}: act-order", weight.name);
        return Err(Error::unsupported(what, "uniform groups of int4"));
    }
    let int4 = [ScalarType::UINT4B8, ScalarType::INT4].contains(&weight.ty);
    if !int4 || weight.zeros.is_some() {
        let what = format!("{}: {}", weight.name, weight.ty);
        return Err(Error::unsupported(what, "symmetric int4, to multiply e4m3 activations"));
    }
    Ok((weight.shape(), weight.scales.rows()))
}

/// The value of an e4m3 number.
fn number(code: E4m3fn) -> f32 {
    E4M3.to_f64(code.to_bits().into()) as f32
}

impl PreparedScales {
    /// The scales of `weight`. A column's group scales are quantized to e4m3 under one f32 scale, as
    /// activations are per token, divided by 8 and rounded again, so that 8 times a scale is in range; the
    /// column's scale is 8 times as large.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for weights other than `uint4b8` or `int4` without zero points and act-order;
    /// [`Error::Value`] for scales that are not finite.
    pub fn of(weight: &Weight<'_>) -> Result<Self> {
        let (shape, groups) = expect_int4(weight)?;
        let e4m3 = E4m3fn::from_f32_rne_saturating;
        let mut scales =
            Self { groups: Vec::with_capacity(groups * shape.size_n), columns: Vec::new() };
        for n in 0..shape.size_n {
            let own: Vec<f32> = (0..groups).map(|g| weight.scales.value(g, n) as f32).collect();
            if let Some(g) = own.iter().position(|s| !s.is_finite()) {
                let what = format!("{}: scales", weight.name);
                return Err(Error::value(what, &[g, n], own[g], "a finite number"));
            }
            let largest = own.iter().fold(0f32, |m, s| m.max(s.abs()));
            let of_column = (largest / 448.0).max(LEAST_SCALE);
            let group = |s: &f32| number(e4m3(number(e4m3(s / of_column)) / 8.0));
            scales.groups.extend(own.iter().map(group));
            scales.columns.push(of_column * 8.0);
        }
        Ok(scales)
    }

    /// The e4m3 codes of the groups' scales, `[N, groups]`.
    pub fn group_codes(&self) -> Vec<u8> {
        self.groups.iter().map(|&s| E4m3fn::from_f32_rne_saturating(s).to_bits()).collect()
    }

    /// The weight that the kernel multiplies: e4m3 codes with one scale for each column.
    ///
    /// # Errors
    /// [`Error::Unsupported`] as [`PreparedScales::of`]; [`Error::Shape`] for scales of another weight.
    pub fn apply(&self, weight: &Weight<'_>) -> Result<Weight<'static>> {
        let (shape, groups) = expect_int4(weight)?;
        if [self.groups.len(), self.columns.len()] != [shape.size_n * groups, shape.size_n] {
            let expected = format!("[{}, {groups}]", shape.size_n);
            return Err(Error::shape("scales of groups", &[self.groups.len()], expected));
        }
        let group = |k: usize| weight.groups.group_of(k);
        let code = |k: usize, n: usize| {
            let q = weight.ty.to_f64(weight.codes.get(k, n).into()) as f32;
            E4m3fn::from_f32_rne_saturating(q * self.groups[n * groups + group(k)]).to_bits()
        };
        let bits = self.columns.iter().map(|scale| scale.to_bits()).collect();
        Ok(Weight {
            name: weight.name.clone(),
            ty: E4M3,
            codes: Codes::from_fn(8, shape, code)?,
            scales: Table::new(ScalarType::FLOAT32, 1, shape.size_n, TableData::B32(bits))?,
            zeros: None,
            groups: Groups::Uniform(GroupSize::Channel),
            global_scale: None,
            bias: weight.bias.clone(),
        })
    }
}

/// The weight that the kernel multiplies, by [`PreparedScales`].
///
/// # Errors
/// As [`PreparedScales::of`].
pub fn to_e4m3(weight: &Weight<'_>) -> Result<Weight<'static>> {
    PreparedScales::of(weight)?.apply(weight)
}
