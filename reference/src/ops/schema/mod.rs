//! The schema of case files: keys, requirements on tensors and values, errors.

mod demand;
mod error;
mod keys;
mod reader;
mod rules;
mod values;

pub(crate) use demand::Demand;
pub use error::CaseError;
pub use keys::KeyKind;
pub(crate) use keys::KeyLog;
pub use reader::{CONFIG_BYTES, CONFIG_MEMORY};
pub(crate) use reader::{Reader, hint, object};
pub use rules::{Dim, TensorRule};
pub(crate) use rules::{rule, stored};
pub(crate) use values::{
    Inputs, e4m3_scales, expert_ids, expert_map, finite, in_range, not_negative, positive,
};
