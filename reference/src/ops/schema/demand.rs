//! The memory and time of a check that its tensors do not bound.

use super::TensorRule;
use crate::ops::Op;
use crate::ops::case::Case;

/// Bytes per element of a product: its exact result, its bounds, and the numbers compared.
const PER_RESULT: u64 = 96;
/// Bytes per element of a stage that enters a product.
const PER_OPERAND: u64 = 16;
/// Bytes per element of a packed output: expected, found, and a known mistake's.
const PER_PACKED: u64 = 12;

/// Cost of a comparison of two scores in multiply-adds, including bounds, for ids, weights and each
/// known mistake.
const PER_COMPARISON: u64 = 256;

/// The memory and time of a part of a check.
pub(crate) struct Demand {
    /// The part, with the config keys that determine it.
    pub(crate) what: String,
    pub(crate) bytes: u64,
    pub(crate) work: u64,
}

impl Demand {
    fn memory(what: String, bytes: u64) -> Self {
        Self { what, bytes, work: 0 }
    }

    fn work(what: String, work: u64) -> Self {
        Self { what, bytes: 0, work }
    }

    /// One product.
    pub(crate) fn product(m: usize, n: usize, k: usize) -> Self {
        let what = format!("the product of size_m {m}, size_n {n}, size_k {k}");
        Self::work(what, times(&[m, n, k]))
    }

    /// The padded outputs among `rules`.
    pub(crate) fn outputs(op: Op, rules: &[TensorRule]) -> Self {
        let outputs = rules.iter().filter(|r| r.name.starts_with("out."));
        let elements = outputs.map(TensorRule::elements).fold(0, u64::saturating_add);
        let what = format!("the outputs of `{op}` with their padding");
        Self::memory(what, elements.saturating_mul(PER_PACKED))
    }

    /// `size` rows of `k` values, packed by `packing.key`.
    pub(crate) fn packing(key: &str, size: usize, by: usize, k: usize) -> Self {
        let what = format!("packing rows of {k} values by packing.{key} {by}");
        let padded = size.div_ceil(by).saturating_mul(by);
        Self::memory(what, times(&[padded, k + 64]).saturating_mul(PER_PACKED))
    }

    /// Blocks of `entries` routed entries: a list of all experts, and up to one block of padding
    /// for each expert with tokens.
    pub(crate) fn align(
        case: &Case<'_>,
        entries: usize,
        num_experts: usize,
        block_size: usize,
    ) -> Vec<Self> {
        let judged = ["sorted_token_ids", "expert_ids", "num_tokens_post_padded"];
        if judged.iter().all(|name| !case.outputs.contains_key(*name)) {
            return Vec::new();
        }
        let runs = entries.min(num_experts);
        let padded = times(&[runs, block_size]).saturating_add(entries as u64);
        let what = format!(
            "aligning {entries} entries of topk_ids to blocks of {block_size} for num_experts \
             {num_experts}"
        );
        let bytes = padded.saturating_mul(8).saturating_add(times(&[num_experts, 32]));
        vec![Self::memory(what, bytes)]
    }

    /// Scores of all experts, from which `top_k` are chosen one after the other.
    pub(crate) fn choice(tokens: usize, experts: usize, top_k: usize, groups: usize) -> Self {
        let what = format!("choosing top_k {top_k} of {experts} experts for {tokens} tokens");
        let by_group = times(&[tokens, groups, experts]);
        let comparisons = times(&[tokens, experts, top_k]).saturating_add(by_group);
        Self::work(what, comparisons.saturating_mul(PER_COMPARISON))
    }

    /// A layer's stages, each with a row for each token and slot.
    pub(crate) fn layer(
        rows: usize,
        hidden: usize,
        w13_size_n: usize,
        intermediate: usize,
    ) -> Vec<Self> {
        let sizes = format!(
            "for {rows} rows (size_m · top_k), hidden_size {hidden}, intermediate_size {intermediate}"
        );
        let widths = (w13_size_n as u64).saturating_add(times(&[2, hidden]));
        let bytes = (rows as u64)
            .saturating_mul(widths.saturating_add(intermediate as u64))
            .saturating_mul(PER_RESULT + PER_OPERAND);
        let work = times(&[rows, hidden, w13_size_n]);
        vec![
            Self::memory(format!("the stages {sizes}"), bytes),
            Self::work(
                format!("the products {sizes}"),
                work.saturating_add(times(&[rows, hidden, intermediate])),
            ),
        ]
    }
}

/// The product of sizes.
fn times(sizes: &[usize]) -> u64 {
    sizes.iter().fold(1u64, |all, &size| all.saturating_mul(size as u64))
}
