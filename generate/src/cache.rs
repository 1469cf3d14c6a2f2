//! Keys and values of one sequence, or the latents that they are expanded from.

use rayon::prelude::*;

use crate::config::Config;
use crate::error::{GenerateError, Result};
use crate::ops::attention::{BLOCK, Keys, pack};
use crate::ops::{item_rows, resize};

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

/// The keys of a sequence for many rows. The memory is kept from one use to the next.
#[derive(Debug, Default)]
pub(crate) struct PackedKeys {
    /// `[kv heads][block][head_dim][BLOCK]`.
    blocks: Vec<f32>,
    /// What the blocks hold; absent: the keys are not packed.
    range: Option<PackedRange>,
}

/// The packed keys of each head.
#[derive(Debug, Clone, Copy)]
struct PackedRange {
    /// The first key, a multiple of [`BLOCK`].
    first: usize,
    /// Values of a head.
    per_head: usize,
}

impl PackedKeys {
    /// Marks the keys as not packed.
    pub(crate) fn clear(&mut self) {
        self.range = None;
    }

    /// Packs the keys `first` to `end` of every head, from the beginning of a block on. On rayon's current
    /// pool.
    pub(crate) fn fill(&mut self, cache: &Cache, layer: usize, [first, end]: [usize; 2]) {
        let (head_dim, first) = (cache.head_dim, first / BLOCK * BLOCK);
        let heads = cache.layers[layer][0].len() / (cache.capacity * head_dim);
        let per_head = (end - first).next_multiple_of(BLOCK) * head_dim;
        resize(&mut self.blocks, heads * per_head);
        let block = BLOCK * head_dim;
        self.blocks.par_chunks_exact_mut(block).enumerate().for_each(|(item, to)| {
            let (head, at) = (item * block / per_head, item * block % per_head);
            let from = first + at / head_dim;
            let [keys, _] = cache.head(layer, head, from, end.min(from + BLOCK));
            pack(keys, head_dim, to);
        });
        self.range = Some(PackedRange { first, per_head });
    }

    /// The keys of a head from key `first` on; `None` if they are not packed.
    pub(crate) fn keys(&self, head: usize, first: usize, head_dim: usize) -> Option<Keys<'_>> {
        let PackedRange { first: packed, per_head } = self.range?;
        let blocks = &self.blocks[head * per_head..][..per_head];
        let skipped = first - packed;
        let blocks = &blocks[skipped / BLOCK * BLOCK * head_dim..];
        Some(Keys::Packed { blocks, skipped: skipped % BLOCK })
    }
}
