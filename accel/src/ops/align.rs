//! Sorts tokens into blocks of one expert.

mod call;
mod placed;
mod tables;

use std::ops::Deref;

use marlinspike::moe::align::{Absent, Align};
use marlinspike::moe::layer::Layer;

use super::check;
use crate::{
    device::Device,
    error::AccelError,
    launch::{Arguments, Grid, Kernel, Pointer, arguments},
    memory::Buffer,
    nvrtc::Arch,
    operation::{Law, Mutant, Needs, Row, lattice},
};
pub use call::AlignTokens;
pub use placed::{PlacedBlocks, RoutedRows};

/// Upstream: `moe_align_block_size`.
pub(crate) static ROW: Row = Row {
    name: "moe_align_block_size",
    source: "moe_align_block_size",
    needs: Needs { compute_capability: (7, 5) },
    law: Law::EqualBits,
    variants: |arch| {
        Ok(lattice(&[("RANKS", if arch.has_clusters() { &[1, CLUSTER] } else { &[1] })]))
    },
    arguments: AlignArguments::SIZES,
    mutants: &[Mutant::new(
        "padding that names a token",
        "sorted_token_ids[i] = static_cast<int>(numel);",
        "sorted_token_ids[i] = 0;",
    )],
};

static KERNEL: Kernel<AlignArguments> = Kernel::early(&ROW);

arguments! {
    /// Arguments of `moe_align_block_size.cu`.
    AlignArguments {
        topk_ids: Pointer,
        run_of: Pointer,
        sorted_token_ids: Pointer,
        expert_ids: Pointer,
        num_tokens_post_padded: Pointer,
        block_rows: Pointer,
        place_of: Pointer,
        numel: u32,
        num_experts: u32,
        num_runs: u32,
        block_size: u32,
        room: u32,
    }
}

/// Thread blocks of a cluster that shares many entries.
const CLUSTER: u32 = 8;
/// Up to this number of entries, one thread block is as fast as a cluster (measured on an H200).
const ALONE: usize = 512;

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

/// The experts of an alignment, in a device's memory.
#[derive(Debug)]
pub struct Runs {
    /// For each expert of all ranks the run of its entries, and in the upper 16 bits the mark of
    /// the run's blocks; −1: left out.
    pub(crate) run_of: Buffer<i32>,
    /// Number of runs.
    pub(crate) runs: usize,
    /// For each expert of all ranks the mark of its blocks, or −1; absent if each is marked with
    /// its own number.
    pub(crate) expert_of: Option<Buffer<i32>>,
    /// One more than the largest label: experts of this rank.
    experts: usize,
}

/// Tokens in blocks of one expert, in a device's memory.
pub struct DeviceBlocks {
    pub(crate) sorted_token_ids: Buffer<i32>,
    placed: PlacedBlocks,
}

impl Deref for DeviceBlocks {
    type Target = PlacedBlocks;

    fn deref(&self) -> &PlacedBlocks {
        &self.placed
    }
}

impl std::fmt::Debug for DeviceBlocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.placed.fmt(f)
    }
}

impl Runs {
    /// Checks an alignment and copies what it needs to the device.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for what [`Align::run`] refuses of it, and for more than 8192
    /// experts; [`AccelError::Driver`].
    pub fn new(device: &Device, align: &Align<'_>) -> Result<Self, AccelError> {
        // Without tokens, the reference checks only sizes and the map.
        if let Err(error) = align.run(&[]) {
            return Err(ROW.refuse("align", error, "sizes and a map that fit"));
        }
        if align.num_experts > 8192 {
            return Err(ROW.refuse("num_experts", align.num_experts, "at most 8192"));
        }
        let order = order(align);
        let mut run_of = vec![-1; align.num_experts];
        let mut expert_of = run_of.clone();
        for (run, &(expert, label)) in order.iter().enumerate() {
            // Both are below 8192, and a label may be -1.
            run_of[expert] = label << 16 | run as i32;
            expert_of[expert] = label;
        }
        let experts = order.iter().map(|&(_, label)| (label + 1) as usize).max().unwrap_or(0);
        let is_own = expert_of.iter().enumerate().all(|(id, &expert)| id as i32 == expert);
        let expert_of = (!is_own).then(|| device.upload(&expert_of)).transpose()?;
        Ok(Self { run_of: device.upload(&run_of)?, runs: order.len(), expert_of, experts })
    }

