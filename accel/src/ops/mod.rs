//! Launched operations, one file each.

pub mod repack;

pub use repack::{RepackArgs, gptq_marlin_repack};
