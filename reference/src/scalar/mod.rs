//! Number formats: what a code's bits mean, under upstream's ids, names and limits.
//!
//! Source: vLLM 0.21.0 `scalar_type.py` (ids are part of its operators' interface).

mod kind;

pub use kind::{NanRepr, ScalarType};
