//! What config keys and tensors mean: a name has one meaning in every operation. Keys of one operation are
//! explained in its file.

use crate::ops;

/// What a config key means.
pub(super) fn key(path: &str) -> &'static str {
    match find(KEYS, path) {
        "" => own_keys().find(|(known, _)| *known == path).map_or("", |(_, about)| about),
        about => about,
    }
}

/// The keys that operations explain themselves.
fn own_keys() -> impl Iterator<Item = (&'static str, &'static str)> {
    ops::ALL.iter().flat_map(|entry| (entry.key_meanings)().iter().copied())
}

/// Every name that has a meaning, with that meaning: of keys, then of tensors.
pub(super) fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    own_keys().chain([KEYS, INPUTS, OUTPUTS].into_iter().flatten().copied())
}

/// What a tensor holds, by its full name. The tensors of both matrices of a layer share a meaning.
pub(super) fn tensor(name: &str) -> &'static str {
    let bare = name.trim_start_matches("in.").trim_start_matches("out.");
    let of_layer = ["w13_", "w2_"].iter().find_map(|prefix| bare.strip_prefix(prefix));
    let table = if name.starts_with("in.") { INPUTS } else { OUTPUTS };
    match (find(table, bare), of_layer) {
        ("", Some(rest)) => find(table, rest),
        (found, _) => found,
    }
}

fn find(table: &[(&'static str, &'static str)], name: &str) -> &'static str {
    table.iter().find(|(known, _)| *known == name).map_or("", |(_, about)| about)
}

