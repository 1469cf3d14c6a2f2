//! Conversions between numbers and codes of a number format.

use marlinspike::Result;
use marlinspike::num::scalar::{Overflow, Rounding, ScalarType, float_type};
use marlinspike::num::tensor::{DType, Tensor};
use pyo3::prelude::*;

use crate::arrays::{Input, Output, output};
use crate::error::{Failed, raised};

/// The codes of values in a number format: in its own element type, else in the low bits of U8.
#[pyfunction]
pub(crate) fn encode<'py>(
    py: Python<'py>,
    values: Input<'py>,
    dtype: &str,
    rounding: &str,
    overflow: &str,
) -> PyResult<Output<'py>> {
    let values = values.tensor("values")?;
    let to = scalar_type(dtype)?;
    let rounding = match rounding {
        "nearest_even" => Rounding::NearestEven,
        "nearest_away" => Rounding::NearestAway,
        "toward_zero" => Rounding::TowardZero,
        "away_from_zero" => Rounding::AwayFromZero,
        other => {
            let known = "nearest_even, nearest_away, toward_zero or away_from_zero";
            return Err(raised(format!("rounding: found {other}, expected {known}")));
        }
    };
    let overflow = match overflow {
        "infinity" => Overflow::Infinity,
        "saturate" => Overflow::Saturate,
        "nan" => Overflow::Nan,
        other => {
            return Err(raised(format!(
                "overflow: found {other}, expected infinity, saturate or nan"
            )));
        }
    };
    let made = py.detach(|| -> PyResult<_> {
        let numbers = numbers(&values)?;
        let codes = numbers.iter().map(|&v| to.encode(v, rounding, overflow));
        stored(to, values.shape().to_vec(), codes).failed()
    });
    Ok(output(py, made?))
}

/// The values of codes, as F64. The codes are the elements' low bits, whatever their own type.
#[pyfunction]
pub(crate) fn decode<'py>(
    py: Python<'py>,
    codes: Input<'py>,
    dtype: &str,
) -> PyResult<Output<'py>> {
    let codes = codes.tensor("codes")?;
    let from = scalar_type(dtype)?;
    if codes.dtype().bits() != from.storage_bits() as usize {
        let (found, expected) = (codes.dtype(), from.storage_bits());
        return Err(raised(format!(
            "`codes`: found elements of {found}, expected {expected} bits for {dtype}"
        )));
    }
    let made = py.detach(|| {
        let values: Vec<f64> = match codes.dtype().bytes() {
            1 => codes.elements::<u8>().iter().map(|&c| from.to_f64(c.into())).collect(),
            2 => codes.elements::<u16>().iter().map(|&c| from.to_f64(c.into())).collect(),
            _ => codes.elements::<u32>().iter().map(|&c| from.to_f64(c)).collect(),
        };
        Tensor::from_vec("values", DType::F64, codes.shape().to_vec(), values)
    });
    Ok(output(py, made.failed()?))
}

fn scalar_type(name: &str) -> PyResult<ScalarType> {
    ScalarType::from_name(name).ok_or_else(|| {
        let known: Vec<_> = ScalarType::NAMED.iter().map(|&(name, _)| name).collect();
        raised(format!("dtype: found {name}, expected one of {}", known.join(", ")))
    })
}

/// The numbers of a tensor, exactly.
fn numbers(values: &Tensor<'_>) -> PyResult<Vec<f64>> {
    let ty = match values.dtype() {
        DType::F64 => return Ok(values.elements::<f64>().into_owned()),
        DType::F32 => return Ok(values.elements::<f32>().iter().map(|&v| v.into()).collect()),
        other => float_type(other).ok_or_else(|| {
            raised(format!("`values`: found elements of {other}, expected a floating-point type"))
        })?,
    };
    Ok(match values.dtype().bytes() {
        1 => values.elements::<u8>().iter().map(|&code| ty.to_f64(code.into())).collect(),
        _ => values.elements::<u16>().iter().map(|&code| ty.to_f64(code.into())).collect(),
    })
}

fn stored(
    to: ScalarType,
    shape: Vec<usize>,
    codes: impl Iterator<Item = u32>,
) -> Result<Tensor<'static>> {
    let own = DType::ALL.iter().copied().find(|&dtype| float_type(dtype) == Some(to));
    match to.storage_bits() {
        8 => {
            let codes: Vec<u8> = codes.map(|code| code as u8).collect();
            Tensor::from_vec("codes", own.unwrap_or(DType::U8), shape, codes)
        }
        16 => {
            let codes: Vec<u16> = codes.map(|code| code as u16).collect();
            Tensor::from_vec("codes", own.unwrap_or(DType::U16), shape, codes)
        }
        _ => {
            let codes: Vec<u32> = codes.collect();
            Tensor::from_vec("codes", own.unwrap_or(DType::U32), shape, codes)
        }
    }
}
