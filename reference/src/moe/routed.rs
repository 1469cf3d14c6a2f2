//! Where each token goes: expert ids and router weights, `[M, top_k]`.

use ndarray::ArrayView2;

use crate::num::array::rows_of;
use crate::{Error, Result};

/// Expert ids and router weights of every token: of one shape, row-major without gaps.
#[derive(Debug, Clone, Copy)]
pub struct Routed<'r> {
    /// Experts per token.
    pub(crate) top_k: usize,
    /// Global expert ids; −1 is none.
    pub(crate) topk_ids: &'r [i32],
    /// Router weights.
    pub(crate) topk_weights: &'r [f32],
}

impl<'r> Routed<'r> {
    /// The routing by `topk_ids` (global expert ids, −1 is none) and `topk_weights`, `[M, top_k]` each.
    ///
    /// # Errors
    /// [`Error::Size`] for no columns; [`Error::Shape`] if the shapes differ; [`Error::NotContiguous`]
    /// for other strides than row-major ones.
    pub fn new(topk_ids: ArrayView2<'r, i32>, topk_weights: ArrayView2<'r, f32>) -> Result<Self> {
        if topk_ids.ncols() == 0 {
            return Err(Error::size("columns of `topk_ids`", 0, "1 or more"));
        }
        if topk_weights.shape() != topk_ids.shape() {
            let expected = format!("{:?} as topk_ids", topk_ids.shape());
            return Err(Error::shape("topk_weights", topk_weights.shape(), expected));
        }
        let strided = |name: &str| {
            let (tensor, found) = (name.to_owned(), topk_ids.shape().to_vec());
            Error::NotContiguous { tensor, found }
        };
        Ok(Self {
            top_k: topk_ids.ncols(),
            topk_ids: topk_ids.to_slice().ok_or_else(|| strided("topk_ids"))?,
            topk_weights: topk_weights.to_slice().ok_or_else(|| strided("topk_weights"))?,
        })
    }

    /// [`Routed::new`] of row-major rows of `top_k` entries.
    ///
    /// # Errors
    /// As [`Routed::new`]; [`Error::Shape`] if the entries are not whole rows.
    pub fn from_rows(top_k: usize, topk_ids: &'r [i32], topk_weights: &'r [f32]) -> Result<Self> {
        let ids = rows_of("topk_ids", topk_ids, top_k)?;
        Self::new(ids, rows_of("topk_weights", topk_weights, top_k)?)
    }

    /// Experts per token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Global expert ids `[M, top_k]`; −1 is none.
    pub fn topk_ids(&self) -> ArrayView2<'r, i32> {
        let shape = (self.topk_ids.len() / self.top_k, self.top_k);
        ArrayView2::from_shape(shape, self.topk_ids).expect("whole rows")
    }

    /// Router weights `[M, top_k]`.
    pub fn topk_weights(&self) -> ArrayView2<'r, f32> {
        let shape = (self.topk_weights.len() / self.top_k, self.top_k);
        ArrayView2::from_shape(shape, self.topk_weights).expect("whole rows")
    }

    /// The expert ids, row-major.
    pub fn ids(&self) -> &'r [i32] {
        self.topk_ids
    }

    /// The router weights, row-major.
    pub fn weights(&self) -> &'r [f32] {
        self.topk_weights
    }
}
