//! Formats of weights for 8-bit activations, and what each demands.

use marlinspike::num::scalar::ScalarType;
use marlinspike::weight::{Groups, Weight};

use super::Form;
use crate::{
    error::AccelError,
    ops::gemm::ROW,
    parameters::{Codes, Scales},
};

impl Form {
    /// The form of a stack of weights of one shape under activations of `input`: int8 or e4m3.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for types and groups that the kernel does not take, and for scales that the kernel's
    /// factor makes infinite.
    pub(in crate::ops::gemm) fn of_bytes(
        weights: &[Weight<'_>],
        dtype: ScalarType,
        input: ScalarType,
    ) -> Result<Self, AccelError> {
        let first = &weights[0];
        let form = of_one(first, dtype, input)?;
        for weight in weights {
            if matches!(weight.groups, Groups::Indexed { .. }) {
                let found = format!("{}: act-order", weight.name);
                return Err(ROW.refuse("g_idx", found, "a weight without act-order"));
            }
            if of_one(weight, dtype, input)? != form {
                let found = format!("{}: {}, {}", weight.name, weight.ty, weight.scales.ty());
                let expected = format!("{}, {} as {}", first.ty, first.scales.ty(), first.name);
                return Err(ROW.refuse("weight", found, expected));
            }
            check_scales(weight, dtype, input)?;
        }
        Ok(form)
    }

    /// The forms of every weight under activations of `input`.
    pub(crate) fn all_bytes(input: ScalarType) -> Vec<Self> {
        let of = |codes, scales, groups| Self { codes, scales, groups, has_g_idx: false };
        let mut all = Vec::new();
        for codes in [Codes::Uint4b8, Codes::Uint4] {
            all.extend([0, 1, 2, 4].map(|groups| of(codes, Scales::Bits16, groups)));
        }
        if input == ScalarType::FLOAT8_E4M3FN {
            all.push(of(Codes::E2m1, Scales::E8m0, 4));
        }
        all
    }
}

fn of_one(weight: &Weight<'_>, dtype: ScalarType, input: ScalarType) -> Result<Form, AccelError> {
    let has_zero = weight.zeros.is_some();
    let ty = weight.scales.ty();
    let is_16_bit = ty.size_bits() > 8;
    let is_e8m0_of_fp8 = ty == ScalarType::FLOAT8_E8M0FNU && input == ScalarType::FLOAT8_E4M3FN;
    let (codes, scales) = match weight.ty {
        ScalarType::UINT4B8 if !has_zero && is_16_bit => (Codes::Uint4b8, Scales::Bits16),
        ScalarType::UINT4 if has_zero && is_16_bit => (Codes::Uint4, Scales::Bits16),
        ScalarType::FLOAT4_E2M1F if !has_zero && is_e8m0_of_fp8 => (Codes::E2m1, Scales::E8m0),
        _ => {
            let found = format!("{} of {}, scales of {ty}", weight.name, weight.ty);
            let expected = "uint4b8, or uint4 with zero points, with 16-bit scales; with e4m3 \
                            activations float4_e2m1f with e8m0 scales";
            return Err(ROW.refuse("weight", found, expected));
        }
    };
    if codes == Codes::E2m1 && dtype != ScalarType::BFLOAT16 {
        let found = format!("{} under {dtype}", weight.name);
        let expected = "bfloat16: Marlin's preparation passes e8m0 through it";
        return Err(ROW.refuse("dtype", found, expected));
    }
    let groups = weight.scales.rows();
    let in_stage = match (weight.shape().size_k / groups.max(1), codes) {
        (32, _) if groups > 1 => 4,
        (other, Codes::E2m1) => {
            return Err(ROW.refuse("group_size", format!("{}: {other}", weight.name), "32"));
        }
        _ if groups == 1 => 0,
        (128, _) => 1,
        (64, _) => 2,
        (other, _) => {
            let expected = "32, 64, 128, or all of k";
            return Err(ROW.refuse("group_size", format!("{}: {other}", weight.name), expected));
        }
    };
    Ok(Form { codes, scales, groups: in_stage, has_g_idx: false })
}

/// Returns an error for a finite scale that the kernel's factor makes infinite. With e4m3 activations the factor is 512
/// for 16-bit scales and 64 for e8m0.
fn check_scales(
    weight: &Weight<'_>,
    dtype: ScalarType,
    input: ScalarType,
) -> Result<(), AccelError> {
    if input == ScalarType::INT8 {
        return Ok(());
    }
    let scales = &weight.scales;
    let ty = scales.ty();
    let fits = |bits: u32| {
        if ty == ScalarType::FLOAT8_E8M0FNU {
            return bits + 6 < 255;
        }
        let value = ty.to_f64(bits);
        !value.is_finite() || dtype.to_f64(dtype.encode_rne(value * 512.0)).is_finite()
    };
    let Some(i) = scales.iter_bits().position(|bits| !fits(bits)) else { return Ok(()) };
    let at = [i / scales.cols(), i % scales.cols()];
    let found = format!("{}: {} at {at:?}", weight.name, scales.value(at[0], at[1]));
    let expected = format!("512 times itself in the range of {dtype}, or 2^121 at most (e8m0)");
    Err(ROW.refuse("scales", found, expected))
}
