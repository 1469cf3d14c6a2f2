//! The parts of a Mixture-of-Experts layer around its matrix products: routing of tokens to
//! experts, alignment of tokens to blocks of one expert, the activation between the products, and
//! the sum over a token's experts.
//!
//! Results are defined by a sequence of IEEE operations ([`math`]), so any device can reproduce
//! them bit for bit. Outputs of other implementations are judged by intervals that follow from the
//! operations they may use ([`bound`], [`activation::bound`], [`sum`]).

pub mod activation;
pub mod align;
pub mod batched;
pub mod block;
pub mod bound;
pub mod families;
pub mod layer;
pub mod math;
mod routed;
pub mod router;
pub mod sum;

use crate::named::named;
use crate::num::scalar::ScalarType;
pub(crate) use crate::num::scalar::{narrow, widen};
use crate::{Error, Result};

named! {
    /// How router logits become scores.
    ScoringFunc {
        /// Softmax over the experts.
        Softmax "softmax",
        /// Sigmoid of each logit.
        Sigmoid "sigmoid",
    }
}

/// A sequence of operations, for functions whose implementations differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chain {
    /// Everything in f32 with [`math`]'s functions and one rounding to the 16-bit type at the end:
    /// the definition of the reference, which any device can reproduce bit for bit.
    Canonical,
    /// The types and roundings of upstream's operators. [`math`] replaces the CUDA library's
    /// exponential, error function and tanh, so a bit may differ if the two lie on different sides
    /// of a tie.
    Upstream,
}

/// Repeats each row of `cols` elements `top_k` times: rows of tokens become rows of slots.
pub fn to_slots<T: Copy>(rows: &[T], cols: usize, top_k: usize) -> Vec<T> {
    let rows = rows.chunks_exact(cols.max(1));
    rows.flat_map(|row| std::iter::repeat_n(row, top_k).flatten().copied()).collect()
}

/// Returns [`Error::Unsupported`] unless `ty` is FLOAT16 or BFLOAT16.
pub(crate) fn half_type(ty: ScalarType) -> Result<()> {
    match ty {
        ScalarType::FLOAT16 | ScalarType::BFLOAT16 => Ok(()),
        _ => Err(Error::unsupported(format!("{ty} as activation type"), "float16 or bfloat16")),
    }
}
