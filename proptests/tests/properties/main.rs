//! Properties of operations: the reference passes, mutants are rejected.
#![allow(missing_docs)]

mod covering;
mod dyn_quant;
mod kernel_ops;
mod kit;
mod layer_laws;
mod product_bounds;
