//! The experts of other ranks.

use super::ROW;
use crate::{device::Device, error::AccelError, memory::Buffer};

/// Which rank has each expert.
#[derive(Debug)]
pub(crate) struct ExpertRanks {
    pub(crate) rank: usize,
    /// One more than the largest rank of an expert.
    pub(crate) ranks: usize,
    /// `[num_experts]`.
    pub(crate) rank_of: Buffer<i32>,
}

impl ExpertRanks {
    /// Of the experts that are `here`, on `rank`, and all others.
    pub(crate) fn new(
        device: &Device,
        here: &[bool],
        rank: usize,
        rank_of: &[usize],
    ) -> Result<Self, AccelError> {
        if rank_of.len() != here.len() {
            return Err(ROW.refuse("rank_of", format!("{} experts", rank_of.len()), here.len()));
        }
        for (expert, (&of, &is_here)) in rank_of.iter().zip(here).enumerate() {
            if (of == rank) != is_here || i32::try_from(of).is_err() {
                let found = format!("expert {expert} on rank {of}, here: {is_here}");
                let expected = format!("rank {rank} for the experts here alone");
                return Err(ROW.refuse("rank_of", found, expected));
            }
        }
        let ranks = rank_of.iter().max().map_or(0, |rank| rank + 1);
        let rank_of: Vec<i32> = rank_of.iter().map(|&rank| rank as i32).collect();
        Ok(Self { rank, ranks, rank_of: device.upload(&rank_of)? })
    }
}
