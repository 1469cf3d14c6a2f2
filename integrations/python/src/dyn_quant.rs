//! The int4 path on the CPU: operators with the arguments of torch's `_dyn_quant_pack_4bit_weight` and
//! `_dyn_quant_matmul_4bit`.

use marlinspike::layouts::kleidi::{Columns, NR, PackedRhs, RhsLayout};
use marlinspike::ndarray::Array2;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::element::bf16;
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::w4a8::quantize::ActivationRounding;
use marlinspike::w4a8::{Linear, LinearWorkspace};
use marlinspike::{Error, Result};
use pyo3::prelude::*;

use crate::arrays::{Input, Output, output};
use crate::error::Failed;

/// The layout of a `[size_k, size_n]` weight; `block_size` is the group size, K for channel-wise scales.
fn layout(block_size: usize, size_k: usize, size_n: usize) -> Result<RhsLayout> {
    let group_size =
        if block_size == size_k { GroupSize::Channel } else { GroupSize::Of(block_size) };
    RhsLayout::new(Shape::new(size_k, size_n), group_size, NR[1])
}

/// Bytes of a packed weight.
#[pyfunction]
pub(crate) fn dyn_quant_packed_len(
    block_size: usize,
    size_k: usize,
    size_n: usize,
) -> PyResult<usize> {
    layout(block_size, size_k, size_n).map(|layout| layout.packed_len()).failed()
}

/// `weights` `[N, K / 2]`, two codes plus 8 to a byte, the even k in the low bits; `scales_zeros`: f32 `[N]`
/// channel-wise, bf16 `[N, K / block_size]`; f32 `bias` `[N]`. Returns the packed bytes.
#[pyfunction]
pub(crate) fn dyn_quant_pack<'py>(
    py: Python<'py>,
    weights: Input<'py>,
    scales_zeros: Input<'py>,
    bias: Option<Input<'py>>,
    block_size: usize,
    size_k: usize,
    size_n: usize,
) -> PyResult<Output<'py>> {
    let (weights, scales) = (weights.tensor("weights")?, scales_zeros.tensor("scales_zeros")?);
    let bias = bias.as_ref().map(|bias| bias.tensor("bias")).transpose()?;
    let made = py.detach(|| -> Result<_> {
        let layout = layout(block_size, size_k, size_n)?;
        weights.expect_dtype(&[DType::U8])?.expect_shape(&[size_n, size_k / 2])?;
        if !size_k.is_multiple_of(2) {
            return Err(Error::size("in_features", size_k, "an even number"));
        }
        let code = |nibble: u8| nibble.cast_signed() - 8;
        let codes = weights.bytes().iter().flat_map(|&byte| [code(byte & 15), code(byte >> 4)]);
        let (shape, codes) = (Shape::new(size_k, size_n), codes.collect());
        let bias = match &bias {
            None => None,
            Some(bias) => {
                Some(bias.expect_dtype(&[DType::F32])?.expect_shape(&[size_n])?.elements::<f32>())
            }
        };
        let columns = if layout.is_channel_wise() {
            let scales = scales.expect_dtype(&[DType::F32])?.elements::<f32>();
            Columns::channel_wise(shape, codes, &scales, bias.as_deref())?
        } else {
            let scales = scales.expect_dtype(&[DType::BF16])?.elements::<u16>().into_owned();
            Columns::group_wise(shape, block_size, codes, scales, bias.as_deref())?
        };
        let bytes = layout.pack(&columns)?.into_bytes();
        Tensor::from_vec("packed_weights", DType::U8, vec![bytes.len()], bytes)
    });
    Ok(output(py, made.failed()?))
}

/// y `[M, N]` of x `[M, K]`, f32 or bf16, and packed bytes.
#[pyfunction]
pub(crate) fn dyn_quant_matmul<'py>(
    py: Python<'py>,
    inp: Input<'py>,
    packed_weights: Input<'py>,
    block_size: usize,
    size_k: usize,
    size_n: usize,
) -> PyResult<Output<'py>> {
    let (x, packed) = (inp.tensor("inp")?, packed_weights.tensor("packed_weights")?);
    let made = py.detach(|| -> Result<_> {
        let layout = layout(block_size, size_k, size_n)?;
        packed.expect_dtype(&[DType::U8])?.expect_shape(&[layout.packed_len()])?;
        let [size_m, columns] = x.dims2()?;
        if columns != size_k {
            return Err(Error::shape("inp", x.shape(), format!("[M, {size_k}]")));
        }
        let weight = PackedRhs::new(layout, packed.bytes())?;
        // The rounding of KleidiAI, which depends on the type.
        let rounding = match x.dtype() {
            DType::BF16 => ActivationRounding::HalfEven,
            _ => ActivationRounding::HalfAway,
        };
        let linear = Linear::new(weight, rounding);
        let mut work = LinearWorkspace::default();
        match x.expect_dtype(&[DType::F32, DType::BF16])?.dtype() {
            DType::F32 => {
                let mut y = Array2::<f32>::zeros([size_m, size_n]);
                linear.forward(x.float_view2()?, &mut work, y.view_mut())?;
                Tensor::from_array("y", y)
            }
            _ => {
                let mut y = Array2::from_elem([size_m, size_n], bf16::ZERO);
                linear.forward(x.float_view2()?, &mut work, y.view_mut())?;
                Tensor::from_array("y", y)
            }
        }
    });
    Ok(output(py, made.failed()?))
}
