//! The config keys of each operation. A key that its operation does not read is an error, so that
//! a misspelt `schedule` cannot vanish.

use serde_json::{Map, Value};

use super::{CaseError, Op};

/// Keys that any case may have and nothing reads: remarks for people.
const REMARKS: &[&str] = &["name", "note", "notes", "comment"];

/// How the quantized matrices of `linear` and `moe` are stored.
const QUANT: &[&str] = &[
    "checkpoint_format",
    "weight_type",
    "dtype",
    "input_dtype",
    "group_size",
    "desc_act",
    "is_k_full",
    "has_bias",
    "tensor_parallel",
    "convention",
];
const LINEAR: &[&str] = &["size_m", "size_n", "size_k", "scale_factor", "schedule", "quantizer"];
const MOE: &[&str] = &[
    "size_m",
    "num_experts",
    "top_k",
    "hidden_size",
    "intermediate_size",
    "activation",
    "scoring_func",
    "renormalize",
    "apply_router_weight_on_input",
    "block_size_m",
    "ep_size",
    "ep_rank",
    "scale_factor_w13",
    "scale_factor_w2",
    "schedule_w13",
    "schedule_w2",
];
const ROUTER: &[&str] = &["scoring_func", "top_k", "renormalize", "use_grouped_topk"];
/// Keys of grouped top-k, which mean nothing without `use_grouped_topk`.
pub(super) const GROUPED_TOPK: &[&str] =
    &["num_expert_group", "topk_group", "routed_scaling_factor"];
const ALIGN: &[&str] = &["block_size", "num_experts", "top_k", "ep_size", "ep_rank"];
const PREPROCESS: &[&str] = &["checkpoint_format", "size_k", "size_n"];
/// The last three are information that KleidiAI's recorded cases carry.
const DYN_QUANT: &[&str] = &[
    "weight_type",
    "dtype",
    "group_size",
    "has_bias",
    "size_m",
    "size_n",
    "size_k",
    "packing",
    "activation_rounding",
    "checkpoint_format",
    "input_dtype",
    "kleidiai_variant",
    "adversarial_rows",
];
const SWIZZLE: &[&str] = &["scale_type", "sf_layout", "num_experts", "size_n", "groups"];
const EXPERTS: &[&str] = &["num_experts", "hidden_size", "intermediate_size"];
const NVFP4_EXPERTS: &[&str] = &["backend", "is_act_and_mul"];
const REQUANTIZE: &[&str] = &["requantize", "fp8_type"];
const FNUZ: &[&str] = &["size_n", "size_k", "num_scales"];
const GPT_OSS: &[&str] = &["gate_up", "backend", "platform", "tp_size", "tp_rank"];
const FP4_QUANT: &[&str] = &["dtype", "size_m", "size_k", "is_sf_swizzled_layout", "reciprocal"];
const FP4_MM: &[&str] =
    &["dtype", "size_m", "size_n", "size_k", "logical_widths", "schedule", "convention"];
const FP8_MM: &[&str] = &[
    "dtype",
    "size_m",
    "size_n",
    "size_k",
    "per_act_token_quant",
    "per_out_ch_quant",
    "has_bias",
    "schedule",
    "convention",
];
const FP8_MOE: &[&str] = &[
    "dtype",
    "size_m",
    "num_local_experts",
    "top_k",
    "activation",
    "per_act_token_quant",
    "per_out_ch_quant",
    "apply_router_weight_on_input",
    "schedule_w13",
    "schedule_w2",
    "convention",
];

