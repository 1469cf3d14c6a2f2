//! Multi-head latent attention (DeepSeek): the cache holds one latent of a token for all heads.
//!
//! Keys and values are never expanded. A head's key part of `kv_b_proj` turns the query into one on
//! latents, and its value part turns the weighted sum of latents into the head's output; scores and
//! outputs are the same numbers as with expanded keys and values, up to rounding.

use marlinspike::num::dims::Shape;
use rayon::prelude::*;

use super::{Batch, Input};
use crate::block::Workspaces;
use crate::cache::Cache;
use crate::config::{Config, Latent};
use crate::error::Result;
use crate::ops::attention::{Heads, Keys};
use crate::ops::dense::Dense;
use crate::ops::norm::RmsNorm;
use crate::ops::rope::{rotate, rotate_pairs};
use crate::weights::{Linear, Weights};

/// ε of the norms of latents; released code does not read it from the config.
const EPS: f32 = 1e-6;

/// From hidden states to queries.
#[derive(Debug)]
enum Queries<'f> {
    /// One product.
    Whole(Linear<'f>),
    /// Down to a latent, a norm, and up.
    Latent { down: Linear<'f>, norm: RmsNorm, up: Linear<'f> },
}

/// Projections and sizes of a layer.
#[derive(Debug)]
pub(crate) struct LatentAttention<'f> {
    queries: Queries<'f>,
    /// Hidden states to latents and the key that is rotated.
    kv_down: Linear<'f>,
    kv_norm: RmsNorm,
    /// `[heads · (nope_dim + v_dim), kv_rank]`: each head's keys, then its values.
    kv_up: Dense<'f>,
    o: Linear<'f>,
    sizes: Latent,
    num_heads: usize,
    scale: f32,
}

impl<'f> LatentAttention<'f> {
    pub(super) fn load(
        weights: &Weights<'_, 'f>,
        config: &Config,
        sizes: Latent,
        i: usize,
    ) -> Result<Self> {
        let prefix = format!("model.layers.{i}.self_attn");
        let module = |name: &str| format!("{prefix}.{name}");
        let (hidden, heads, bias) = (config.hidden_size, config.num_heads, config.attention_bias);
        let linear = |name: &str, size_k, size_n, bias| {
            weights.linear(&module(name), Shape::new(size_k, size_n), bias)
        };
        let q_size = config.query_size();
        let queries = match sizes.q_rank {
            None => Queries::Whole(linear("q_proj", hidden, q_size, false)?),
            Some(rank) => Queries::Latent {
                down: linear("q_a_proj", hidden, rank, bias)?,
                norm: weights.norm(&module("q_a_layernorm"), rank, EPS)?,
                up: linear("q_b_proj", rank, q_size, false)?,
            },
        };
        let up = Shape::new(sizes.kv_rank, heads * (sizes.nope_dim + sizes.v_dim));
        let score_factor = config.yarn.map_or(1.0, |yarn| yarn.score_factor);
        Ok(Self {
            queries,
            kv_down: linear("kv_a_proj_with_mqa", hidden, sizes.cached(), bias)?,
            kv_norm: weights.norm(&module("kv_a_layernorm"), sizes.kv_rank, EPS)?,
            kv_up: weights.expanded(&module("kv_b_proj"), up)?,
            o: linear("o_proj", heads * sizes.v_dim, hidden, bias)?,
            sizes,
            num_heads: heads,
            scale: (score_factor / (sizes.query_dim() as f64).sqrt()) as f32,
        })
    }

