//! Checkpoint bytes to [`crate::weight::Weight`], one file per format.

mod values;

pub(crate) use values::unflatten;
pub use values::{expect_finite, float_type};
