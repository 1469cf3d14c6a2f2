//! Products with weights that are not quantized: bf16, f16 or f32 weights times f32 activations.
// Index loops with fixed bounds unroll, so that arrays become registers.
#![allow(clippy::needless_range_loop)]

mod part;

use std::borrow::Cow;
use std::hint::black_box;

use marlinspike::num::scalar::{bf16_to_f32, f16_to_f32};
use marlinspike::num::tensor::{DType, Tensor};
use marlinspike::w4a8::wide::{Loop, wide};
use marlinspike::{Error, Result};
use rayon::prelude::*;

use super::dot::{LANES, tree};
use super::vector::Vector;

/// Columns that one work item computes, so that its rows of x stay in the cache.
const COLUMNS: usize = 32;

/// Values of a weight that stays in a core's L2 cache, as a router's: work items are then rows.
const CACHED: usize = 1 << 19;

/// Rows of such an item.
const ROW_ITEM: usize = 16;

/// Rows of x that share one read of the weights.
const ROWS: usize = 4;

/// Columns that share one read of x.
const COLUMN_TILE: usize = 4;

/// `[N, K]` in the checkpoint's type, borrowed from the file where its alignment allows.
#[derive(Debug, Clone)]
pub struct Dense<'f> {
    values: Values<'f>,
    size_n: usize,
    size_k: usize,
    bias: Option<Vec<f32>>,
}