    pub(super) fn forward(
        &self,
        batch: Batch<'_>,
        x: &[f32],
        inputs: &mut [Input<'_>],
        out: &mut Vec<f32>,
        w: &mut Workspaces,
    ) -> Result<()> {
        let mut q = Vec::new();
        match &self.queries {
            Queries::Whole(linear) => linear.forward(x, &mut q, &mut w.linear)?,
            Queries::Latent { down, norm, up } => {
                let mut latent = Vec::new();
                down.forward(x, &mut latent, &mut w.linear)?;
                norm.apply(&mut latent);
                up.forward(&latent, &mut q, &mut w.linear)?;
            }
        }
        let turn = if self.sizes.interleaved { rotate_pairs } else { rotate };
        let mut latents = Vec::new();
        self.kv_down.forward(x, &mut latents, &mut w.linear)?;
        let (query_dim, nope) = (self.sizes.query_dim(), self.sizes.nope_dim);
        let rows = q.chunks_exact_mut(self.num_heads * query_dim);
        let rows = rows.zip(latents.chunks_exact_mut(self.sizes.cached()));
        for (((q, latent), table), row) in rows.zip(batch.tables()).zip(batch.rows) {
            q.chunks_exact_mut(query_dim).for_each(|head| turn(&mut head[nope..], table));
            let (latent_part, key) = latent.split_at_mut(self.sizes.kv_rank);
            self.kv_norm.apply(latent_part);
            turn(key, table);
            let cache = &mut inputs[row.input].cache;
            let offset = row.position - cache.len();
            cache.store(batch.layer, offset, [&*latent]);
        }
        let caches: Vec<&Cache> = inputs.iter().map(|input| &*input.cache).collect();
        let attended = self.attend(batch, &q, &caches);
        self.o.forward(&attended, out, &mut w.linear)
    }

    /// Every head of every row on its own sequence: `[M, heads · v_dim]`. A work item has one head of
    /// all rows, so that the head's part of `kv_b_proj` is read once.
    fn attend(&self, batch: Batch<'_>, q: &[f32], caches: &[&Cache]) -> Vec<f32> {
        let (v_dim, size_m) = (self.sizes.v_dim, batch.rows.len());
        let mut by_head = vec![0.0f32; self.num_heads * size_m * v_dim];
        let items = by_head.par_chunks_exact_mut(size_m * v_dim).enumerate();
        items.for_each_init(Scratch::default, |scratch, (head, out)| {
            self.attend_head(batch, (head, q), caches, scratch, out);
        });
        let mut attended = Vec::with_capacity(by_head.len());
        for m in 0..size_m {
            for head in by_head.chunks_exact(size_m * v_dim) {
                attended.extend_from_slice(&head[m * v_dim..][..v_dim]);
            }
        }
        attended
    }

    /// One head of all rows: `out` `[M, v_dim]`.
    fn attend_head(
        &self,
        batch: Batch<'_>,
        (head, q): (usize, &[f32]),
        caches: &[&Cache],
        scratch: &mut Scratch,
        out: &mut [f32],
    ) {
        let Latent { kv_rank, nope_dim, rope_dim, v_dim, .. } = self.sizes;
        let (size_m, query_dim) = (batch.rows.len(), self.sizes.query_dim());
        let Scratch { nope, on_latents, query, weighted, scores } = scratch;
        let own = |m: usize| &q[(m * self.num_heads + head) * query_dim..][..query_dim];
        nope.clear();
        (0..size_m).for_each(|m| nope.extend_from_slice(&own(m)[..nope_dim]));
        on_latents.resize(size_m * kv_rank, 0.0);
        let keys = head * (nope_dim + v_dim);
        self.kv_up.combine_part(keys..keys + nope_dim, nope, on_latents);
        weighted.resize(size_m * kv_rank, 0.0);
        let rows = on_latents.chunks_exact(kv_rank).zip(weighted.chunks_exact_mut(kv_rank));
        for (m, (on_latent, out)) in rows.enumerate() {
            query.clear();
            query.extend_from_slice(on_latent);
            query.extend_from_slice(&own(m)[nope_dim..]);
            let row = batch.rows[m];
            let latents = caches[row.input].latents(batch.layer, row.position + 1);
            let heads = Heads {
                queries: query,
                keys: Keys::Rows(latents),
                values: latents,
                count: row.position + 1,
                head_dim: kv_rank + rope_dim,
                value_dim: kv_rank,
                scale: self.scale,
                sinks: None,
                scores,
                out,
            };
            heads.attend();
        }
        let values = keys + nope_dim;
        self.kv_up.forward_part(values..values + v_dim, weighted, out);
    }
}

/// Buffers of one thread.
#[derive(Debug, Default)]
struct Scratch {
    nope: Vec<f32>,
    on_latents: Vec<f32>,
    query: Vec<f32>,
    weighted: Vec<f32>,
    scores: Vec<f32>,
}
