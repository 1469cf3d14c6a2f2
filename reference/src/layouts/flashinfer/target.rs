//! What files, options and help call these layouts. `scaled` means the titles of the formats with a
//! global scale, whose experts the layouts hold.

/// Name on the command line and in converted folders.
pub const NAME: &str = "flashinfer";
/// Name in messages and tables.
pub const TITLE: &str = "FlashInfer";
/// The option that names the kernel, after the parameter of vLLM's `convert_to_nvfp4_moe_kernel_format`.
pub const OPTION: &str = "nvfp4-backend";
/// The option's key in converted folders.
pub const OPTION_KEY: &str = "nvfp4_backend";
/// Arguments of an example.
pub const EXAMPLE: &str = "--nvfp4-backend VLLM_CUTLASS --skip-unsupported";
/// Start of the keys under which files describe their layers.
pub const METADATA: &str = "marlinspike.flashinfer";

/// One line of help.
pub fn about(scaled: &str) -> String {
    format!(
        "FlashInfer's and CUTLASS's forms of experts: {scaled} and int4 in groups of 32 for \
         Blackwell, FP8 blocks for Hopper too"
    )
}

/// Help: the names of the tensors.
pub fn tensors(scaled: &str) -> String {
    format!(
        "\
  --to flashinfer      experts' weight_packed or weight, weight_scale (FP8 blocks:
                       weight_scale_inv); {scaled} also weight_scale_2, input_scale"
    )
}

/// Help: the checkpoints that it takes.
pub fn takes(scaled: &str) -> String {
    format!(
        "\
{scaled} experts, compressed-tensors W4A16 experts in groups of 32 (mxint4), and
experts of FP8 blocks of 128 x 128 with quantized activations.
--skip-unsupported copies the rest of the model unchanged."
    )
}

/// Help of the option.
pub fn option_about(scaled: &str) -> String {
    format!(
        "the kernel for {scaled} weights and FP8 blocks, by upstream's name [default: \
         FLASHINFER_TRTLLM]"
    )
}
