//! What checking a case may take, decided from its configuration before anything is allocated.
//!
//! The bytes of a tensor are in the file, so what is proportional to them is bounded by it. This
//! module estimates the rest: what integers of the configuration ask for without a tensor of that
//! size (blocks of tokens, padding, stages that a case lacks), and the multiplications of products.

use super::config::{AlignConfig, MoeConfig, RouterConfig};
use super::methods::{Fp8LayerConfig, MethodConfig};
use super::{Case, CaseConfig, CaseError};
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
struct Demand {
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
        for Demand { what, bytes: more, work } in demands(case)? {
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

fn demands(case: &Case<'_>) -> Result<Vec<Demand>> {
    let has = |name: &str| case.outputs.contains_key(name);
    let product = |m, n, k| {
        let what = format!("the product of size_m {m}, size_n {n}, size_k {k}");
        Demand::work(what, times(&[m, n, k]))
    };
    Ok(match &case.config {
        CaseConfig::Linear(c) if has("y") => vec![product(c.size_m, c.size_n, c.size_k)],
        CaseConfig::DynQuant(c) => {
            let (m, n, k) = (c.size_m, c.size_n, c.size_k);
            let (mr, nr) = (c.packing.mr, c.packing.nr);
            let padded = |size: usize, by: usize| size.div_ceil(by).saturating_mul(by);
            let pack = |key: &str, size: usize, by: usize| {
                let what = format!("packing rows of {k} values by packing.{key} {by}");
                Demand::memory(what, times(&[padded(size, by), k + 64]).saturating_mul(PER_PACKED))
            };
            let mut all = vec![pack("mr", if has("lhs_packed") { m } else { 0 }, mr)];
            all.push(pack("nr", if has("rhs_packed") { n } else { 0 }, nr));
            all.extend(has("y").then(|| product(m, n, k)));
            all
        }
        CaseConfig::Moe(c) => moe(case, c),
        CaseConfig::Align(c) => {
            let AlignConfig { block_size, num_experts, .. } = *c;
            align(case, case.inputs.get("topk_ids").map_or(0, |t| t.len()), num_experts, block_size)
        }
        CaseConfig::Router(c) => router(case, c),
        CaseConfig::Method(MethodConfig::Fp8Moe(c)) => fp8_moe(case, c),
        CaseConfig::Method(config) => {
            let elements = |prefix: &str| -> Result<u64> {
                let rules = config.rules()?;
                let mine = rules.iter().filter(|r| r.name.starts_with(prefix));
                Ok(mine.map(|r| r.elements()).fold(0, u64::saturating_add))
            };
            match config {
                MethodConfig::ScaledMm(c) if has("y") => {
                    vec![product(c.size_m, c.size_n, c.size_k)]
                }
                MethodConfig::ScaledFp4Mm(c) if has("y") => {
                    vec![product(c.size_m, c.size_n, c.size_k)]
                }
                MethodConfig::ScaledMm(_) | MethodConfig::ScaledFp4Mm(_) => Vec::new(),
                _ => {
                    let what = format!("the outputs of `{}` with their padding", case.op);
                    let bytes = elements("out.")?.saturating_mul(PER_PACKED);
                    vec![Demand::memory(what, bytes)]
                }
            }
        }
        CaseConfig::Linear(_) | CaseConfig::Preprocess(_) => Vec::new(),
    })
}

/// Blocks of `entries` routed entries: a list of all experts, and up to a block of padding for
/// each that has tokens.
fn align(case: &Case<'_>, entries: usize, num_experts: usize, block_size: usize) -> Vec<Demand> {
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
    vec![Demand::memory(what, bytes)]
}

/// What a comparison of two scores weighs in multiply-adds: it is done for ids, weights and each known
/// mistake, with their bounds.
const PER_COMPARISON: u64 = 256;

/// Scores of all experts, from which `top_k` are chosen one after the other.
fn choice(tokens: usize, experts: usize, top_k: usize, groups: usize) -> Demand {
    let what = format!("choosing top_k {top_k} of {experts} experts for {tokens} tokens");
    let by_group = times(&[tokens, groups, experts]);
    let comparisons = times(&[tokens, experts, top_k]).saturating_add(by_group);
    Demand::work(what, comparisons.saturating_mul(PER_COMPARISON))
}

fn router(case: &Case<'_>, c: &RouterConfig) -> Vec<Demand> {
    let shape = case.inputs.get("router_logits").map(|t| t.shape());
    let Some(&[tokens, experts]) = shape else { return Vec::new() };
    vec![choice(tokens, experts, c.top_k, c.grouped.map_or(1, |g| g.num_expert_group))]
}

/// A layer's stages, each with a row for each token and slot.
fn layer(rows: usize, hidden: usize, w13_size_n: usize, intermediate: usize) -> Vec<Demand> {
    let sizes = format!(
        "for {rows} rows (size_m · top_k), hidden_size {hidden}, intermediate_size {intermediate}"
    );
    let widths = (w13_size_n as u64).saturating_add(times(&[2, hidden]));
    let bytes = (rows as u64)
        .saturating_mul(widths.saturating_add(intermediate as u64))
        .saturating_mul(PER_RESULT + PER_OPERAND);
    let work = times(&[rows, hidden, w13_size_n]);
    vec![
        Demand::memory(format!("the stages {sizes}"), bytes),
        Demand::work(
            format!("the products {sizes}"),
            work.saturating_add(times(&[rows, hidden, intermediate])),
        ),
    ]
}

fn moe(case: &Case<'_>, c: &MoeConfig) -> Vec<Demand> {
    let has = |name: &&str| case.outputs.contains_key(*name);
    let rows = c.size_m.saturating_mul(c.top_k);
    let mut all = align(case, rows, c.num_experts, c.block_size_m);
    if case.inputs.contains_key("router_logits") {
        all.push(choice(c.size_m, c.num_experts, c.top_k, 1));
    }
    if ["gate_up", "activated", "down", "y"].iter().any(has) {
        all.extend(layer(rows, c.hidden_size, c.w13_size_n(), c.intermediate_size));
    }
    all
}

fn fp8_moe(case: &Case<'_>, c: &Fp8LayerConfig) -> Vec<Demand> {
    match case.outputs.is_empty() {
        true => Vec::new(),
        false => layer(c.rows(), c.hidden_size, c.w13_size_n(), c.intermediate_size),
    }
}
