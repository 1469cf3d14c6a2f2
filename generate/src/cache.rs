//! Keys and values of one sequence, or the latents that they are expanded from.

use rayon::prelude::*;

use crate::config::Config;
use crate::error::{GenerateError, Result};
use crate::ops::attention::{BLOCK, Keys};
use crate::ops::item_rows;

/// Rows that a layer stores for a token: key and value, or the latent.
fn parts(config: &Config) -> usize {
    if config.latent.is_some() { 1 } else { 2 }
}

/// The keys and values of one sequence's tokens, in f32, for every layer. Latent attention keeps one
/// row of a token for all heads: the latent and the rotated key.
///
/// Memory is reserved for `capacity` tokens; the system provides a page when it is first written.
#[derive(Debug, Clone)]
pub struct Cache {
    /// For each layer `[kv heads][capacity][head_dim]` of keys, then of values; of latents alone,
    /// `[capacity][latent]`.
    layers: Vec<Vec<Vec<f32>>>,
    len: usize,
    capacity: usize,
    head_dim: usize,
}

impl Cache {
    /// An empty cache for `capacity` tokens.
    pub(crate) fn new(config: &Config, capacity: usize) -> Self {
        let size = config.kv_size() * capacity;
        let layer = |_| (0..parts(config)).map(|_| vec![0.0; size]).collect();
        let layers = (0..config.num_layers).map(layer).collect();
        let head_dim = config.latent.map_or(config.head_dim, |latent| latent.cached());
        Self { layers, len: 0, capacity, head_dim }
    }

    /// Bytes of a cache for `capacity` tokens.
    pub(crate) fn bytes(config: &Config, capacity: usize) -> u64 {
        let values =
            [parts(config), config.num_layers, config.kv_size(), capacity, size_of::<f32>()];
        values.into_iter().map(|n| n as u64).fold(1, u64::saturating_mul)
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Forgets all tokens from `len` on; the memory stays.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Fails unless `tokens` more fit.
    pub(crate) fn expect_room(&self, tokens: usize) -> Result<()> {
        let needed = self.len.saturating_add(tokens);
        if needed <= self.capacity {
            return Ok(());
        }
        Err(GenerateError::CacheFull { capacity: self.capacity, needed })
    }

    /// Stores rows of each part, key and value or the latent, of consecutive tokens: the first one is
    /// `offset` places after the last token held. On rayon's current pool.
    pub(crate) fn store<const N: usize>(&mut self, layer: usize, offset: usize, rows: [&[f32]; N]) {
        let (at, dim, capacity) = (self.len + offset, self.head_dim, self.capacity);
        for (stored, rows) in self.layers[layer].iter_mut().zip(rows) {
            let width = stored.len() / capacity;
            let tokens = rows.len() / width;
            let heads = stored.par_chunks_exact_mut(capacity * dim).enumerate();
            heads.with_min_len(item_rows(tokens * dim)).for_each(|(head, stored)| {
                let to = stored[at * dim..].chunks_exact_mut(dim);
                for (to, row) in to.zip(rows.chunks_exact(width)) {
                    to.copy_from_slice(&row[head * dim..][..dim]);
                }
            });
        }
    }

    /// Keys and values of a head for tokens `first` to `end`.
    pub(crate) fn head(&self, layer: usize, head: usize, first: usize, end: usize) -> [&[f32]; 2] {
        let start = (head * self.capacity + first) * self.head_dim;
        let len = (end - first) * self.head_dim;
        [0, 1].map(|part| &self.layers[layer][part][start..start + len])
    }

    /// Latents of tokens 0 to `end`.
    pub(crate) fn latents(&self, layer: usize, end: usize) -> &[f32] {
        &self.layers[layer][0][..end * self.head_dim]
    }

    /// Counts the stored tokens as held.
    pub(crate) fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }
}

/// The keys of a sequence for many rows.
#[derive(Debug, Default)]
pub(crate) struct PackedKeys {
    /// `[kv heads][block][head_dim][BLOCK]`.
    pub(crate) blocks: Vec<f32>,
    /// Values of a head; 0: the keys are not packed.
    pub(crate) per_head: usize,
    /// The first key, a multiple of [`BLOCK`].
    pub(crate) first: usize,
}

impl PackedKeys {
    /// The keys of a head from key `first` on.
    pub(crate) fn keys(&self, head: usize, first: usize, head_dim: usize) -> Option<Keys<'_>> {
        let blocks = self.blocks.get(head * self.per_head..(head + 1) * self.per_head)?;
        let skipped = first.checked_sub(self.first)?;
        let blocks = blocks.get(skipped / BLOCK * BLOCK * head_dim..)?;
        (!blocks.is_empty()).then_some(Keys::Packed { blocks, skipped: skipped % BLOCK })
    }
}
