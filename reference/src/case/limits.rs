//! What checking a case may take, decided from its configuration before anything is allocated.
//!
//! The bytes of a tensor are in the file, so what is proportional to them is bounded by it. This
//! module estimates the rest: what integers of the configuration ask for without a tensor of that
//! size (blocks of tokens, padding, stages that a case lacks), and the multiplications of products.

use super::{Case, CaseError, Op, TensorRule};
use crate::Result;

/// Bytes that checking may take per byte of the case's tensors. The most that was measured is 69, for a
/// product whose values are nearly all outputs.
const MEMORY_PER_BYTE: u64 = 256;
/// Bytes that checking any case may take.
const MEMORY_BASE: u64 = 64 << 20;
/// Multiply-adds of a case's products: 10^12, a layer of Mixtral's sizes with 4096 tokens.
const WORK: u64 = 1_000_000_000_000;

/// Bytes per element of a product: its exact result, its bounds, and the numbers compared.
const PER_RESULT: u64 = 96;
/// Bytes per element of a stage that enters a product.
const PER_OPERAND: u64 = 16;
/// Bytes per element of a packed output: expected, found, and a known mistake's.
const PER_PACKED: u64 = 12;

/// What a comparison of two scores weighs in multiply-adds: it is done for ids, weights and each known
/// mistake, with their bounds.
const PER_COMPARISON: u64 = 256;

/// The limits that [`check_case_within`](crate::check::check_case_within) keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Multiply-adds of the products that are recomputed, and comparisons of routing.
    pub work: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { work: WORK }
    }
}

/// What a part of a check takes.
pub(crate) struct Demand {
    /// The part, with the config keys that decide it.
    what: String,
    bytes: u64,
    work: u64,
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

    /// The outputs among `rules`, with their padding.
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

    /// Blocks of `entries` routed entries: a list of all experts, and up to a block of padding for
    /// each that has tokens.
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

/// Bytes for people: 68.7 GB.
fn size(bytes: u64) -> String {
    let units = [("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
    let bytes = bytes as f64;
    match units.into_iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes / unit),
        None => format!("{bytes} bytes"),
    }
}

impl Limits {
    /// Bytes that checking a case with `bytes` bytes of tensors may take: 64 MiB, and 256 times
    /// that.
    pub const fn memory(bytes: u64) -> u64 {
        bytes.saturating_mul(MEMORY_PER_BYTE).saturating_add(MEMORY_BASE)
    }

    /// Whether checking `case` stays within the limits.
    ///
    /// # Errors
    /// [`CaseError::TooLarge`], naming the config keys that ask for too much.
    pub fn check(&self, case: &Case<'_>) -> Result<()> {
        let tensors = case.inputs.values().chain(case.outputs.values());
        let bytes = tensors.map(|t| t.bytes().len() as u64).sum();
        let limit = Self::memory(bytes);
        let (mut all_bytes, mut all_work) = (0u64, 0u64);
        for Demand { what, bytes: more, work } in case.config.operation().demands(case)? {
            all_bytes = all_bytes.saturating_add(more);
            if all_bytes > limit {
                let needed = format!("{} of memory", size(all_bytes));
                let limit = format!(
                    "{}: {}, and {MEMORY_PER_BYTE} times the {} of the case's tensors",
                    size(limit),
                    size(MEMORY_BASE),
                    size(bytes)
                );
                return Err(CaseError::TooLarge { what, needed, limit }.into());
            }
            all_work = all_work.saturating_add(work);
            if all_work > self.work {
                let needed = format!("{all_work} multiply-adds");
                let limit = format!("{}, which --max-work raises", self.work);
                return Err(CaseError::TooLarge { what, needed, limit }.into());
            }
        }
        Ok(())
    }
}
