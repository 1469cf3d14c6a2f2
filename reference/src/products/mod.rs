//! Matrix products: exact, bounded, and bit for bit.
//!
//! * Exact: Σ a·w over the stored values without error, rounded once (module `exact`).
//! * Bounded: the largest error of a kernel of a declared class ([`bound`]), carried through its
//!   chain of scales, bias and roundings ([`chain`]).
//! * Bit for bit: [`tensor_core`] emulates the arithmetic of NVIDIA's matrix units, and
//!   [`schedule`] describes a whole product as data, including the order of every addition, and
//!   computes its bits.

pub mod block_scaled;
pub mod bound;
mod bounded;
mod centre;
pub mod chain;
pub mod columns;
pub mod dispatch;
mod exact;
mod integers;
pub mod judge;
mod kernel;
pub mod recipe;
pub mod rows;
pub mod schedule;
mod simd;
mod summed;
pub mod tensor_core;
mod wide;

pub use block_scaled::{BlockScaledProduct, BlockScaledRows};
pub use bound::{Class, Inputs};
pub use bounded::Bounded;
pub use columns::{Columns, Rule, WeightColumns};
pub use exact::{Element, Request, product};
pub use integers::{Int8Epilogue, Int8Product, LEAST_BLOCK};
pub use judge::Judge;
pub use kernel::Stripe;
pub use recipe::{Convention, Extras, Recipe};
pub use rows::{Range, Rows};
pub use wide::Wide;
