//! Launched operations, one file each.

pub mod activation;
pub mod align;
pub mod awq;
mod check;
pub(crate) mod gather;
pub mod gemm;
pub mod gemm_a8;
pub mod layer;
pub mod permute;
pub mod quantize;
pub mod repack;
pub mod router;
pub mod scales;
pub mod sum;

pub use activation::moe_activation;
pub use align::moe_align_block_size;
pub use awq::awq_marlin_repack;
pub use gemm::{MarlinWeight, marlin_gemm};
pub use gemm_a8::marlin_gemm_a8;
pub use layer::{MarlinLayer, Workspace};
pub use permute::permute_cols;
pub use quantize::{per_token_quant_fp8, per_token_quant_int8};
pub use repack::{RepackArgs, gptq_marlin_repack};
pub use router::topk_router;
pub use scales::{marlin_int4_fp8_preprocess, marlin_permute_scales};
pub use sum::moe_sum;
