//! Tokens cut into blocks of one expert.

use marlinspike::moe::align::{Absent, Align};

use super::check;
use crate::{
    device::Device,
    error::AccelError,
    raw,
    registry::{Law, Needs, Row},
};

/// Upstream: `moe_align_block_size`.
pub(crate) static ROW: Row = Row {
    name: "moe_align_block_size",
    source: "moe_align_block_size",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |_| vec![Vec::new()],
};

/// The aligned tokens, trimmed to the valid length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocks {
    /// Entries of the flattened `topk_ids`, or the sentinel: their number.
    pub sorted_token_ids: Vec<i32>,
    /// Expert of each block: local id where there is a map.
    pub expert_ids: Vec<i32>,
    /// Length of `sorted_token_ids`.
    pub num_tokens_post_padded: i32,
}

/// Arguments that were checked: a launch with them stays inside its buffers.
#[derive(Debug)]
pub(crate) struct Args<'a> {
    pub(crate) topk_ids: &'a [i32],
    /// For each expert the run of its entries, or −1.
    pub(crate) run_of: Vec<i32>,
    /// For each run what its blocks are marked with.
    pub(crate) label_of: Vec<i32>,
    pub(crate) block_size: u32,
    /// Length of `sorted_token_ids` at most, a multiple of the block size.
    pub(crate) most_entries: usize,
}

/// Experts in the order of their runs, each with its label, as the reference defines it.
fn order(align: &Align<'_>) -> Vec<(usize, i32)> {
    let Some(map) = align.expert_map else {
        return (0..align.num_experts).map(|e| (e, e as i32)).collect();
    };
    let mut order: Vec<(usize, i32)> = map.iter().copied().enumerate().collect();
    if align.absent == Absent::Ignore {
        order.retain(|&(_, local)| local >= 0);
        order.sort_by_key(|&(_, local)| local);
    }
    order
}

/// Aligns flattened `topk_ids` on the device: the bits of [`Align::run`].
///
/// # Errors
/// [`AccelError::Argument`] for what [`Align::run`] refuses, for more than 8192 experts, and for a
/// result that may exceed 2^31 entries; those of preparing and running a kernel.
pub fn moe_align_block_size(
    device: &Device,
    align: &Align<'_>,
    topk_ids: &[i32],
) -> Result<Blocks, AccelError> {
    let refuse = |what, found: String, expected: &str| {
        Err(AccelError::argument(&ROW, what, found, expected))
    };
    // Without tokens, the reference checks the map alone.
    if let Err(error) = align.run(&[]) {
        return refuse("align", error.to_string(), "sizes and a map that fit");
    }
    if align.num_experts > 8192 {
        return refuse("num_experts", align.num_experts.to_string(), "at most 8192");
    }
    if let Some(i) = topk_ids.iter().position(|&id| id < 0) {
        return refuse("topk_ids", format!("{} at [{i}]", topk_ids[i]), "0 or more");
    }
    let block_size = check::positive(&ROW, "block_size", align.block_size)?;
    let order = order(align);
    let mut run_of = vec![-1; align.num_experts];
    for (run, &(expert, _)) in order.iter().enumerate() {
        run_of[expert] = run as i32;
    }
    // Every run ends with a part of a block at most; and no more runs than entries have any.
    let runs = order.len().min(topk_ids.len());
    let most = runs
        .checked_mul(align.block_size - 1)
        .and_then(|padding| padding.checked_add(topk_ids.len()))
        .and_then(|entries| entries.checked_next_multiple_of(align.block_size))
        .filter(|&entries| i32::try_from(entries).is_ok());
    let Some(most_entries) = most else {
        return refuse("topk_ids", format!("{} entries", topk_ids.len()), "a result below 2^31");
    };
    let empty =
        Blocks { sorted_token_ids: Vec::new(), expert_ids: Vec::new(), num_tokens_post_padded: 0 };
    if runs == 0 {
        return Ok(empty);
    }
    let label_of = order.iter().map(|&(_, label)| label).collect();
    let args = Args { topk_ids, run_of, label_of, block_size, most_entries };
    let function = device.function(&ROW, &[])?;
    let (mut sorted_token_ids, mut expert_ids, total) = raw::moe::align(device, &function, &args)?;
    let entries = total.unsigned_abs() as usize;
    sorted_token_ids.truncate(entries);
    expert_ids.truncate(entries / align.block_size);
    Ok(Blocks { sorted_token_ids, expert_ids, num_tokens_post_padded: total })
}
