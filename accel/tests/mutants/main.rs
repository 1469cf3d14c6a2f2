//! Wrong kernels. In a process of their own: an illegal address ends the CUDA context of its process.
#![allow(missing_docs)]

mod kit;
mod many_rows;
mod scaled_mm;

#[path = "../common/mod.rs"]
mod common;
#[path = "../subject/mod.rs"]
mod subject;
