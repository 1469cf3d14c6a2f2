//! Tokens cut into blocks of one expert: upstream's `moe_align_block_size`.
//!
//! Entry i of the flattened `topk_ids` (token i / top_k) goes to the run of its expert. Runs follow
//! each other by expert id, each padded to whole blocks with the sentinel, the number of entries.
//! Facts: vLLM 0.21.0 `fused_moe/moe_align_block_size.py` and its CUDA operator.

use crate::{Error, Result};

/// The treatment of experts that are not on this rank (`expert_map` gives −1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Absent {
    /// Their entries are omitted, and runs follow local ids (`ignore_invalid_experts`).
    #[default]
    Ignore,
    /// They get blocks marked −1; runs follow global ids.
    Mark,
}

/// Arguments of the operation.
#[derive(Debug, Clone, Copy)]
pub struct Align<'a> {
    /// Tokens per block.
    pub block_size: usize,
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Global to local id, −1 for an expert of another rank; `None` when all are here.
    pub expert_map: Option<&'a [i32]>,
    /// Treatment of absent experts.
    pub absent: Absent,
}

/// One expert's blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Global id.
    pub expert: usize,
    /// Entry of `expert_ids` for its blocks.
    pub label: i32,
    /// First position in `sorted_token_ids`, a multiple of the block size.
    pub start: usize,
    /// Its entries of the flattened `topk_ids`, ascending.
    pub tokens: Vec<i32>,
}

/// The aligned tokens, trimmed to the valid length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Aligned {
    /// Entries of the flattened `topk_ids`, or the sentinel: their number.
    pub sorted_token_ids: Vec<i32>,
    /// Expert of each block; a local id if there is a map.
    pub expert_ids: Vec<i32>,
    /// Length of `sorted_token_ids`.
    pub num_tokens_post_padded: i32,
    /// Its runs; experts without tokens have none.
    pub runs: Vec<Run>,
}

impl Align<'_> {
    /// Aligns flattened `topk_ids`; ids of `num_experts` and above are left out, as upstream does.
    /// Inside a run the entries ascend (upstream's order depends on its atomics).
    ///
    /// # Errors
    /// [`Error::Size`] for a block size or number of experts of 0, or a result of 2^31 entries
    /// and more; [`Error::Shape`] and [`Error::Value`] for a map of another length, or that names
    /// a local expert twice; [`Error::Value`] for a negative id.
    pub fn run(&self, topk_ids: &[i32]) -> Result<Aligned> {
        let (block, experts) = (self.block_size, self.num_experts);
        if block == 0 || experts == 0 {
            let found = format!("{block} and {experts}");
            return Err(Error::size("block_size and num_experts", found, "1 or more"));
        }
        let order = self.order()?;
        let mut of = std::collections::BTreeMap::<usize, Vec<i32>>::new();
        let numel = i32::try_from(topk_ids.len())
            .map_err(|_| Error::size("entries of topk_ids", topk_ids.len(), "below 2^31"))?;
        for (i, &id) in (0..numel).zip(topk_ids) {
            let Ok(id) = usize::try_from(id) else {
                return Err(Error::value("topk_ids", &[i as usize], id, "0 or more"));
            };
            if id < experts {
                of.entry(id).or_default().push(i);
            }
        }
        let padded = |n: usize| n.div_ceil(block).checked_mul(block);
        let mut runs = Vec::new();
        let mut start = 0usize;
        for (expert, label) in order {
            let Some(tokens) = of.remove(&expert) else { continue };
            let end = padded(tokens.len()).and_then(|n| start.checked_add(n));
            let Some(end) = end.filter(|&n| i32::try_from(n).is_ok()) else {
                return Err(Error::size("padded tokens", "2^31 or more", "below 2^31"));
            };
            runs.push(Run { expert, label, start, tokens });
            start = end;
        }
        let mut sorted_token_ids = vec![numel; start];
        let mut expert_ids = Vec::with_capacity(start / block);
        for run in &runs {
            sorted_token_ids[run.start..][..run.tokens.len()].copy_from_slice(&run.tokens);
            let blocks = run.tokens.len().div_ceil(block);
            expert_ids.extend(std::iter::repeat_n(run.label, blocks));
        }
        let num_tokens_post_padded = start as i32;
        Ok(Aligned { sorted_token_ids, expert_ids, num_tokens_post_padded, runs })
    }

    /// Experts in the order of their runs, each with its label.
    fn order(&self) -> Result<Vec<(usize, i32)>> {
        let experts = self.num_experts;
        let Some(map) = self.expert_map else {
            if i32::try_from(experts).is_err() {
                return Err(Error::size("num_experts", experts, "below 2^31"));
            }
            return Ok((0..experts).map(|e| (e, e as i32)).collect());
        };
        if map.len() != experts {
            return Err(Error::shape("expert_map", &[map.len()], format!("[{experts}]")));
        }
        let mut order: Vec<(usize, i32)> = map.iter().copied().enumerate().collect();
        let mut local: Vec<(i32, usize)> =
            order.iter().filter(|o| o.1 >= 0).map(|&(e, l)| (l, e)).collect();
        local.sort_unstable();
        if let Some(pair) = local.windows(2).find(|p| p[0].0 == p[1].0) {
            let (label, expert) = pair[1];
            return Err(Error::value("expert_map", &[expert], label, "each local id once"));
        }
        if let Some(&(e, l)) = order.iter().find(|o| o.1 < -1) {
            return Err(Error::value("expert_map", &[e], l, "a local id or -1"));
        }
        if self.absent == Absent::Ignore {
            order = local.into_iter().map(|(l, e)| (e, l)).collect();
        }
        Ok(order)
    }
}
