//! Each CUDA operation against the reference, on a GPU if present; the compiler, the cache and the device.
#![allow(missing_docs)]

mod act_order;
mod cache;
mod covering;
mod device;
mod expert_ranks;
mod formats;
mod gemm;
mod gemm_a8;
mod laws;
mod layer;
mod layout;
mod limits;
mod moe;
mod nvrtc;
mod peers;
mod processes;
mod quantize;
mod ranks;
mod repack;
mod wires;

#[path = "../common/mod.rs"]
mod common;
#[path = "../subject/mod.rs"]
mod subject;
