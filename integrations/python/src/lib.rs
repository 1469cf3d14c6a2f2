//! The extension module `marlinspike._core`. The package's Python code converts arrays and gives these
//! functions their public form.

mod arrays;
mod cases;
#[cfg(feature = "cuda")]
mod cuda;
mod dyn_quant;
mod error;
mod fuzz;
mod layouts;
mod numbers;
mod parts;
mod products;
mod quantize;
mod routing;

#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use super::cases::{
        check, draw, expect_stated, lattice, operations, read_case, reference, schema, schema_text,
        tensors, version, write_case,
    };
    #[cfg(feature = "cuda")]
    #[pymodule_export]
    use super::cuda::{
        cuda_activation, cuda_add_ranks, cuda_align, cuda_gemm, cuda_gemm_part, cuda_moe,
        cuda_permute_scales, cuda_quantize, cuda_repack, cuda_sum, cuda_topk,
    };
    #[pymodule_export]
    use super::dyn_quant::{dyn_quant_matmul, dyn_quant_pack, dyn_quant_packed_len};
    #[pymodule_export]
    use super::error::Error;
    #[pymodule_export]
    use super::fuzz::{fuzz, merge};
    #[pymodule_export]
    use super::layouts::{
        awq_marlin_repack, gptq_marlin_repack, marlin_int4_fp8_preprocess, marlin_permute_bias,
        marlin_permute_scales,
    };
    #[pymodule_export]
    use super::numbers::{decode, encode};
    #[pymodule_export]
    use super::parts::{add_ranks, marlin_gemm_part};
    #[pymodule_export]
    use super::products::{fused_marlin_moe, marlin_gemm, moe_activation, moe_sum};
    #[pymodule_export]
    use super::quantize::{gptq_quantize_weights, per_tensor_fp8, per_token_fp8, per_token_int8};
    #[pymodule_export]
    use super::routing::{moe_align_block_size, topk};
}
