//! The parts of a Mixture-of-Experts layer around its matrix products: which experts a token goes
//! to and with which weight, how tokens are cut into blocks of one expert, the activation between
//! the products, and the sum over a token's experts.
//!
//! Results are defined as a stated sequence of IEEE operations ([`math`]), so that any device can
//! repeat them bit for bit; the outputs of other implementations are judged by intervals derived
//! from the operations they may use ([`bound`], [`activation::bound`], [`sum`]).

pub mod activation;
pub mod align;
pub mod batched;
pub mod bound;
pub mod families;
pub mod layer;
pub mod math;
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

/// Which sequence of operations, where implementations differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chain {
    /// Everything in f32 with [`math`]'s functions and one rounding to the 16-bit type at the end:
    /// the reference's own definition, which any device can repeat bit for bit.
    Canonical,
    /// The types and roundings of upstream's operators. Their exponential, error function and
    /// tangent are the CUDA library's, for which [`math`]'s stand here: a bit may differ where the
    /// two fall on different sides of a tie.
    Upstream,
}

/// Rows of tokens as rows of slots: each row of `cols` elements `top_k` times.
pub fn to_slots<T: Copy>(rows: &[T], cols: usize, top_k: usize) -> Vec<T> {
    let rows = rows.chunks_exact(cols.max(1));
    rows.flat_map(|row| std::iter::repeat_n(row, top_k).flatten().copied()).collect()
}

/// Fails with [`Error::Unsupported`] unless `ty` is FLOAT16 or BFLOAT16.
pub(crate) fn half_type(ty: ScalarType) -> Result<()> {
    match ty {
        ScalarType::FLOAT16 | ScalarType::BFLOAT16 => Ok(()),
        _ => Err(Error::unsupported(format!("{ty} as activation type"), "float16 or bfloat16")),
    }
}
