//! Layouts of Marlin's kernels, by upstream's functions.

use marlinspike::formats::awq;
use marlinspike::layouts::Layout as _;
use marlinspike::layouts::marlin::{
    Activations, ScaleLayout, ScalePermutation, WeightLayout, int4_to_fp8_asymmetric,
    int4_to_fp8_symmetric,
};
use marlinspike::num::array::{into_vec, rows_of};
use marlinspike::num::dims::{GroupSize, LogicalK, Shape};
use marlinspike::num::scalar::{ScalarType, float_type};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::weight::{Codes, Table};
use marlinspike::{Error, Result};
use pyo3::prelude::*;

use crate::arrays::{Input, Output, output};
use crate::error::Failed;

const fn activations(is_a_8bit: bool) -> Activations {
    if is_a_8bit { Activations::Bits8 } else { Activations::Bits16 }
}

fn layout(size_k: usize, size_n: usize, num_bits: u32, is_a_8bit: bool) -> Result<WeightLayout> {
    WeightLayout::new(Shape::new(size_k, size_n), num_bits, activations(is_a_8bit))
}

fn packed(
    layout: &WeightLayout,
    codes: &Codes<'_>,
    perm: Option<&[u32]>,
) -> Result<Tensor<'static>> {
    let words = layout.pack(codes, perm)?;
    Tensor::from_vec("packed", DType::I32, layout.packed_shape().to_vec(), into_vec(words))
}

/// GPTQ's `[K / pack, N]` words in Marlin's layout.
#[pyfunction]
pub(crate) fn gptq_marlin_repack<'py>(
    py: Python<'py>,
    b_q_weight: Input<'py>,
    perm: Option<Input<'py>>,
    size_k: usize,
    size_n: usize,
    num_bits: u32,
    is_a_8bit: bool,
) -> PyResult<Output<'py>> {
    let words = b_q_weight.tensor("b_q_weight")?;
    let perm = perm.as_ref().map(|p| p.tensor("perm")).transpose()?;
    let made = py.detach(|| {
        let layout = layout(size_k, size_n, num_bits, is_a_8bit)?;
        let pack = (32 / num_bits) as usize;
        words.expect_dtype(&[DType::I32, DType::U32])?.expect_shape(&[size_k / pack, size_n])?;
        let codes = Codes::from_words(num_bits, layout.shape(), words.elements::<u32>())?;
        let perm = match &perm {
            None => None,
            Some(perm) => {
                perm.expect_dtype(&[DType::I32, DType::U32])?.expect_shape(&[size_k])?;
                Some(perm.elements::<u32>())
            }
        };
        packed(&layout, &codes, perm.as_deref())
    });
    Ok(output(py, made.failed()?))
}

/// AWQ's `[K, N / pack]` words in Marlin's layout.
#[pyfunction]
pub(crate) fn awq_marlin_repack<'py>(
    py: Python<'py>,
    b_q_weight: Input<'py>,
    size_k: usize,
    size_n: usize,
    num_bits: u32,
    is_a_8bit: bool,
) -> PyResult<Output<'py>> {
    let words = b_q_weight.tensor("b_q_weight")?;
    let made = py.detach(|| {
        let layout = layout(size_k, size_n, num_bits, is_a_8bit)?;
        let order = awq::column_order(num_bits);
        let pack = order.len();
        words.expect_dtype(&[DType::I32, DType::U32])?.expect_shape(&[size_k, size_n / pack])?;
        let elements = words.elements::<u32>();
        let codes = Codes::from_fn(num_bits, layout.shape(), |k, n| {
            let word = elements[k * (size_n / pack) + n / pack];
            let field = order.iter().position(|&column| column == n % pack).unwrap_or(0) as u32;
            (word >> (field * num_bits) & (u32::MAX >> (32 - num_bits))) as u8
        })?;
        packed(&layout, &codes, None)
    });
    Ok(output(py, made.failed()?))
}

/// The bytes of a scale's type, which are moved and not read.
fn moved_type(dtype: DType) -> ScalarType {
    float_type(dtype).unwrap_or(ScalarType::FLOAT8_E8M0FNU)
}

fn permuted(
    scales: &Tensor<'_>,
    size_n: usize,
    permutation: ScalePermutation,
) -> Result<Tensor<'static>> {
    let shape = scales.shape().to_vec();
    let flat = Tensor::new(
        scales.name(),
        scales.dtype(),
        vec![scales.len() / size_n.max(1), size_n],
        scales.bytes(),
    )?;
    let ty = moved_type(scales.dtype());
    let table = Table::from_tensor(&flat, ty)?;
    let packed = ScaleLayout::new(table.rows(), size_n, permutation, ty)?.pack(&table)?;
    let bytes = packed.to_tensor("scales", scales.dtype())?.into_bytes();
    Tensor::new("scales", scales.dtype(), shape, bytes)
}

/// Scales `[groups, N]` in the kernel's order.
#[pyfunction]
pub(crate) fn marlin_permute_scales<'py>(
    py: Python<'py>,
    s: Input<'py>,
    size_k: usize,
    size_n: usize,
    group_size: i64,
    is_a_8bit: bool,
) -> PyResult<Output<'py>> {
    let scales = s.tensor("s")?;
    let made = py.detach(|| -> Result<_> {
        let [groups, cols] = scales.dims2()?;
        let group_size = GroupSize::from_config(group_size)?;
        if cols != size_n || groups == 0 {
            return Err(Error::shape("s", scales.shape(), format!("[groups, {size_n}]")));
        }
        let order = ScalePermutation::choose(group_size, LogicalK(size_k), activations(is_a_8bit));
        permuted(&scales, size_n, order)
    });
    Ok(output(py, made.failed()?))
}

/// A bias in the kernel's order.
#[pyfunction]
pub(crate) fn marlin_permute_bias<'py>(py: Python<'py>, s: Input<'py>) -> PyResult<Output<'py>> {
    let bias = s.tensor("s")?;
    let size_n = bias.shape().last().copied().unwrap_or(0);
    Ok(output(py, permuted(&bias, size_n, ScalePermutation::Single).failed()?))
}

/// int4 codes for fp8 activations.
#[pyfunction]
pub(crate) fn marlin_int4_fp8_preprocess<'py>(
    py: Python<'py>,
    qweight: Input<'py>,
    qzeros_or_none: Option<Input<'py>>,
) -> PyResult<Output<'py>> {
    let words = qweight.tensor("qweight")?;
    let zeros = qzeros_or_none.as_ref().map(|z| z.tensor("qzeros_or_none")).transpose()?;
    let made = py.detach(|| -> Result<_> {
        words.expect_dtype(&[DType::I32, DType::U32])?;
        let [_, cols] = words.dims2()?;
        let codes = words.elements::<u32>();
        let rewritten = match &zeros {
            None => int4_to_fp8_symmetric(&codes),
            Some(zeros) => {
                zeros.expect_dtype(&[DType::I32, DType::U32])?;
                let [_, zero_cols] = zeros.dims2()?;
                if zero_cols != cols {
                    let expected = format!("[groups, {cols}]");
                    return Err(Error::shape(zeros.name(), zeros.shape(), expected));
                }
                let zeros = zeros.elements::<u32>();
                let (codes, zeros) =
                    (rows_of("qweight", &codes, cols)?, rows_of("qzeros", &zeros, cols)?);
                into_vec(int4_to_fp8_asymmetric(codes, zeros)?)
            }
        };
        Tensor::from_vec("qweight", DType::I32, words.shape().to_vec(), rewritten)
    });
    Ok(output(py, made.failed()?))
}
