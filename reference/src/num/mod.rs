//! Numbers and sizes: scalar formats and their roundings, element types, intervals, dimensions, typed
//! tensors.

pub mod array;
pub mod array_mut;
pub mod dims;
pub mod element;
pub mod interval;
pub mod scalar;
pub mod tensor;