#[derive(Debug, Clone)]
enum Values<'f> {
    Bf16(Cow<'f, [u16]>),
    F16(Cow<'f, [u16]>),
    F32(Cow<'f, [f32]>),
}

/// The bytes as elements, copied only if they are not aligned.
fn cast<T: bytemuck::Pod>(bytes: Cow<'_, [u8]>) -> Cow<'_, [T]> {
    match bytes {
        Cow::Borrowed(bytes) => match bytemuck::try_cast_slice(bytes) {
            Ok(slice) => Cow::Borrowed(slice),
            Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
        },
        Cow::Owned(bytes) => Cow::Owned(bytemuck::pod_collect_to_vec(&bytes)),
    }
}

impl<'f> Dense<'f> {
    /// The weight `[size_n, size_k]` of a tensor.
    ///
    /// # Errors
    /// [`Error::Dtype`] and [`Error::Shape`] naming the tensor.
    pub fn new(tensor: Tensor<'f>, size_n: usize, size_k: usize) -> Result<Self> {
        tensor.expect_dtype(&[DType::BF16, DType::F16, DType::F32])?;
        tensor.expect_shape(&[size_n, size_k])?;
        let dtype = tensor.dtype();
        let bytes = tensor.into_bytes();
        let values = match dtype {
            DType::BF16 => Values::Bf16(cast(bytes)),
            DType::F16 => Values::F16(cast(bytes)),
            _ => Values::F32(cast(bytes)),
        };
        Ok(Self { values, size_n, size_k, bias: None })
    }

    /// The weight with a bias `[size_n]`, added after the product.
    ///
    /// # Errors
    /// [`Error::Shape`] for another length.
    pub fn with_bias(self, name: &str, bias: Vec<f32>) -> Result<Self> {
        if bias.len() != self.size_n {
            return Err(Error::shape(name, &[bias.len()], format!("[{}]", self.size_n)));
        }
        Ok(Self { bias: Some(bias), ..self })
    }

    /// N.
    pub fn size_n(&self) -> usize {
        self.size_n
    }

    /// K.
    pub fn size_k(&self) -> usize {
        self.size_k
    }

    /// Row `n` as f32 to `out`: a token's embedding. Panics if `n` is outside.
    pub fn row(&self, n: usize, out: &mut [f32]) {
        let range = n * self.size_k..(n + 1) * self.size_k;
        match &self.values {
            Values::Bf16(v) => {
                out.iter_mut().zip(&v[range]).for_each(|(y, &b)| *y = bf16_to_f32(b))
            }
            Values::F16(v) => out.iter_mut().zip(&v[range]).for_each(|(y, &b)| *y = f16_to_f32(b)),
            Values::F32(v) => out.copy_from_slice(&v[range]),
        }
    }

    /// `out` `[M, N]` = `x` `[M, K]` · Wᵀ + bias, on rayon's current pool. Each output is one sum in
    /// the order of [`super`]. Panics if `x` or `out` has another length.
    pub fn forward(&self, x: &[f32], out: &mut [f32]) {
        let size_m = x.len() / self.size_k;
        assert_eq!((x.len(), out.len()), (size_m * self.size_k, size_m * self.size_n), "M");
        match &self.values {
            Values::Bf16(v) => self.typed::<Bf16>(bytemuck::cast_slice(v), x, size_m, out),
            Values::F16(v) => self.typed::<F16>(bytemuck::cast_slice(v), x, size_m, out),
            Values::F32(v) => self.typed::<f32>(v, x, size_m, out),
        }
        let Some(bias) = &self.bias else { return };
        out.chunks_exact_mut(self.size_n).for_each(|row| super::add(row, bias));
    }

    fn typed<W: Weight>(&self, weight: &[W], x: &[f32], size_m: usize, out: &mut [f32]) {
        let size_k = self.size_k;
        let product = |columns: &[W], out: &mut [f32]| wide(Product { columns, x, size_k, out });
        if size_m == 1 {
            // Small items where there are few columns, as a router's.
            let share = self.size_n / rayon::current_num_threads() / COLUMN_TILE * COLUMN_TILE;
            let count = share.clamp(COLUMN_TILE, COLUMNS);
            let items = weight.par_chunks(count * size_k).zip(out.par_chunks_mut(count));
            return items.for_each(|(columns, out)| product(columns, out));
        }
        if weight.len() <= CACHED {
            let rows =
                x.par_chunks(ROW_ITEM * size_k).zip(out.par_chunks_mut(ROW_ITEM * self.size_n));
            return rows.for_each_init(Vec::new, |columns, (x, out)| {
                super::resize(columns, out.len());
                wide(Product { columns: weight, x, size_k, out: columns });
                let size_m = x.len() / size_k;
                for (m, row) in out.chunks_exact_mut(self.size_n).enumerate() {
                    for (y, column) in row.iter_mut().zip(columns.chunks_exact(size_m)) {
                        *y = column[m];
                    }
                }
            });
        }
        // Work items write columns; the rows of `out` are their transposition.
        let mut columns = vec![0.0f32; size_m * self.size_n];
        let items = weight.par_chunks(COLUMNS * size_k);
        items
            .zip(columns.par_chunks_mut(COLUMNS * size_m))
            .for_each(|(weight, out)| product(weight, out));
        out.par_chunks_exact_mut(self.size_n).enumerate().for_each(|(m, row)| {
            for (y, column) in row.iter_mut().zip(columns.chunks_exact(size_m)) {
                *y = column[m];
            }
        });
    }
}

/// A weight's stored type.
trait Weight: Copy + Send + Sync {
    fn widen(self) -> f32;
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
struct Bf16(u16);

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
struct F16(u16);

impl Weight for Bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
}

impl Weight for F16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f16_to_f32(self.0)
    }
}

impl Weight for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

/// `out` `[columns][M]` of whole rows of an f32 weight and all rows of x, on the caller's thread.
pub(crate) fn product(columns: &[f32], x: &[f32], size_k: usize, out: &mut [f32]) {
    wide(Product { columns, x, size_k, out });
}

/// `out` `[columns][M]` of whole columns (rows of the stored weight) and all rows of x.
struct Product<'a, W> {
    columns: &'a [W],
    x: &'a [f32],
    size_k: usize,
    out: &'a mut [f32],
}

impl<W: Weight> Loop for Product<'_, W> {
    #[inline(always)]
    fn run(self) {
        let Self { columns, x, size_k, out } = self;
        let size_m = x.len() / size_k;
        let mut n = 0;
        let count = columns.len() / size_k;
        while n < count {
            // Several sums are independent, which hides the latency of additions.
            let step = if n + COLUMN_TILE <= count { COLUMN_TILE } else { 1 };
            let weights = &columns[n * size_k..(n + step) * size_k];
            let out = &mut out[n * size_m..(n + step) * size_m];
            let mut m = 0;
            while m < size_m {
                let x = &x[m * size_k..];
                m += match (m + ROWS <= size_m, step == COLUMN_TILE) {
                    (true, true) => tile::<W, ROWS, COLUMN_TILE>(x, weights, &mut out[m..], size_m),
                    (true, false) => tile::<W, ROWS, 1>(x, weights, &mut out[m..], size_m),
                    (false, true) => tile::<W, 1, COLUMN_TILE>(x, weights, &mut out[m..], size_m),
                    (false, false) => tile::<W, 1, 1>(x, weights, &mut out[m..], size_m),
                };
            }
            n += step;
        }
    }
}

