//! Upstream's names of kernels and functions, and the operation whose cases check them.

use super::Op;

/// Names of vLLM, each with the name of its operation. Names that an operation has itself are not
/// listed.
pub const UPSTREAM_NAMES: &[(&str, &str)] = &[
    ("marlin_gemm", "linear"),
    ("gptq_marlin_gemm", "linear"),
    ("marlin_permute_scales", "linear"),
    ("marlin_permute_bias", "linear"),
    ("fused_marlin_moe", "moe"),
    ("moe_wna16_marlin_gemm", "moe"),
    ("marlin_moe_permute_scales", "moe"),
    ("silu_and_mul", "moe"),
    ("moe_sum", "moe"),
    ("fused_topk", "router"),
    ("fused_topk_bias", "router"),
    ("grouped_topk", "router"),
    ("topk_softmax", "router"),
    ("topk_sigmoid", "router"),
    ("batched_moe_align_block_size", "moe_align_block_size"),
    ("marlin_int4_fp8_preprocess", "int4_fp8_preprocess"),
    ("_dyn_quant_matmul_4bit", "dyn_quant_linear"),
    ("_dyn_quant_pack_4bit_weight", "dyn_quant_linear"),
    ("per_token_group_quant_fp8", "per_token_group_fp8_quant"),
    ("scaled_int8_quant", "dynamic_scaled_int8_quant"),
    ("w8a8_triton_block_scaled_mm", "cutlass_scaled_mm"),
    ("w8a8_block_fp8_matmul", "cutlass_scaled_mm"),
    ("fp8_gemm_nt", "cutlass_scaled_mm"),
    ("cutlass_w4a8_moe_mm", "cutlass_w4a8_mm"),
    ("fused_experts", "fused_experts_fp8_w8a8"),
    ("fused_moe", "moe"),
];

/// Ends of names that each checkpoint format has, with a format in front.
const ENDS: &[(&str, &str)] =
    &[("_marlin_repack", "linear"), ("_marlin_moe_repack", "moe"), ("_marlin_linear", "linear")];

impl Op {
    /// The operation of this name, its own or upstream's.
    pub fn from_any_name(name: &str) -> Option<Self> {
        let whole = || UPSTREAM_NAMES.iter().find(|(theirs, _)| *theirs == name);
        let upstream = || whole().or_else(|| ENDS.iter().find(|(end, _)| name.ends_with(end)));
        Self::from_name(name).or_else(|| Self::from_name(upstream()?.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upstream_names_lead_to_operations() {
        for (i, (theirs, ours)) in UPSTREAM_NAMES.iter().enumerate() {
            assert!(Op::from_name(theirs).is_none(), "{theirs} is an operation");
            assert_eq!(Op::from_any_name(theirs).map(Op::name), Some(*ours));
            assert!(UPSTREAM_NAMES[..i].iter().all(|(other, _)| other != theirs), "{theirs} twice");
        }
        assert_eq!(Op::from_any_name("linear"), Op::from_name("linear"));
        assert_eq!(Op::from_any_name("gptq_marlin_repack"), Op::from_name("linear"));
        assert_eq!(Op::from_any_name("gptq_marlin_moe_repack"), Op::from_name("moe"));
        assert_eq!(Op::from_any_name("linaer"), None);
    }
}
