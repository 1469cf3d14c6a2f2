//! The parts of a Mixture-of-Experts layer around its matrix products: which experts a token goes
//! to and with which weight, and how tokens are cut into blocks of one expert.
//!
//! Results are defined as a stated sequence of IEEE operations ([`math`]), so that any device can
//! repeat them bit for bit; the outputs of other implementations are judged by intervals derived
//! from the operations they may use ([`bound`]).

pub mod align;
pub mod batched;
pub mod bound;
pub mod math;
pub mod router;
