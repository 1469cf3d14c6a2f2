//! Matrix products, three ways.
//!
//! * Exact: Σ a·w over the stored values without error, rounded once ([`exact`]).
//! * Bounded: how far a kernel of a declared class may be from that ([`bound`]), through its own
//!   chain of scales, bias and roundings ([`chain`]).
//! * Bit for bit: [`tensor_core`] emulates the arithmetic of NVIDIA's matrix units, and [`schedule`]
//!   says a whole product as data, order of every addition included, and computes its bits.

pub mod block_scaled;
pub mod bound;
mod bounded;
mod centre;
pub mod chain;
pub mod columns;
pub mod dispatch;
mod exact;
pub mod judge;
mod kernel;
pub mod recipe;
pub mod rows;
pub mod schedule;
mod simd;
mod summed;
pub mod tensor_core;
mod wide;

pub use block_scaled::{Nvfp4Product, Nvfp4Rows};
pub use bound::{Class, Inputs};
pub use bounded::Bounded;
pub use columns::{Columns, Rule, WeightColumns};
pub use exact::{Element, Request, product};
pub use judge::Judge;
pub use kernel::Stripe;
pub use recipe::{Convention, Extras, Recipe};
pub use rows::{Range, Rows};
pub use wide::Wide;
