//! Grouped-query attention, with a window and sinks.

use marlinspike::num::dims::Shape;
use rayon::prelude::*;

use super::{Batch, Input};
use crate::block::Workspaces;
use crate::cache::Cache;
use crate::config::Config;
use crate::error::Result;
use crate::ops::attention::Heads;
use crate::ops::norm::RmsNorm;
use crate::ops::rope::rotate;
use crate::weights::{Linear, Weights};

/// Projections, norms and sizes of a layer.
#[derive(Debug)]
pub(crate) struct Grouped<'f> {
    q: Linear<'f>,
    k: Linear<'f>,
    v: Linear<'f>,
    o: Linear<'f>,
    /// Norms of queries and keys.
    norms: Option<[RmsNorm; 2]>,
    /// The sink of each query head.
    sinks: Option<Vec<f32>>,
    head_dim: usize,
    num_heads: usize,
    num_kv_heads: usize,
    window: Option<usize>,
}

impl<'f> Grouped<'f> {
    pub(super) fn load(weights: &Weights<'_, 'f>, config: &Config, i: usize) -> Result<Self> {
        let prefix = format!("model.layers.{i}.self_attn");
        let linear = |name: &str, size_k, size_n| {
            let module = format!("{prefix}.{name}");
            weights.linear(&module, Shape::new(size_k, size_n), config.attention_bias)
        };
        let norm = |name: &str| {
            let module = format!("{prefix}.{name}");
            weights.norm(&module, config.head_dim, config.rms_norm_eps)
        };
        let (hidden, q, kv) = (config.hidden_size, config.query_size(), config.kv_size());
        let norms = match config.architecture.qk_norm {
            true => Some([norm("q_norm")?, norm("k_norm")?]),
            false => None,
        };
        let sinks = match config.architecture.sinks {
            true => Some(weights.vector(&format!("{prefix}.sinks"), config.num_heads)?),
            false => None,
        };
        Ok(Self {
            q: linear("q_proj", hidden, q)?,
            k: linear("k_proj", hidden, kv)?,
            v: linear("v_proj", hidden, kv)?,
            o: linear("o_proj", q, hidden)?,
            norms,
            sinks,
            head_dim: config.head_dim,
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            window: config.window(i),
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
        let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        let Workspaces { linear, keys, values, .. } = w;
        let (done_q, (done_k, done_v)) = rayon::join(
            || self.q.forward(x, &mut q, linear),
            || {
                rayon::join(
                    || self.k.forward(x, &mut k, keys),
                    || self.v.forward(x, &mut v, values),
                )
            },
        );
        done_q.and(done_k).and(done_v)?;
        if let Some([of_q, of_k]) = &self.norms {
            of_q.apply(&mut q);
            of_k.apply(&mut k);
        }
        let (q_size, kv_size) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        let heads = q.chunks_exact_mut(q_size).zip(k.chunks_exact_mut(kv_size));
        for ((q, k), table) in heads.zip(batch.tables()) {
            rotate(q, table);
            rotate(k, table);
        }
        let kv = k.chunks_exact(kv_size).zip(v.chunks_exact(kv_size));
        for (row, (k, v)) in batch.rows.iter().zip(kv) {
            let cache = &mut inputs[row.input].cache;
            let offset = row.position - cache.len();
            cache.store(batch.layer, offset, [k, v]);
        }
        let caches: Vec<&Cache> = inputs.iter().map(|input| &*input.cache).collect();
        let attended = self.attend(batch, &q, &caches);
        self.o.forward(&attended, out, &mut w.linear)
    }

    /// Every head of every row on its own sequence; heads that share keys go together.
    fn attend(&self, batch: Batch<'_>, q: &[f32], caches: &[&Cache]) -> Vec<f32> {
        let (head_dim, kv_heads) = (self.head_dim, self.num_kv_heads);
        let per_kv = self.num_heads / kv_heads;
        let width = per_kv * head_dim;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let mut attended = vec![0.0f32; q.len()];
        let items = attended.par_chunks_exact_mut(width).zip(q.par_chunks_exact(width)).enumerate();
        items.for_each_init(Vec::new, |scores, (i, (out, queries))| {
            let (row, head) = (batch.rows[i / kv_heads], i % kv_heads);
            let end = row.position + 1;
            let first = end.saturating_sub(self.window.unwrap_or(end));
            let [keys, values] = caches[row.input].head(batch.layer, head, first, end);
            let sinks = self.sinks.as_ref().map(|sinks| &sinks[head * per_kv..][..per_kv]);
            let value_dim = head_dim;
            Heads { queries, keys, values, head_dim, value_dim, scale, sinks, scores, out }
                .attend();
        });
        attended
    }
}
