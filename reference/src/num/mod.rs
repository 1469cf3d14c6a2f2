//! Numbers and sizes: scalar formats and their roundings, element types, intervals, dimensions, typed
//! tensors.

pub mod dims;
pub mod element;
pub mod float_array;
pub mod interval;
pub mod scalar;
pub mod tensor;
