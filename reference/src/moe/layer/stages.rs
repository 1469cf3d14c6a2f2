//! The results of a layer, and the sum of several ranks' results.

use super::Layer;
use crate::moe::{narrow, widen};
use crate::num::array::{FloatView2, HalfArray2};
use crate::{Error, Result};

/// The stages of a layer, of its `dtype`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stages {
    /// `[M·top_k, N of w13]`.
    pub gate_up: HalfArray2,
    /// `[M·top_k, I]`.
    pub activated: HalfArray2,
    /// `[M·top_k, H]`.
    pub down: HalfArray2,
    /// `[M, H]`.
    pub y: HalfArray2,
}

impl Stages {
    /// The stages of `layer` by their bits, row-major.
    pub(crate) fn from_bits(layer: &Layer<'_>, stages: [Vec<u16>; 4]) -> Result<Self> {
        let (h, i) = (layer.hidden_size(), layer.intermediate_size());
        let array = |name, cols, bits| HalfArray2::from_rows(name, layer.dtype, cols, bits);
        let [gate_up, activated, down, y] = stages;
        Ok(Self {
            gate_up: array("gate_up", layer.activation.width_in(i), gate_up)?,
            activated: array("activated", i, activated)?,
            down: array("down", h, down)?,
            y: array("y", h, y)?,
        })
    }
}

/// The sum of tensor-parallel ranks' outputs `[M, H]`, f16 or bf16: added in f32 in the order of ranks,
/// rounded once.
///
/// # Errors
/// [`Error::Size`] without ranks; [`Error::Shape`] when the ranks' outputs have several shapes;
/// [`Error::Dtype`] when they have several types; [`Error::Unsupported`] for f32.
pub fn sum_of_ranks(ranks: &[FloatView2<'_>]) -> Result<HalfArray2> {
    let Some(first) = ranks.first() else { return Err(Error::size("ranks", 0, "1 or more")) };
    let (ty, shape) = (first.scalar_type(), first.shape());
    let bits = |(rank, x): (usize, &FloatView2<'_>)| {
        let name = format!("output of rank {rank}");
        match x.shape() == shape {
            true => Ok(x.bits_of(&name, ty)?.into_owned()),
            false => Err(Error::shape(name, x.shape(), format!("{shape:?}"))),
        }
    };
    let ranks = ranks.iter().enumerate().map(bits).collect::<Result<Vec<_>>>()?;
    let sum = |n: usize| ranks.iter().fold(0f32, |sum, rank| sum + widen(ty, rank[n]));
    let y = (0..ranks[0].len()).map(|n| narrow(ty, sum(n))).collect();
    HalfArray2::from_bits("y", ty, [shape[0], shape[1]], y)
}
