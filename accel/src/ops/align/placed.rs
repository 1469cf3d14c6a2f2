//! Blocks of rows without the order of their entries.

use super::{ROW, Runs};
use crate::{
    device::Device,
    error::AccelError,
    launch::{FewEntries, Placing},
    memory::Buffer,
    ops::check,
};

/// The blocks of tokens without the order of their entries: for products whose rows lie in the order of blocks, each
/// entry's at its [`place`](Self::place_of).
pub struct PlacedBlocks {
    pub(crate) expert_ids: Buffer<i32>,
    /// Rows of each block that have entries.
    pub(crate) block_rows: Buffer<i32>,
    pub(crate) num_tokens_post_padded: Buffer<i32>,
    /// Position of each entry among the sorted ones; −1: left out.
    pub(super) place_of: Buffer<i32>,
    pub(super) block_size: usize,
    pub(super) entries: usize,
    pub(super) places: usize,
    pub(super) experts: usize,
}

impl std::fmt::Debug for PlacedBlocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { block_size, entries, experts, .. } = self;
        write!(f, "{entries} entries in blocks of {block_size} for {experts} experts")
    }
}

/// Rows of a product's x and y in the order of their experts' blocks.
#[derive(Debug, Clone, Copy)]
pub struct RoutedRows<'a> {
    /// Row `place_of[t]` of x and y is entry t's. Each block has as many entries as the product's plan has rows.
    pub blocks: &'a PlacedBlocks,
    /// One for each row of y, which it multiplies before that is rounded.
    pub row_weights: Option<&'a Buffer<f32>>,
    /// The last kernel on the stream did not write the blocks: weights of experts may be read while it still runs.
    pub(crate) is_early: bool,
    /// What the last kernel on the stream makes the blocks of, if that is little: weights of experts may be read likewise.
    pub(crate) few: FewEntries,
}

impl<'a> RoutedRows<'a> {
    /// Rows of these blocks, and router weights.
    pub fn new(blocks: &'a PlacedBlocks, row_weights: Option<&'a Buffer<f32>>) -> Self {
        Self { blocks, row_weights, is_early: false, few: FewEntries::default() }
    }
}

impl PlacedBlocks {
    /// Entries of a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Tokens times experts per token.
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// Position of each entry among the sorted ones, int32 `[entries]`, by the last alignment; −1 where its expert is
    /// not on this rank.
    pub fn place_of(&self) -> &Buffer<i32> {
        &self.place_of
    }

    /// Capacity in entries, padding included.
    pub fn places(&self) -> usize {
        self.places
    }

    /// One more than the largest expert that a block can be for.
    pub(crate) fn experts(&self) -> usize {
        self.experts
    }

    /// Capacity in blocks.
    pub(crate) fn most_blocks(&self) -> usize {
        self.expert_ids.len()
    }

    pub(crate) fn is_on(&self, device: &Device) -> bool {
        self.expert_ids.is_on(device)
    }

    /// The alignment of `topk_ids` as [`gather_on_device`](crate::ops::gather::gather_on_device) makes it.
    ///
    /// # Errors
    /// As [`place_on_device`](super::place_on_device).
    pub(crate) fn placing(
        &mut self,
        device: &Device,
        runs: &Runs,
        topk_ids: &Buffer<i32>,
    ) -> Result<Placing, AccelError> {
        self.check(device, runs, topk_ids)?;
        Ok(Placing {
            topk_ids: topk_ids.into(),
            run_of: (&runs.run_of).into(),
            place_of: (&mut self.place_of).into(),
            expert_ids: (&mut self.expert_ids).into(),
            block_rows: (&mut self.block_rows).into(),
            num_tokens_post_padded: (&mut self.num_tokens_post_padded).into(),
            // All are below 2^31, as in an alignment of its own.
            num_experts: runs.run_of.len() as u32,
            num_runs: runs.runs as u32,
            block_size: self.block_size as u32,
        })
    }

    /// Returns an error unless these have room for that alignment.
    pub(super) fn check(
        &self,
        device: &Device,
        runs: &Runs,
        topk_ids: &Buffer<i32>,
    ) -> Result<(), AccelError> {
        let parts = [
            ("runs", runs.is_on(device)),
            ("topk_ids", topk_ids.is_on(device)),
            ("blocks", self.is_on(device)),
        ];
        check::same_device(&ROW, device, &parts)?;
        if topk_ids.len() != self.entries || self.experts != runs.experts {
            let expected = format!("{} entries for {} experts", topk_ids.len(), runs.experts);
            return Err(ROW.refuse("blocks", format!("{self:?}"), expected));
        }
        Ok(())
    }
}
