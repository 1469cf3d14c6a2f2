//! Numbers and sizes: scalar formats and their roundings, intervals, dimensions, typed tensors.

pub mod dims;
pub mod interval;
pub mod scalar;
pub mod tensor;
