//! Alignments whose tables and results are in memory of the caller.

use super::{DeviceBlocks, ROW, Runs};
use crate::{error::AccelError, memory::Buffer};

impl Runs {
    /// Experts whose table is in the device's memory already: `run_of` `[experts of all ranks]` has e · 65537 for an
    /// expert that is number e of this rank's `experts`, else −1; `expert_of` has e, else −1, and may be absent where
    /// every expert is on this rank under its own number.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for no expert, more than 8192, and tables of different lengths.
    pub fn from_tables(
        run_of: Buffer<i32>,
        expert_of: Option<Buffer<i32>>,
        experts: usize,
    ) -> Result<Self, AccelError> {
        let all = run_of.len();
        if !(1..=8192).contains(&all) || !(1..=all).contains(&experts) {
            let expected = "1 to 8192, and at most as many on this rank";
            return Err(ROW.refuse("num_experts", format!("{all}, here {experts}"), expected));
        }
        let others = expert_of.as_ref().map_or(experts, Buffer::len);
        if others != all {
            return Err(ROW.refuse("expert_map", format!("{others} entries"), all));
        }
        Ok(Self { run_of, runs: experts, expert_of, experts })
    }
}

impl DeviceBlocks {
    /// Capacity in entries, padding included; divided by the block size, in blocks.
    pub fn most_entries(&self) -> usize {
        self.places()
    }

    /// Takes other memory for the next alignment's sorted entries, experts of blocks and number of entries. What an
    /// alignment leaves in it behind the last block is `entries` and undefined.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for memory of another length.
    pub fn write_to(
        &mut self,
        sorted_token_ids: Buffer<i32>,
        expert_ids: Buffer<i32>,
        num_tokens_post_padded: Buffer<i32>,
    ) -> Result<(), AccelError> {
        let lengths = [sorted_token_ids.len(), expert_ids.len(), num_tokens_post_padded.len()];
        let expected = [self.places(), self.most_blocks(), 1];
        if lengths != expected {
            return Err(ROW.refuse(
                "sorted_token_ids",
                format!("{lengths:?}"),
                format!("{expected:?}"),
            ));
        }
        self.sorted_token_ids = sorted_token_ids;
        self.placed.expert_ids = expert_ids;
        self.placed.num_tokens_post_padded = num_tokens_post_padded;
        Ok(())
    }
}
