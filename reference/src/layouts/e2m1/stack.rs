//! The experts of a layer.

use std::borrow::Cow;

use rayon::prelude::*;

use super::{E2m1Layout, E2m1Rows, GROUP, PackedE2m1};
use crate::num::dims::Shape;
use crate::num::scalar::{bf16_to_f32, f16_to_f32};
use crate::num::tensor::{DType, Tensor};
use crate::{Error, Result};

/// Packed weights of several matrices of one layout, such as the experts of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct E2m1Stack<'a> {
    layout: E2m1Layout,
    bytes: Cow<'a, [u8]>,
}

impl<'a> E2m1Stack<'a> {
    /// Wraps `[count][E2m1Layout::packed_len]` bytes; errors contain `name`.
    ///
    /// # Errors
    /// [`Error::Shape`] unless they are one or more whole matrices.
    pub fn new(name: &str, layout: E2m1Layout, bytes: impl Into<Cow<'a, [u8]>>) -> Result<Self> {
        let bytes = bytes.into();
        if bytes.is_empty() || !bytes.len().is_multiple_of(layout.packed_len()) {
            let expected = format!("[experts, {}]", layout.packed_len());
            return Err(Error::shape(name, &[bytes.len()], expected));
        }
        Ok(Self { layout, bytes })
    }

    /// The layout of each matrix.
    pub fn layout(&self) -> E2m1Layout {
        self.layout
    }

    /// Matrices.
    pub fn count(&self) -> usize {
        self.bytes.len() / self.layout.packed_len()
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Matrix `i`, borrowed. Panics outside.
    pub fn get(&self, i: usize) -> PackedE2m1<'_> {
        let len = self.layout.packed_len();
        PackedE2m1 { layout: self.layout, bytes: Cow::Borrowed(&self.bytes[i * len..][..len]) }
    }

    /// Packs a checkpoint's stack: `blocks` `[E, N, K / 32, 16]`, `scales` `[E, N, K / 32]` and
    /// `bias` `[E, N]` in any float type. `interleaved`: even rows become the first half, odd ones
    /// the second, as gpt-oss stores gate and up. Experts are packed on rayon's current pool.
    ///
    /// # Errors
    /// [`Error::Dtype`], [`Error::Shape`], [`Error::Size`] and [`Error::Value`] naming the tensor.
    pub fn from_checkpoint(
        blocks: &Tensor<'_>,
        scales: &Tensor<'_>,
        bias: Option<&Tensor<'_>>,
        interleaved: bool,
    ) -> Result<E2m1Stack<'static>> {
        blocks.expect_dtype(&[DType::U8])?;
        scales.expect_dtype(&[DType::U8, DType::F8E8M0])?;
        let &[experts, size_n, groups, 16] = blocks.shape() else {
            return Err(Error::shape(blocks.name(), blocks.shape(), "[E, N, K / 32, 16]"));
        };
        scales.expect_shape(&[experts, size_n, groups])?;
        let biases = bias.map(|bias| biases(bias, [experts, size_n])).transpose()?;
        let size_k = groups.saturating_mul(GROUP);
        let layout = E2m1Layout::new(Shape::new(size_k, size_n))
            .map_err(|e| Error::shape(blocks.name(), blocks.shape(), e.to_string()))?;
        if experts == 0 || interleaved && !size_n.is_multiple_of(2) {
            let expected = "experts with pairs of interleaved rows";
            return Err(Error::shape(blocks.name(), blocks.shape(), expected));
        }
        if let Some(i) = scales.bytes().iter().position(|&s| s == 0xff) {
            let at = [i / (size_n * groups), i / groups % size_n, i % groups];
            return Err(Error::value(scales.name(), &at, "NaN (0xff)", "a power of two"));
        }
        let total = layout.packed_len().checked_mul(experts);
        let total = total
            .filter(|&total| isize::try_from(total).is_ok())
            .ok_or_else(|| Error::size(blocks.name(), experts, "experts that memory can hold"))?;
        let half = size_n / 2;
        let source = |n: usize| match interleaved {
            false => n,
            true if n < half => 2 * n,
            true => 2 * (n - half) + 1,
        };
        let mut bytes = vec![0; total];
        bytes.par_chunks_exact_mut(layout.packed_len()).enumerate().for_each(|(e, packed)| {
            let rows = E2m1Rows {
                blocks: &blocks.bytes()[e * size_n * size_k / 2..][..size_n * size_k / 2],
                scales: &scales.bytes()[e * size_n * groups..][..size_n * groups],
                bias: biases.as_ref().map(|bias| &bias[e * size_n..][..size_n]),
            };
            layout.fill(rows, source, packed);
        });
        E2m1Stack::new(blocks.name(), layout, bytes)
    }
}

/// The values of a bias `shape` of any float type.
fn biases(bias: &Tensor<'_>, shape: [usize; 2]) -> Result<Vec<f32>> {
    bias.expect_dtype(&[DType::F32, DType::F16, DType::BF16])?.expect_shape(&shape)?;
    let values: Vec<f32> = match bias.dtype() {
        DType::F32 => bias.elements::<f32>().into_owned(),
        DType::F16 => bias.elements::<u16>().iter().map(|&b| f16_to_f32(b)).collect(),
        _ => bias.elements::<u16>().iter().map(|&b| bf16_to_f32(b)).collect(),
    };
    Ok(values)
}