    /// The experts of a layer that are on this rank.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(crate) fn of_layer(device: &Device, layer: &Layer<'_>) -> Result<Self, AccelError> {
        let (num_experts, expert_map) = (layer.num_experts, layer.expert_map);
        // Room is made later, for blocks of any size.
        let align = Align { block_size: 1, num_experts, expert_map, absent: Absent::Ignore };
        Self::new(device, &align)
    }

    /// One more than the largest expert that an entry can go to.
    pub(crate) fn experts(&self) -> usize {
        self.experts
    }

    /// Experts of all ranks.
    pub(crate) fn all_experts(&self) -> usize {
        self.run_of.len()
    }

    pub(crate) fn is_on(&self, device: &Device) -> bool {
        self.run_of.is_on(device)
    }

    /// Room for `entries` (tokens times experts per token) in blocks of `block_size`, without a
    /// block yet.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for a block size of zero, and for a result that may exceed 2^31
    /// entries; [`AccelError::Driver`].
    pub fn room(
        &self,
        device: &Device,
        entries: usize,
        block_size: usize,
    ) -> Result<DeviceBlocks, AccelError> {
        let placed = self.room_for_places(device, entries, block_size)?;
        Ok(DeviceBlocks { sorted_token_ids: device.room(placed.places)?, placed })
    }

    /// [`room`](Self::room) for an alignment that leaves out the order of entries.
    ///
    /// # Errors
    /// As [`room`](Self::room).
    pub(crate) fn room_for_places(
        &self,
        device: &Device,
        entries: usize,
        block_size: usize,
    ) -> Result<PlacedBlocks, AccelError> {
        check::positive(&ROW, "block_size", block_size)?;
        // Each run ends with at most one partial block, and there are no more nonempty runs than
        // entries.
        let runs = self.runs.min(entries);
        let most = runs
            .checked_mul(block_size - 1)
            .and_then(|padding| padding.checked_add(entries))
            .and_then(|most| most.checked_next_multiple_of(block_size))
            .filter(|&most| i32::try_from(most).is_ok());
        let Some(most) = most else {
            let found = format!("{entries} entries");
            return Err(ROW.refuse("topk_ids", found, "a result below 2^31"));
        };
        Ok(PlacedBlocks {
            expert_ids: device.room(most / block_size)?,
            block_rows: device.room(most / block_size)?,
            num_tokens_post_padded: device.room(1)?,
            place_of: device.room(entries)?,
            block_size,
            entries,
            places: most,
            experts: self.experts,
        })
    }
}

/// Aligns flattened `topk_ids` in the device's memory: the bits of [`Align::run`]. Ids of no
/// expert, including negative ones, are left out.
///
/// # Errors
/// [`AccelError::Argument`] if `blocks` has too little room or is of another device; those of
/// preparing and running a kernel.
pub fn align_on_device(
    device: &Device,
    runs: &Runs,
    topk_ids: &Buffer<i32>,
    blocks: &mut DeviceBlocks,
) -> Result<(), AccelError> {
    let DeviceBlocks { sorted_token_ids, placed } = blocks;
    align_with(device, runs, topk_ids, placed, Some(sorted_token_ids))
}

/// [`align_on_device`] without the order of entries.
pub(crate) fn place_on_device(
    device: &Device,
    runs: &Runs,
    topk_ids: &Buffer<i32>,
    blocks: &mut PlacedBlocks,
) -> Result<(), AccelError> {
    align_with(device, runs, topk_ids, blocks, None)
}

