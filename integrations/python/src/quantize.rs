//! Quantizers, by upstream's functions.

use marlinspike::Result;
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::quantize as quantizers;
use marlinspike::weight::Groups;
use pyo3::prelude::*;

use crate::arrays::{Input, Output, output};
use crate::error::{Failed, raised};

/// int8 with one scale per row: codes and scales `[M, 1]`.
#[pyfunction]
pub(crate) fn per_token_int8<'py>(
    py: Python<'py>,
    x: Input<'py>,
    rule: &str,
) -> PyResult<[Output<'py>; 2]> {
    let x = x.tensor("x")?;
    let rule = match rule {
        "quotient" => quantizers::Int8Rule::Quotient,
        "product" => quantizers::Int8Rule::Product,
        other => return Err(raised(format!("rule: found {other}, expected quotient or product"))),
    };
    let made = py.detach(|| -> Result<_> {
        let made = quantizers::per_token_int8(x.float_view2()?, rule)?;
        let codes = Tensor::from_array("codes", made.codes)?;
        Ok([codes, Tensor::from_array("scales", made.scales)?])
    });
    Ok(made.failed()?.map(|tensor| output(py, tensor)))
}

/// e4m3fn with one scale per row: codes and scales `[M, 1]`.
#[pyfunction]
pub(crate) fn per_token_fp8<'py>(
    py: Python<'py>,
    x: Input<'py>,
    scale_ub: Option<f32>,
) -> PyResult<[Output<'py>; 2]> {
    let x = x.tensor("x")?;
    let made = py.detach(|| -> Result<_> {
        let made = quantizers::per_token_fp8(x.float_view2()?, scale_ub)?;
        let codes = Tensor::from_array("codes", made.codes)?;
        Ok([codes, Tensor::from_array("scales", made.scales)?])
    });
    Ok(made.failed()?.map(|tensor| output(py, tensor)))
}

/// e4m3fn with one scale for all: codes and scale `[1]`.
#[pyfunction]
pub(crate) fn per_tensor_fp8<'py>(
    py: Python<'py>,
    x: Input<'py>,
    scale: Option<f32>,
) -> PyResult<[Output<'py>; 2]> {
    let x = x.tensor("x")?;
    let made = py.detach(|| -> Result<_> {
        let made = quantizers::per_tensor_fp8(x.float_view2()?, scale)?;
        let codes = Tensor::from_array("codes", made.codes)?;
        Ok([codes, Tensor::from_vec("scales", DType::F32, vec![1], vec![made.scales[[0, 0]]])?])
    });
    Ok(made.failed()?.map(|tensor| output(py, tensor)))
}

/// Symmetric integer weights: dequantized `w`, codes `[K, N]`, scales `[groups, N]`, `g_idx` (empty
/// without act-order).
#[pyfunction]
pub(crate) fn gptq_quantize_weights<'py>(
    py: Python<'py>,
    w: Input<'py>,
    quant_type: &str,
    group_size: i64,
    perm: Option<Input<'py>>,
) -> PyResult<[Output<'py>; 4]> {
    let w = w.tensor("w")?;
    let perm = perm.as_ref().map(|p| p.tensor("perm")).transpose()?;
    let named = ScalarType::NAMED.iter().find(|(name, _)| *name == quant_type);
    let &(_, weight_type) = named.ok_or_else(|| {
        raised(format!("quant_type: found {quant_type}, expected uint4b8 or uint8b128"))
    })?;
    let made = py.detach(|| -> Result<_> {
        let floats = w.float_view2()?;
        let ([size_k, size_n], ty) = (w.dims2()?, floats.scalar_type());
        let perm = match &perm {
            None => None,
            Some(perm) => Some(perm.expect_dtype(&[DType::I32, DType::U32])?.elements::<u32>()),
        };
        let group_size = GroupSize::from_config(group_size)?;
        let made =
            quantizers::gptq_quantize_weights(floats, weight_type, group_size, perm.as_deref())?;
        let codes = (0..size_k * size_n).map(|i| made.codes.get(i / size_n, i % size_n).into());
        let codes: Vec<i32> = codes.collect();
        let dequantized = made.dequantize_all();
        let matrix = vec![size_k, size_n];
        let reference = match w.dtype().bytes() {
            2 => {
                let bits = dequantized.iter().map(|&v| ty.encode_rne(v) as u16).collect();
                Tensor::from_vec("w_ref", w.dtype(), matrix.clone(), bits)?
            }
            _ => {
                let values: Vec<f32> = dequantized.iter().map(|&v| v as f32).collect();
                Tensor::from_vec("w_ref", w.dtype(), matrix.clone(), values)?
            }
        };
        let g_idx = match &made.groups {
            Groups::Indexed { g_idx, .. } => g_idx.clone(),
            Groups::Uniform(_) => Vec::new(),
        };
        Ok([
            reference,
            Tensor::from_vec("w_q", DType::I32, matrix, codes)?,
            made.scales.to_tensor("w_s", w.dtype())?,
            Tensor::from_vec("g_idx", DType::I32, vec![g_idx.len()], g_idx)?,
        ])
    });
    Ok(made.failed()?.map(|tensor| output(py, tensor)))
}