/// The keys that `op` reads.
fn of(op: Op) -> impl Iterator<Item = &'static str> {
    let lists: &[&[&'static str]] = match op {
        Op::Linear => &[QUANT, LINEAR],
        Op::Moe => &[QUANT, MOE],
        Op::Router => &[ROUTER, GROUPED_TOPK],
        Op::MoeAlignBlockSize => &[ALIGN],
        Op::Int4Fp8Preprocess => &[PREPROCESS],
        Op::DynQuantLinear => &[DYN_QUANT],
        Op::SwizzleBlockscale => &[SWIZZLE],
        Op::TrtllmMxInt4 => &[EXPERTS],
        Op::Nvfp4Experts => &[EXPERTS, NVFP4_EXPERTS],
        Op::Fp8Requantize => &[EXPERTS, REQUANTIZE],
        Op::NormalizeFnuz => &[FNUZ],
        Op::GptOssMxfp4 => &[EXPERTS, GPT_OSS],
        Op::ScaledFp4Quant => &[FP4_QUANT],
        Op::ScaledFp4Mm => &[FP4_MM],
        Op::ScaledMm => &[FP8_MM],
        Op::Fp8Moe => &[EXPERTS, FP8_MOE],
    };
    lists.iter().flat_map(|list| list.iter().copied())
}

/// Fails with [`CaseError::UnknownConfigKey`] at a key of `map` that `op` does not read.
///
/// A `router` config that states a `model_type` may be the whole config.json of its model, whose keys
/// [`crate::moe::families`] reads; one with a `routing` object has nothing else.
pub(super) fn check(op: Op, map: &Map<String, Value>) -> Result<(), CaseError> {
    let family = op == Op::Router && map.contains_key("model_type");
    if family && !map.contains_key("routing") {
        return Ok(());
    }
    let known: Vec<_> = match op == Op::Router && map.contains_key("routing") {
        true => vec!["routing"],
        false => of(op).collect(),
    };
    let unknown =
        |key: &&String| !known.contains(&key.as_str()) && !REMARKS.contains(&key.as_str());
    let Some(key) = map.keys().find(unknown) else { return Ok(()) };
    let others: Vec<_> = Op::NAMED
        .iter()
        .filter(|(_, other)| of(*other).any(|k| k == key))
        .map(|(name, _)| format!("`{name}`"))
        .collect();
    let hint = match others.as_slice() {
        [] => hint(key, &known),
        others => format!("operation `{op}` does not read it, {} does", others.join(", ")),
    };
    Err(CaseError::UnknownConfigKey { key: key.clone(), hint })
}

/// As [`check`], of the nested object at `prefix` (with its dot).
pub(super) fn check_nested(
    prefix: &str,
    map: &Map<String, Value>,
    known: &[&str],
) -> Result<(), CaseError> {
    match map.keys().find(|key| !known.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => Err(CaseError::UnknownConfigKey {
            key: format!("{prefix}{key}"),
            hint: hint(key, known),
        }),
    }
}

/// The nearest of `known`, or all of them where none is near.
fn hint(found: &str, known: &[&str]) -> String {
    match crate::error::nearest(found, known.iter().copied()) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("expected one of {}", known.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::CaseConfig;
    use crate::vectors::Generator;

    /// Every key that a config writes is known. Every known key is read: a value of a type that no
    /// key has is refused by the key's name.
    #[test]
    fn the_table_is_what_the_operations_read() {
        for &(name, op) in Op::NAMED {
            let generator = Generator::new(op, 1).expect(name);
            for config in generator.lattice() {
                check(op, &config.to_json()).unwrap_or_else(|e| panic!("{name}: {e}"));
            }
            let whole = generator.lattice().iter().map(CaseConfig::to_json);
            let whole = whole.max_by_key(Map::len).expect(name);
            let unread = ["convention", "adversarial_rows"];
            for key in of(op).filter(|k| !unread.contains(k)) {
                let mut map = whole.clone();
                map.insert(key.to_owned(), serde_json::json!([{"no": "such"}]));
                let error = CaseConfig::from_json(op, &map);
                let error = error.expect_err(&format!("{name}: `{key}` is not read")).to_string();
                assert!(error.contains(&format!("`{key}`")), "{name}: {key}: {error}");
            }
        }
    }
}