const KEYS: &[(&str, &str)] = &[
    ("activation", "activation between the two products, by upstream's name"),
    ("adversarial_rows", "a remark of the producer; not read"),
    ("apply_router_weight_on_input", "whether router weights multiply `gate_up` instead of `down`"),
    (
        "arithmetic",
        "the kernels that `y` may be from: the operator's bits, or a bound for f32 in any order",
    ),
    ("azp", "zero points of int8 activations: one for all rows, or one for each; null: none"),
    ("backend", "the kernel that the experts are prepared for"),
    ("block_size", "tokens per block"),
    ("block_size_m", "tokens per block of `sorted_token_ids`"),
    (
        "block_size_k",
        "k of the kernel's int32 sums, which makes every bit of both products comparable",
    ),
    ("checkpoint_format", "how the weight inputs are stored"),
    ("convention", "which roundings the kernel makes; without it, every known convention is tried"),
    ("desc_act", "act-order: rows belong to groups by `g_idx`"),
    ("dtype", "type of activations, scales and outputs"),
    ("ep_rank", "this expert-parallel rank"),
    ("ep_size", "expert-parallel ranks"),
    ("epilogue", "the steps after the int32 sum, which make every bit of `y` comparable"),
    ("fp8_type", "meaning of the FP8 codes"),
    (
        "gate_up_layout",
        "where gate and up are in a row of `gate_up`; without it `swigluoai` may have either",
    ),
    ("gate_up", "order of the gate and up rows in the kernel's w13"),
    ("group_size", "k per scale; -1: one scale per column"),
    ("groups", "scales per row"),
    ("has_bias", "whether there is a bias"),
    ("hidden_size", "K of w13 and N of w2"),
    ("input_dtype", "type of 8-bit activations; null: the product reads `x` itself"),
    ("intermediate_size", "K of w2; w13 has as many rows for each of gate and up"),
    ("is_act_and_mul", "whether w13 holds gate and up, or up alone"),
    ("is_k_full", "false on a rank that holds a slice of K under act-order"),
    ("is_sf_swizzled_layout", "whether block scales are interleaved in tiles of 128x4"),
    (
        "logical_widths",
        "columns of each of the matrices that were merged along N; they add up to `size_n`",
    ),
    ("num_expert_group", "groups of experts; divides the number of experts"),
    ("num_experts", "experts of all ranks"),
    ("num_local_experts", "experts of this rank, whose weights the case holds"),
    ("num_scales", "scales of the weight"),
    ("per_act_token_quant", "whether each row of activations has its own scale"),
    ("per_out_ch_quant", "whether each output feature has its own scale"),
    ("platform", "the platform that the kernel runs on"),
    (
        "quantizer",
        "the rule that quantizes activations; see [Operations](operations.md#fp8-blocks) and \
         [Stated activations](../internals/activations.md#stated-activations); of `linear` and int8 layers, without it \
         every known one is tried",
    ),
    ("reciprocal", "whether the kernel divides exactly or by an approximate reciprocal"),
    ("renormalize", "whether the chosen weights are divided by their sum"),
    ("requantize", "how codes move to the common scale"),
    (
        "router_weight_on",
        "what router weights multiply: `down`, `gate_up`, or `x`, rounded to its type, before it is quantized",
    ),
    ("routed_scaling_factor", "factor on the chosen weights"),
    ("scale_factor", "the power of two that block scales were multiplied by"),
    ("scale_factor_w13", "the power of two that w13's block scales were multiplied by"),
    ("scale_factor_w2", "the power of two that w2's block scales were multiplied by"),
    ("scale_type", "type of the block scales"),
    (
        "scale_layout",
        "order of the scales in memory, and their padding; see [Operations](operations.md#fp8-blocks)",
    ),
    (
        "schedule",
        "the order and rounding of the sum, which makes every bit of `y` comparable; see [Schedules](schedules.md)",
    ),
    ("schedule.architecture", "the matrix unit that computes the product"),
    ("schedule_w13", "the schedule of `gate_up`"),
    ("schedule_w2", "the schedule of `down`"),
    ("scoring_func", "logits to scores"),
    ("swiglu_alpha", "α of gate · σ(α · gate); 1.702 for `swigluoai`, else 1"),
    ("swiglu_beta", "β of (up + β); 1 for `swigluoai`, else 0"),
    ("swiglu_limit", "L of min(gate, L) and of up in [-L, L]; 7 for `swigluoai` and `swiglustep`"),
    (
        "sf_layout",
        "tile of the interleaved scales; see [Layouts of 4-bit experts](operations.md#layouts-of-4-bit-experts)",
    ),
    ("size_k", "K: input features"),
    ("size_m", "M: rows of activations"),
    ("size_n", "N: output features"),
    ("symmetric", "whether int8 codes have no zero points"),
    ("tensor_parallel", "the tensor-parallel rank that holds this slice of the matrix"),
    ("tensor_parallel.rank", "this rank"),
    ("tensor_parallel.size", "ranks"),
    ("tensor_parallel.style", "whether columns (N) or rows (K) are divided among ranks"),
    ("top_k", "experts per token"),
    ("topk_group", "groups that are chosen"),
    ("tp_rank", "this tensor-parallel rank"),
    ("tp_size", "tensor-parallel ranks"),
    ("use_grouped_topk", "whether groups of experts are chosen before experts"),
    ("use_ue8m0", "whether the activations' scales are rounded up to powers of two"),
    ("weight_block_size", "[n, k] of a block of the weight that shares a scale; k, of activations"),
    ("weight_type", "what a code of the weight means"),
];

