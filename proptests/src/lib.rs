//! Fuzzing kit for quantized kernels: tests your implementation of a layout, quantizer, product or
//! layer and reports where it is wrong.
//!
//! Implement [`Subject`] for the operations you have, then [`run`] it:
//!
//! ```
//! use marlinspike_proptests::{Config, Subject, SubjectError, ops, run};
//!
//! struct Mine;
//! impl Subject<ops::PermuteBias> for Mine {
//!     fn call(&self, input: &ops::BiasInput, out: &mut [u16]) -> Result<(), SubjectError> {
//!         for (p, value) in out.iter_mut().enumerate() {
//!             let column = 2 * (p % 32 / 8) + [0, 1, 8, 9, 16, 17, 24, 25][p % 8];
//!             *value = input.bias[p / 32 * 32 + column];
//!         }
//!         Ok(())
//!     }
//! }
//! let report = run::<ops::PermuteBias, _>(&Mine, &Config { cases: 50, ..Config::default() });
//! assert!(report.passed(), "{report}");
//! ```
//!
//! Inputs are drawn over the whole lattice of shapes and types and shrink to a minimal case; the
//! report names the violated property, the first wrong value in storage order with its (k, n),
//! tile, lane and register, and the seed that reproduces it.

#[cfg(feature = "properties")]
pub mod bank;
#[cfg(feature = "properties")]
mod bug;
pub mod campaign;
pub mod coverage;
#[cfg(feature = "properties")]
pub mod fuzz;
#[cfg(feature = "properties")]
pub mod laws;
#[cfg(feature = "properties")]
mod mutant;
#[cfg(feature = "properties")]
pub mod mutants;
#[cfg(feature = "properties")]
pub mod ops;
#[cfg(feature = "properties")]
mod report;
#[cfg(feature = "properties")]
mod runner;
#[cfg(feature = "properties")]
mod subject;

#[cfg(feature = "properties")]
pub use laws::{Law, laws};
#[cfg(feature = "properties")]
pub use report::{Failure, LawReport, Mismatch, Report};
#[cfg(feature = "properties")]
pub use runner::{Config, run};
#[cfg(feature = "properties")]
pub use subject::{Element, Operation, Reference, Subject, SubjectError};
