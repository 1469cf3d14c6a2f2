//! One rank's part of a product of packed weights, and the sum over ranks: version 2 of the canonical schedule.

use marlinspike::num::dims::Shape;
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::products::schedule::{Extras, Part, Schedule, Split};
use marlinspike::{Error, Result};
use numpy::ndarray::ArrayView3;
use pyo3::prelude::*;

use crate::arrays::{Input, Output, output};
use crate::error::Failed;
use crate::products::{Packed, Parts, execute, half, half_named, operands, weight_type};

/// The model's K, the rank, the number of ranks.
pub(crate) type SplitOf = (usize, usize, usize);

/// A rank's part, restored from its packed bytes.
fn part_of(
    parts: Parts<'_>,
    ty: ScalarType,
    dtype: ScalarType,
    (split, size_n): (SplitOf, usize),
) -> Result<Part> {
    let split = Split::new(split.0, split.1, split.2)?;
    let shape = Shape::new(split.rows().len(), size_n);
    let (weight, _) = parts.restore("b".to_owned(), ty, dtype, shape)?;
    Part::new(split, weight)
}

/// The f32 sums `[M, N]` of a rank's activations `[M, K / ranks]` and its part of a packed weight.
#[pyfunction]
pub(crate) fn marlin_gemm_part<'py>(
    py: Python<'py>,
    a: Input<'py>,
    packed: Packed<'py>,
    quant_type: &str,
    size_n: usize,
    split: SplitOf,
) -> PyResult<Output<'py>> {
    let (a, parts, ty) = operands(&a, &packed, quant_type)?;
    let made = py.detach(|| -> Result<_> {
        let dtype = half(&a)?;
        let part = part_of(parts, ty, dtype, (split, size_n))?;
        let schedule = Schedule::canonical_v2_part(&part, dtype, dtype)?;
        let sums = execute(&schedule, &a, part.weight(), Extras::default())?;
        let sums = sums.into_iter().map(f32::from_bits).collect();
        Tensor::from_vec("sums", DType::F32, vec![a.shape()[0], size_n], sums)
    });
    Ok(output(py, made.failed()?))
}

/// y `[M, N]`, of the type of `like`, of the sums `[ranks, M, N]` of all ranks; `packed` is any rank's part.
#[pyfunction]
pub(crate) fn add_ranks<'py>(
    py: Python<'py>,
    sums: Input<'py>,
    packed: Packed<'py>,
    quant_type: &str,
    dtype: &str,
    size_k: usize,
) -> PyResult<Output<'py>> {
    let sums = sums.tensor("sums")?;
    let parts = packed.parts("b")?;
    let ty = weight_type(quant_type)?;
    let dtype = half_named(dtype)?;
    let stored = if dtype == ScalarType::FLOAT16 { DType::F16 } else { DType::BF16 };
    let made = py.detach(|| -> Result<_> {
        sums.expect_dtype(&[DType::F32])?;
        let [ranks, size_m, size_n] = sums.dims3()?;
        let part = part_of(parts, ty, dtype, ((size_k, 0, ranks), size_n))?;
        let values = sums.elements::<f32>();
        let values = ArrayView3::from_shape((ranks, size_m, size_n), &values)
            .map_err(|_| Error::shape("sums", sums.shape(), "[ranks, M, N]"))?;
        let views: Vec<_> = values.outer_iter().collect();
        let schedule = Schedule::canonical_v2_of(&part, dtype, dtype)?;
        let y = schedule.add_ranks(&views, &part, Extras::default())?;
        let bits = y.into_iter().map(|bits| bits as u16).collect();
        Tensor::from_vec("y", stored, vec![size_m, size_n], bits)
    });
    Ok(output(py, made.failed()?))
}
