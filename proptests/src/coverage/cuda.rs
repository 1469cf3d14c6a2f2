//! What the CUDA kernels do not compute, each with its reason. A test on a GPU compares this with what the
//! kernels refuse.

use marlinspike::case::{CaseConfig, CheckpointFormat, Op, QuantConfig};
use marlinspike::num::dims::GroupSize;
use marlinspike::num::scalar::ScalarType;

/// Why no kernel takes any case of a configuration; `None` where one takes its usual values.
pub fn cuda_objection(config: &CaseConfig) -> Option<&'static str> {
    match config {
        CaseConfig::Linear(c) => quant_objection(&c.quant, &[c.size_k]),
        CaseConfig::Moe(c) => quant_objection(&c.quant, &[c.hidden_size, c.intermediate_size]),
        CaseConfig::Router(_) | CaseConfig::Align(_) | CaseConfig::Preprocess(_) => None,
        CaseConfig::ScaledMm(_) | CaseConfig::Fp8Moe(_) => Some(
            "accel/tests/mutants/fp8_gemm tests the kernel; its sizes and schedules are not those of \
             cases",
        ),
        CaseConfig::Int8Moe(_) | CaseConfig::Int8Mm(_) => {
            Some("no kernel of this project has weights and activations of int8")
        }
        _ => Some("no kernel of this project computes the operation"),
    }
}

/// The axes that decide whether a kernel takes a configuration; `None` where none ever does, or any.
pub(super) fn deciding_axes(op: Op) -> Option<&'static [&'static str]> {
    match op {
        Op::Linear => Some(&["weight", "dtype", "input_dtype", "group_size", "desc_act"]),
        Op::Moe => Some(&[
            "weight",
            "dtype",
            "input_dtype",
            "group_size",
            "desc_act",
            "hidden_size",
            "intermediate_size",
        ]),
        _ => None,
    }
}

/// Why no kernel takes matrices of these formats, one for each K.
fn quant_objection(quant: &QuantConfig, sizes_k: &[usize]) -> Option<&'static str> {
    let groups = |size| quant.group_size == GroupSize::Of(size);
    if let CheckpointFormat::Block(format) = quant.checkpoint_format
        && format.scale == ScalarType::FLOAT8_E8M0FNU
        && quant.dtype == ScalarType::FLOAT16
    {
        return Some("float16 lacks most of e8m0's scales");
    }
    if quant.checkpoint_format == CheckpointFormat::Fp8 && (groups(16) || groups(32)) {
        return Some("FP8 has scales of groups of a multiple of 64 k, or of all of k");
    }
    quant.input_dtype?;
    if quant.has_act_order() {
        return Some("products of 8-bit rows have no act-order: groups are separate sums");
    }
    let is_cut = sizes_k.iter().any(|size| !size.is_multiple_of(128));
    is_cut.then_some("products of 8-bit rows take K in steps of 128")
}

/// The properties of layouts, each with what is tested on CUDA.
pub const LAYOUTS: [(&str, &str); 15] = [
    ("gptq_marlin_repack", "the kernel"),
    ("awq_marlin_repack", "the kernel"),
    ("prepare_fp4_repack", "the kernel of gptq_marlin_repack"),
    ("merge_w13", "the kernel of gptq_marlin_repack"),
    ("marlin_permute_scales", "the kernel"),
    ("marlin_permute_bias", "the kernel of marlin_permute_scales"),
    ("marlin_int4_fp8_preprocess", "the kernel"),
    ("nvfp4_marlin_process_scales", "the permutation, by marlin_permute_scales; the host converts"),
    ("mxfp_marlin_process_scales", "the permutation, by marlin_permute_scales; the host converts"),
    ("awq_to_marlin_zero_points", "the permutation, by marlin_permute_scales; the host packs"),
    ("marlin_act_int8_process_scales", "none: a conversion of each scale at load, on the host"),
    ("row_parallel_scales", "none: a rank reads its part of the file, without any computation"),
    ("gptq_zero_points", "none: codes of a file, which the host reads; kernels take awq's order"),
    ("marlin_sort_g_idx", "none: sorted once at load, on the host, as upstream does"),
    ("nvfp4_marlin_process_global_scale", "none: one number of each expert at load, on the host"),
];
