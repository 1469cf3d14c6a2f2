//! Sizes of latent attention and shared experts (DeepSeek).

use super::{Architecture, Keys};
use crate::error::Result;

/// Sizes of multi-head latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    /// Rank of the queries' down-projection; absent: queries are projected at once.
    pub q_rank: Option<usize>,
    /// Values of the latent that keys and values are expanded from: `kv_lora_rank`.
    pub kv_rank: usize,
    /// Values of a query and key head that are not rotated: `qk_nope_head_dim`.
    pub nope_dim: usize,
    /// Values that are rotated; one key for all heads: `qk_rope_head_dim`.
    pub rope_dim: usize,
    /// Values of a value head: `v_head_dim`.
    pub v_dim: usize,
    /// Whether rotated pairs are neighbours, not halves: `rope_interleave`.
    pub interleaved: bool,
}

impl Latent {
    pub(super) fn read(keys: &Keys<'_>) -> Result<Self> {
        const LIMIT: usize = 1 << 16;
        Ok(Self {
            q_rank: keys.size("q_lora_rank", LIMIT)?,
            kv_rank: keys.need("kv_lora_rank", LIMIT)?,
            nope_dim: keys.need("qk_nope_head_dim", LIMIT)?,
            rope_dim: keys.need("qk_rope_head_dim", LIMIT)?,
            v_dim: keys.need("v_head_dim", LIMIT)?,
            interleaved: keys.flag("rope_interleave", true)?,
        })
    }

    /// Values of a query head.
    pub fn query_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }

    /// Cached values of a token: the latent, then the rotated key.
    pub fn cached(&self) -> usize {
        self.kv_rank + self.rope_dim
    }
}

/// Width of the shared experts together.
pub(super) fn shared_size(keys: &Keys<'_>, architecture: Architecture) -> Result<Option<usize>> {
    if !architecture.latent {
        return Ok(None);
    }
    let count = keys.count("n_shared_experts", 1 << 10)?.unwrap_or(0);
    let width = keys.need("moe_intermediate_size", 1 << 24)?;
    Ok((count > 0).then_some(count * width))
}
