//! Wrong kernels. In a process of their own: an illegal address ends the CUDA context of its process.
#![allow(missing_docs)]

mod fp8_gemm;
mod fp8_rows;
mod kit;
mod many_rows;
mod w4a8;
mod w4a8_layers;

#[path = "../common/mod.rs"]
mod common;
#[path = "../subject/mod.rs"]
mod subject;
