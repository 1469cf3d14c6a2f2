//! Matrix products: what a matrix unit really computes.
//!
//! [`tensor_core`] emulates the arithmetic of NVIDIA's matrix units bit for bit, so that a
//! kernel's output can be compared for equality instead of within a tolerance. [`schedule`] says
//! a whole product as data, order of every addition included, and computes its bits.

pub mod schedule;
pub mod tensor_core;
