//! Random inputs. Shapes lie around the edges of tiles and blocks; values cover the whole format,
//! with zeros of both signs, NaN codes and e8m0's 255.

mod random;

pub use random::Rng;

use crate::Result;
use crate::num::scalar::ScalarType;
use crate::num::tensor::{DType, Tensor};
use crate::ops::case::Case;
use crate::ops::schema::Dim;
use crate::ops::tensors::half;

/// Row counts: one, a few, one past a block of 16.
pub(in crate::ops) const ROWS: [usize; 7] = [1, 2, 3, 4, 8, 16, 17];

/// Activations `[rows, cols]`; some rows are all zeros or all one value.
pub(in crate::ops) fn activations(
    rng: &mut Rng,
    dtype: ScalarType,
    rows: usize,
    cols: usize,
) -> Result<Tensor<'static>> {
    let mut values = Vec::with_capacity(rows * cols);
    for _ in 0..rows {
        let same = activation_bits(rng, dtype);
        let kind = rng.below(12);
        values.extend((0..cols).map(|_| match kind {
            0 => 0u16,
            1 => same,
            _ => activation_bits(rng, dtype),
        }));
    }
    Tensor::from_vec("in.x", half(dtype), vec![rows, cols], values)
}

/// Random bits for operations that only move or look up values; scales are positive.
pub(in crate::ops) fn any_inputs(case: &mut Case<'_>, rng: &mut Rng) -> Result<()> {
    // Scales outside the range of f16 distinguish upstream's ways of requantizing.
    let tiny = rng.chance(1, 3);
    for rule in case.config.rules(0)? {
        let Some(name) = rule.name.strip_prefix("in.") else { continue };
        let shape = sizes(&rule.shape);
        let tensor = match rule.dtypes[0] {
            DType::F32 if tiny => times(positive_values(rng, shape)?, 1.0 / (1 << 20) as f32)?,
            DType::F32 => positive_values(rng, shape)?,
            dtype => any_bits(rng, dtype, shape)?,
        };
        case.add_input(name, tensor);
    }
    Ok(())
}

/// Adds `topk_ids` and `topk_weights` `[M, top_k]`, and the `expert_map` of a rank that has `local` of
/// `num_experts` experts.
pub(in crate::ops) fn routes(
    case: &mut Case<'_>,
    rng: &mut Rng,
    [m, top_k]: [usize; 2],
    [num_experts, local]: [usize; 2],
) -> Result<()> {
    let mut ids: Vec<i32> = Vec::new();
    let mut experts: Vec<i32> = (0..num_experts as i32).collect();
    for _ in 0..m {
        rng.shuffle(&mut experts);
        ids.extend(&experts[..top_k]);
    }
    let weights = (0..ids.len()).map(|_| scale(rng).min(1.0)).collect();
    let topk = vec![m, top_k];
    case.add_input("topk_ids", Tensor::from_vec("", DType::I32, topk.clone(), ids)?);
    case.add_input("topk_weights", Tensor::from_vec("", DType::F32, topk, weights)?);
    if local != num_experts {
        // The experts of this rank, in a random order.
        let mut map = vec![-1; num_experts];
        rng.shuffle(&mut experts);
        for (local, &global) in experts[..local].iter().enumerate() {
            map[global as usize] = local as i32;
        }
        case.add_input("expert_map", Tensor::from_vec("", DType::I32, vec![map.len()], map)?);
    }
    Ok(())
}

/// The sizes of a rule whose dimensions are all fixed.
pub(in crate::ops) fn sizes(dims: &[Dim]) -> Vec<usize> {
    let size = |dim: &Dim| match dim {
        Dim::Is(size) => *size,
        _ => 1,
    };
    dims.iter().map(size).collect()
}

/// Patterns of a tensor of bytes.
#[derive(Clone, Copy)]
enum Kind {
    Noise,
    Same(u8),
    /// The extreme values of the format.
    Ends,
    /// Neighbours differ along every axis.
    Ramp,
}

fn kind(rng: &mut Rng) -> Kind {
    match rng.below(8) {
        0 => Kind::Same(rng.next_u32() as u8),
        1 => Kind::Ends,
        2 => Kind::Ramp,
        _ => Kind::Noise,
    }
}

