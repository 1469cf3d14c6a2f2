//! Numbers: conversions between formats, array views, sums of tensor cores.
#![allow(missing_docs)]

mod arrays;
mod interval;
mod scalar_decode;
mod scalar_kind;
mod scalar_narrow;
mod scalar_oracle;
mod scalar_torch;
mod tensor_core;
