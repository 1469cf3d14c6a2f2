//! e4m3fn weights with a scale for each block of rows and columns.

use ndarray::Array2;

use super::fp8_group::ceil_to_ue8m0;
use super::{Quantized, absmax, finite_rows};
use crate::num::array::FloatView2;
use crate::num::element::E4m3fn;
use crate::{Error, Result};

/// e4m3fn codes `[N, K]` and scales `[⌈N / n⌉, ⌈K / k⌉]` of blocks `[n, k]`: scale = max(max, 1e-4) / 448,
/// with `ue8m0` rounded up to a power of two, q = x · fl(1 / scale), saturating, to nearest even.
///
/// Upstream: `per_block_cast_to_fp8` (DeepGEMM's `utils/math.py`, vLLM's `utils/deep_gemm.py`).
///
/// # Errors
/// [`Error::Size`] for blocks or a matrix without rows or columns; [`Error::Value`]: not finite.
pub fn per_block_fp8<'a>(
    x: impl Into<FloatView2<'a>>,
    [block_n, block_k]: [usize; 2],
    ue8m0: bool,
) -> Result<Quantized<E4m3fn>> {
    if block_n == 0 || block_k == 0 {
        return Err(Error::size("block", format!("[{block_n}, {block_k}]"), "positive sizes"));
    }
    let x = x.into();
    let (size_n, (x, size_k)) = (x.shape()[0], finite_rows(&x, 1)?);
    let [blocks_n, blocks_k] = [size_n.div_ceil(block_n), size_k.div_ceil(block_k)];
    let mut scales = vec![0f32; blocks_n * blocks_k];
    let block = |i: usize| i / size_k / block_n * blocks_k + i % size_k / block_k;
    for (i, value) in x.iter().enumerate() {
        let largest = &mut scales[block(i)];
        *largest = absmax(&[*largest, *value]);
    }
    for scale in &mut scales {
        *scale = scale.max(1e-4) / 448.0;
        if ue8m0 {
            *scale = ceil_to_ue8m0(*scale);
        }
    }
    let code = |(i, value): (usize, &f32)| {
        E4m3fn::from_f32_rne_saturating(value * (1.0 / scales[block(i)]))
    };
    let codes = x.iter().enumerate().map(code).collect();
    Quantized::from_rows(size_n, codes, Vec::new()).map(|made| Quantized {
        scales: Array2::from_shape_vec((blocks_n, blocks_k), scales).expect("every block"),
        ..made
    })
}

/// Codes and scales of FP8 blocks whose scales become powers of two: every weight is multiplied by its
/// scale in f32 and quantized again by [`per_block_fp8`].
///
/// Upstream: `requant_weight_ue8m0_inplace` (vLLM's `fp8_utils.py`), for DeepGEMM on Blackwell. A scale that is a
/// power of two may change, too: its block's largest code may be below half of 448.
///
/// # Errors
/// [`Error::Shape`] unless there is a scale for each block; as [`per_block_fp8`].
pub fn requantize_ue8m0(
    codes: &Array2<E4m3fn>,
    scales: &Array2<f32>,
    block: [usize; 2],
) -> Result<Quantized<E4m3fn>> {
    let [block_n, block_k] = block.map(|size| size.max(1));
    let (size_n, size_k) = codes.dim();
    let expected = (size_n.div_ceil(block_n), size_k.div_ceil(block_k));
    if scales.dim() != expected {
        let found = scales.shape();
        return Err(Error::shape("scales", found, format!("[{}, {}]", expected.0, expected.1)));
    }
    let value = |((n, k), code): ((usize, usize), &E4m3fn)| {
        code.to_f32() * scales[[n / block_n, k / block_k]]
    };
    let values: Vec<f32> = codes.indexed_iter().map(value).collect();
    let values = Array2::from_shape_vec((size_n, size_k), values).expect("every code");
    per_block_fp8(values.view(), block, true)
}