/// R rows times C columns, each product with its own lanes: those of column c to `out[c * stride..]`. Returns R.
#[inline(always)]
fn tile<W: Weight, const R: usize, const C: usize>(
    x: &[f32],
    weights: &[W],
    out: &mut [f32],
    stride: usize,
) -> usize {
    let size_k = weights.len() / C;
    let mut lanes = [[Vector::ZERO; C]; R];
    let whole = size_k / LANES * LANES;
    let mut k = 0;
    while k < whole {
        let mut w = [Vector::ZERO; C];
        for c in 0..C {
            let weight = &weights[c * size_k + k..][..LANES];
            for lane in 0..LANES {
                w[c].0[lane] = weight[lane].widen();
            }
        }
        for r in 0..R {
            let x = Vector::load(x, r * size_k + k);
            for c in 0..C {
                lanes[r][c] = lanes[r][c].add_product(x, w[c]);
            }
        }
        k += LANES;
    }
    // Together with the additions of lanes, the compiler would use vectors of two.
    let lanes = black_box(lanes);
    for r in 0..R {
        for c in 0..C {
            let mut lanes = lanes[r][c].0;
            for k in whole..size_k {
                let lane = &mut lanes[k - whole];
                *lane = x[r * size_k + k].mul_add(weights[c * size_k + k].widen(), *lane);
            }
            out[c * stride + r] = tree(lanes);
        }
    }
    R
}

#[cfg(test)]
mod tests {
    use super::super::dot;
    use super::*;

    fn value(i: usize) -> f32 {
        ((i * 2_654_435_761) % 1021) as f32 / 256.0 - 2.0
    }

    #[test]
    fn every_type_and_every_batch_has_the_bits_of_one_sum() {
        // Work items of the last weight are columns, of the others rows.
        for (size_n, size_k) in [(1, 1), (5, 16), (37, 40), (70, 67), (600, 900)] {
            let halves: Vec<u16> =
                (0..size_n * size_k).map(|i| (value(i).to_bits() >> 16) as u16).collect();
            let floats: Vec<f32> = halves.iter().map(|&b| bf16_to_f32(b)).collect();
            // The codes of bf16 and f16 differ; as f16, the same codes are other, finite numbers.
            let small: Vec<u16> = halves.iter().map(|b| b & 0xbbff).collect();
            let shape = vec![size_n, size_k];
            let tensors = [
                (Tensor::from_vec("w", DType::BF16, shape.clone(), halves.clone()), floats.clone()),
                (Tensor::from_vec("w", DType::F32, shape.clone(), floats.clone()), floats.clone()),
                (
                    Tensor::from_vec("w", DType::F16, shape, small.clone()),
                    small.iter().map(|&b| f16_to_f32(b)).collect(),
                ),
            ];
            for (tensor, weight) in tensors {
                let bias: Vec<f32> = (0..size_n).map(|i| value(i + 11)).collect();
                let dense = Dense::new(tensor.unwrap(), size_n, size_k).unwrap();
                let dense = dense.with_bias("b", bias.clone()).unwrap();
                for size_m in (1..10).chain([16, 37]) {
                    let x: Vec<f32> = (0..size_m * size_k).map(|i| value(i + 5)).collect();
                    let mut out = vec![0.0; size_m * size_n];
                    dense.forward(&x, &mut out);
                    for (i, y) in out.iter().enumerate() {
                        let (m, n) = (i / size_n, i % size_n);
                        let row = &weight[n * size_k..][..size_k];
                        let expected = dot(&x[m * size_k..][..size_k], row) + bias[n];
                        assert_eq!(y.to_bits(), expected.to_bits(), "{size_m} {size_n} {size_k}");
                    }
                }
            }
        }
    }

    #[test]
    fn other_shapes_and_types_are_refused_by_name() {
        let tensor =
            || Tensor::from_vec("model.w", DType::F32, vec![2, 3], vec![0.0f32; 6]).unwrap();
        assert!(Dense::new(tensor(), 3, 2).unwrap_err().to_string().contains("model.w"));
        let codes = Tensor::from_vec("model.w", DType::I32, vec![2, 3], vec![0i32; 6]).unwrap();
        assert!(Dense::new(codes, 2, 3).unwrap_err().to_string().contains("model.w"));
        let dense = Dense::new(tensor(), 2, 3).unwrap();
        assert!(
            dense.with_bias("model.b", vec![0.0; 3]).unwrap_err().to_string().contains("model.b")
        );
    }
}
