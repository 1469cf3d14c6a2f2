//! Launched operations, one file each.

pub mod activation;
pub mod align;
mod check;
pub mod fp8_gemm;
pub mod fp8_rows;
pub(crate) mod gather;
pub mod gemm;
pub mod gemm_a8;
pub mod gemm_w4a8;
pub mod layer;
pub mod linear;
pub mod permute;
pub mod products;
pub mod quantize;
pub mod ranks;
pub mod repack;
pub mod router;
pub mod scales;
pub mod sum;

pub use activation::*;
pub use align::*;
pub use fp8_gemm::{Fp8Weight, fp8_gemm};
pub use gemm::{MarlinWeight, Packed, PackedParts, PackedScales, ScaleBound, marlin_gemm};
pub use gemm_a8::marlin_gemm_a8;
pub use gemm_w4a8::w4a8_gemm;
pub use layer::{MarlinLayer, Workspace};
pub use linear::{LinearWorkspace, MarlinLinear};
pub use permute::*;
pub use quantize::*;
pub use ranks::{Handle, NcclId, NcclRank, Rank, RankMemory};
pub use repack::*;
pub use router::*;
pub use scales::*;
pub use sum::*;