fn align_with(
    device: &Device,
    runs: &Runs,
    topk_ids: &Buffer<i32>,
    blocks: &mut PlacedBlocks,
    sorted_token_ids: Option<&mut Buffer<i32>>,
) -> Result<(), AccelError> {
    blocks.check(device, runs, topk_ids)?;
    if runs.runs == 0 || topk_ids.is_empty() {
        // Without room for entries, there is no block to fill.
        return Ok(());
    }
    let Shape { ranks, warps, shared_bytes } = Shape::new(device.arch(), topk_ids.len(), runs.runs);
    // run_of has a run below num_runs for each expert, or -1; ids beyond the experts are not looked
    // up. `blocks` has room for the entries, for any ids.
    let arguments = AlignArguments {
        topk_ids: topk_ids.into(),
        run_of: (&runs.run_of).into(),
        // All are below 2^31: the entries with their padding are, and experts are at most 8192.
        numel: topk_ids.len() as u32,
        num_experts: runs.run_of.len() as u32,
        num_runs: runs.runs as u32,
        block_size: blocks.block_size as u32,
        room: blocks.places() as u32,
        sorted_token_ids: sorted_token_ids.map(|sorted| &*sorted).into(),
        expert_ids: (&mut blocks.expert_ids).into(),
        num_tokens_post_padded: (&mut blocks.num_tokens_post_padded).into(),
        block_rows: (&mut blocks.block_rows).into(),
        place_of: (&mut blocks.place_of).into(),
    };
    let grid = Grid { blocks: (ranks, 1, 1), threads: (warps * 32, 1, 1), shared_bytes };
    KERNEL.launch(device, &[("RANKS", ranks)], grid, arguments)
}

/// How the work of an alignment is divided.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    /// Thread blocks: the parameter RANKS.
    pub(crate) ranks: u32,
    /// Warps of a thread block.
    pub(crate) warps: u32,
    /// Dynamic shared memory of a thread block.
    pub(crate) shared_bytes: u32,
}

impl Shape {
    fn new(arch: Arch, entries: usize, runs: usize) -> Self {
        let is_alone = entries <= ALONE || !arch.has_clusters();
        // The default limit of every device, less the kernel's static shared memory; or the opt-in
        // limit of every device with clusters.
        let (ranks, room) = if is_alone { (1, 47 << 10) } else { (CLUSTER, 96 << 10) };
        // A row of counts for each warp, in a cluster one for all; runs are at most 8192.
        let row_bytes = (runs as u32 + 1) * 4;
        let others = u32::from(!is_alone);
        let most = (room / row_bytes).saturating_sub(others).clamp(1, 32);
        // Two entries for each thread and a thread for each run, up to the size of a block. In a
        // cluster, more than 16 warps only lengthen the sums over warps.
        let reach = if is_alone { 32 } else { 16 };
        let wanted = (entries.div_ceil(ranks as usize) / 2).max(runs).div_ceil(32);
        let warps = wanted.clamp(1, reach) as u32;
        let warps = warps.min(most);
        Self { ranks, warps, shared_bytes: (warps + others) * row_bytes }
    }
}

/// Experts in the order of their runs, each with the reference's label.
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
    if let Some(i) = topk_ids.iter().position(|&id| id < 0) {
        let found = format!("{} at [{i}]", topk_ids[i]);
        return Err(ROW.refuse("topk_ids", found, "0 or more"));
    }
    let runs = Runs::new(device, align)?;
    let mut blocks = runs.room(device, topk_ids.len(), align.block_size)?;
    align_on_device(device, &runs, &device.upload(topk_ids)?, &mut blocks)?;
    let total = device.download(&blocks.num_tokens_post_padded)?.first().copied().unwrap_or(0);
    let mut sorted_token_ids = device.download(&blocks.sorted_token_ids)?;
    let mut expert_ids = device.download(&blocks.expert_ids)?;
    let entries = total.unsigned_abs() as usize;
    sorted_token_ids.truncate(entries);
    expert_ids.truncate(entries / align.block_size);
    Ok(Blocks { sorted_token_ids, expert_ids, num_tokens_post_padded: total })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_fit_the_shared_memory_of_every_device() {
        // The kernel's static memory: a number for each warp.
        let own = 32 * 4;
        for arch in [(7, 5), (9, 0), (12, 0)].map(Arch::of_device) {
            for runs in [1, 8, 31, 256, 384, 512, 2000, 8192] {
                for entries in [1, 40, 512, 513, 4096, 65_536, 1 << 30] {
                    let shape = Shape::new(arch, entries, runs);
                    let Shape { ranks, warps, shared_bytes } = shape;
                    let context = format!("{arch}, {runs} runs, {entries} entries: {shape:?}");
                    assert!((1..=32).contains(&warps), "{context}");
                    let rows = warps + u32::from(ranks > 1);
                    assert_eq!(shared_bytes, rows * (runs as u32 + 1) * 4, "{context}");
                    let room = arch.shared_memory();
                    assert!(shared_bytes + own <= room, "{context}");
                    // More than this needs an opt-in.
                    assert!(ranks > 1 || shared_bytes + own <= 48 << 10, "{context}");
                }
            }
        }
    }
}
