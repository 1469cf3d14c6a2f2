//! Mutants: wrong variants of operations, many of which have shipped. The properties must reject every
//! one.

mod cases;
mod layer;

pub use crate::mutant::Mutant;
pub use cases::cases;
pub use layer::{WrongLayer, layers};

/// All mutants of layouts; [`layers`] has those of whole layers, which take longer.
pub fn all() -> Vec<Mutant> {
    crate::ops::mutants()
}