const INPUTS: &[(&str, &str)] = &[
    (
        "shared_output",
        "output of a shared expert; `y` contains it: the sum over the slots, rounded or not, and then this",
    ),
    ("a", "activations, quantized"),
    ("a_global_scale", "global scale of the activations; greater than 0"),
    ("a_q", "the quantized activations that the product read; with `in.a_scales`"),
    ("a_scale", "block scales of the activations; 0 or more, no NaN"),
    ("a_scales", "scales of the activations; greater than 0, of products with an epilogue also 0"),
    ("azp", "zero points of the activations, subtracted from their codes"),
    ("azp_adj", "sums of the weight's rows; of one zero point for all rows, times it"),
    ("bias", "bias"),
    ("e_score_correction_bias", "added to the scores for the choice alone"),
    ("expert_map", "global to local expert ids, -1 for experts of other ranks"),
    ("expert_scale", "factor on the weights of each expert"),
    ("g_idx", "group of each row of K"),
    ("gemm1_scales", "scales of w13, one per 32 k"),
    ("gemm1_weights", "int4 codes of w13, 8 to a word"),
    ("gemm2_scales", "scales of w2, one per 32 k"),
    ("gemm2_weights", "int4 codes of w2, 8 to a word"),
    ("input_global_scale", "factor on the activations before they are quantized; greater than 0"),
    ("input_scale", "static scale of the activations; greater than 0"),
    ("qweight", "packed codes, along K or along N, in the order of `checkpoint_format`"),
    ("qzeros", "packed zero points, in the order of `checkpoint_format`"),
    ("router_logits", "router logits; -inf masks an expert"),
    ("scale", "scales: of blocks, or the static one of activations"),
    ("scales", "group scales; finite"),
    ("topk_ids", "global ids of the chosen experts"),
    ("topk_weights", "weights of the chosen experts; finite"),
    ("weight", "codes of the weight; of 4-bit codes, even k in the low nibble"),
    ("weight_global_scale", "global scale of the weight"),
    ("weight_packed", "int4 codes plus 8, 8 to a word"),
    ("weight_scale", "scales of the weight; finite, e8m0 without NaN (255)"),
    ("weight_scale_2", "global scales of the weight, one per shard; greater than 0"),
    ("weight_u4", "int4 codes plus 8, even k in the low nibble"),
    ("x", "activations"),
];

const OUTPUTS: &[(&str, &str)] = &[
    ("a1q", "`x`, quantized"),
    ("a1q_scale", "scales of `a1q`"),
    ("a2q", "`activated`, quantized"),
    ("a2q_scale", "scales of `a2q`"),
    ("activated", "`gate_up` after the activation"),
    ("bias", "bias, padded for the kernel"),
    ("down", "second product, router weight applied"),
    ("expert_ids", "expert of each block of `sorted_token_ids`"),
    ("g1_alphas", "input scale times weight scale of w13"),
    ("g1_scale_c", "scale of the first product's output"),
    ("g2_alphas", "input scale times weight scale of w2"),
    ("g_idx_sort_indices", "stable sort order of `g_idx`"),
    ("gate_up", "first product, one row for each token and slot"),
    ("gemm1_scales", "scales of w13 in the kernel's layout"),
    ("gemm1_weights", "codes of w13 in the kernel's layout"),
    ("gemm2_scales", "scales of w2 in the kernel's layout"),
    ("gemm2_weights", "codes of w2 in the kernel's layout"),
    ("input_global_scale", "what int8 scales were divided by"),
    ("input_scale", "static scale of the activations, as the kernel reads it"),
    ("lhs_packed", "activations, quantized and packed"),
    ("marlin_bias", "bias in Marlin's order"),
    ("marlin_global_scale", "global scale with the kernel's exponent bias"),
    ("marlin_qweight", "codes in Marlin's layout"),
    ("marlin_scales", "scales in Marlin's order"),
    ("marlin_zeros", "zero points in Marlin's layout"),
    ("num_tokens_post_padded", "length of `sorted_token_ids` with its padding"),
    ("qweight", "rewritten codes"),
    ("rhs_packed", "weight, packed with its scales and sums"),
    ("sorted_g_idx", "`g_idx` in sorted order"),
    (
        "sorted_token_ids",
        "entries (token * top_k + slot) of `topk_ids` by expert, padded to blocks with the number of entries",
    ),
    ("swizzled_scale", "interleaved scales, padded to tiles"),
    ("token_expert_indices", "position of each choice in the list of all choices, slot by slot"),
    ("topk_ids", "ids of the chosen experts"),
    ("topk_weights", "weights of the chosen experts"),
    ("weight", "codes as the kernel reads them"),
    ("weight_chan_scale", "scale of each column, as the kernel reads it"),
    ("weight_scale", "scales as the kernel reads them"),
    ("weight_scale_2", "global scales as the kernel reads them"),
    ("x_azp", "zero point of each row"),
    ("x_fp4", "e2m1 codes, even k in the low nibble"),
    ("x_q", "e4m3 or int8 codes"),
    ("x_s", "a scale for each group of k, in memory order, or for each row"),
    ("x_scale", "e4m3 block scales"),
    ("y", "result"),
];
