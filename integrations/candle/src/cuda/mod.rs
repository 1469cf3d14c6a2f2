//! Layers of packed weights on CUDA tensors: marlinspike's kernels on candle's stream, in memory of its allocator.
//!
//! The bits are those of the reference's canonical schedule, for any number of rows.

mod experts;
mod launch;
mod linear;
mod tensors;

pub use experts::MarlinExperts;
pub use linear::MarlinLinear;
pub use marlinspike_accel::ops::{PackedScales, ScaleBound};
pub use tensors::{MarlinTensors, PackedTensors};
