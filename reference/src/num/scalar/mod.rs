//! Number formats with upstream's ids, names and limits: decoding, and encoding by functions whose
//! names state the rounding and the overflow policy.
//!
//! Sources: vLLM 0.21.0 `scalar_type.py` (ids are part of its operators' interface); IEEE 754-2019;
//! OCP's 8-bit floating point and Microscaling specifications.

mod convert;
mod convert_fp8;
mod fnuz;
mod format;
mod half;
mod kind;
mod limits;
mod stored;

pub use convert::*;
pub use convert_fp8::*;
pub use fnuz::*;
pub use format::{Overflow, Rounding};
pub(crate) use half::{narrow, round_to, widen};
pub use kind::{NanRepr, ScalarType};
pub use limits::Limit;
pub use stored::float_type;
pub(crate) use stored::stored_type;