/// `len` bytes, mapped to allowed values by `fix`.
fn bytes(rng: &mut Rng, len: usize, fix: impl Fn(u8) -> u8) -> Vec<u8> {
    let kind = kind(rng);
    let ends = [0x00, 0x80, 0x7f, 0xff, 0x7e, 0xfe, 0x01, 0x81];
    let mut byte = |i: usize| match kind {
        Kind::Noise => rng.next_u32() as u8,
        Kind::Same(byte) => byte,
        Kind::Ends => rng.pick(&ends),
        Kind::Ramp => (i * 37 + i / 16 * 5) as u8,
    };
    (0..len).map(|i| fix(byte(i))).collect()
}

pub(in crate::ops) fn any_bits(
    rng: &mut Rng,
    dtype: DType,
    shape: Vec<usize>,
) -> Result<Tensor<'static>> {
    let len = shape.iter().product::<usize>() * dtype.bytes();
    let data = bytes(rng, len, |b| b);
    Tensor::new("", dtype, shape, data)
}

/// An f32 from 2^-10 to 2^2.
pub(in crate::ops) fn scale(rng: &mut Rng) -> f32 {
    let calm = rng.calmness();
    f32::from_bits(rng.between(117 - calm, 128 - calm) << 23 | rng.next_u32() >> 9)
}

/// Positive f32 values; sometimes all equal.
pub(in crate::ops) fn positive_values(rng: &mut Rng, shape: Vec<usize>) -> Result<Tensor<'static>> {
    let (same, alike) = (scale(rng), rng.chance(1, 8));
    let len = shape.iter().product();
    let values = (0..len).map(|_| if alike { same } else { scale(rng) }).collect();
    Tensor::from_vec("", DType::F32, shape, values)
}

/// e4m3 block scales: not negative, no NaN, zero among them.
pub(in crate::ops) fn block_scales(rng: &mut Rng, shape: Vec<usize>) -> Result<Tensor<'static>> {
    let len = shape.iter().product();
    let data = bytes(rng, len, |b| (b & 0x7f).min(0x7e));
    Tensor::new("", DType::F8E4M3, shape, data)
}

/// e4m3fn codes that are numbers.
pub(in crate::ops) fn e4m3(rng: &mut Rng, shape: Vec<usize>) -> Result<Tensor<'static>> {
    let len = shape.iter().product();
    let data = bytes(rng, len, |b| if b & 0x7f == 0x7f { b ^ 1 } else { b });
    Tensor::new("", DType::F8E4M3, shape, data)
}

/// Scales of rows or columns that keep products of e4m3 numbers within f16.
pub(in crate::ops) fn small(rng: &mut Rng, shape: Vec<usize>) -> Result<Tensor<'static>> {
    times(positive_values(rng, shape)?, 1.0 / 4096.0)
}

/// f32 times a power of two.
pub(in crate::ops) fn times(tensor: Tensor<'_>, factor: f32) -> Result<Tensor<'static>> {
    let values = tensor.elements::<f32>().iter().map(|s| s * factor).collect();
    Tensor::from_vec("", DType::F32, tensor.shape().to_vec(), values)
}

/// An activation small enough that no product overflows.
pub(in crate::ops) fn activation_bits(rng: &mut Rng, dtype: ScalarType) -> u16 {
    let (exponent, mantissa) = fields(dtype);
    let usual = (1u32 << (exponent - 1)) - 1;
    let sign = rng.between(0, 1) << 15;
    // The least exponent of a normal f16 is 1.
    let largest = usual - rng.calmness().min(usual - 1);
    let exponent = rng.between(largest.saturating_sub(8).max(1), largest);
    (sign | exponent << mantissa | rng.between(0, (1 << mantissa) - 1)) as u16
}

/// Exponent field's width and mantissa's width of a 16-bit type.
pub(in crate::ops) const fn fields(dtype: ScalarType) -> (u32, u32) {
    if matches!(dtype, ScalarType::FLOAT16) { (5, 10) } else { (8, 7) }
}
