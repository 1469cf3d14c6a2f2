//! The operations that case files hold, by their names.

use crate::named::named;

named! {
    /// The operation of a case.
    Op {
        /// One quantized matrix product.
        Linear "linear",
        /// A Mixture-of-Experts layer.
        Moe "moe",
        /// Scores to expert ids and weights.
        Router "router",
        /// Expert ids to padded blocks of tokens.
        MoeAlignBlockSize "moe_align_block_size",
        /// int4 codes for fp8 activations.
        Int4Fp8Preprocess "int4_fp8_preprocess",
        /// The Arm int4 path with dynamically quantized activations.
        DynQuantLinear "dyn_quant_linear",
        /// Block scales interleaved in tiles.
        SwizzleBlockscale "swizzle_blockscale",
        /// Experts of int4 with bf16 scales, for TensorRT-LLM's kernels.
        TrtllmMxInt4 "prepare_static_weights_for_trtllm_mxint4_moe",
        /// NVFP4 experts in a kernel's layout.
        Nvfp4Experts "convert_to_nvfp4_moe_kernel_format",
        /// One scale for w1 and w3 of FP8 experts.
        Fp8Requantize "process_fp8_weight_tensor_strategy_moe",
        /// e4m3fn to e4m3fnuz.
        NormalizeFnuz "normalize_e4m3fn_to_e4m3fnuz",
        /// What a rank loads of gpt-oss's MXFP4 experts.
        GptOssMxfp4 "load_weights_mxfp4",
        /// Activations to NVFP4.
        ScaledFp4Quant "scaled_fp4_quant",
        /// A product of NVFP4 activations and weights.
        ScaledFp4Mm "cutlass_scaled_fp4_mm",
        /// A product of FP8 activations and weights.
        ScaledMm "cutlass_scaled_mm",
        /// A layer of FP8 activations and weights.
        Fp8Moe "fused_experts_fp8_w8a8",
    }
}
