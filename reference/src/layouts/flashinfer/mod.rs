//! Layouts of FlashInfer's and CUTLASS's MoE kernels: 4-bit for NVIDIA's Blackwell generation, and FP8
//! blocks ([`Fp8BlockExpert`]).
//!
//! A stack of 4-bit expert weights `[E, N, K]`, two codes per byte, and its block scales
//! `[E, N, K / group]` are transformed in three independent steps:
//!
//! * the rows n are reordered ([`RowOrder`]): the halves of w13 are exchanged or interleaved for
//!   the fused gated activation, and rows are shuffled so that a thread of the epilogue holds
//!   neighbours ([`RowStep`]);
//! * the k of a row keep their order, or the matrix is cut into columns of 128 bytes that are
//!   stored one after the other ([`PackedRows`]);
//! * the scales, in the same row order, are interleaved in tiles of 128 rows by 4 groups
//!   ([`BlockScaleLayout`]), and padded with zeros to whole tiles.
//!
//! [`ExpertLayout`] combines the three for a projection and a kernel: FlashInfer's mxint4, and
//! NVFP4 for each backend of [`ExpertBackend`]. [`RoutingMethod`] is the kernels' name for a router.
//!
//! Source: FlashInfer 0.6.8.post1 (`fused_moe/core.py`, `utils.py`, `thop/fp4Op.cpp`) and vLLM 0.21.0
//! (`flashinfer_mxint4_moe.py`, `flashinfer_fp4_moe.py`, `flashinfer_utils.py`, `nvfp4_utils.py`).

mod backend;
mod experts;
mod fp8;
pub(super) mod positions;
mod projection;
mod routing;
pub mod target;

pub use super::block_scale::{BlockScaleLayout, ScaleTile};
pub use super::packed_rows::{BLOCK_K_BYTES, PackedRows};
pub use super::rows::{RowOrder, RowStep};
pub use backend::{Alphas, ExpertBackend, activation_scales};
pub use experts::{Expert, ExpertLayout, Forgotten, PackedExperts};
pub use fp8::{Fp8BlockBackend, Fp8BlockExpert};
pub use projection::Projection;
pub use routing::{MoeKernel, RoutingMethod, RoutingSizes, Scoring};
