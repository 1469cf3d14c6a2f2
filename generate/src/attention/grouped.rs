//! Grouped-query attention, with a window and sinks.

use marlinspike::num::dims::Shape;
use rayon::prelude::*;

use super::{Batch, Input, Row};
use crate::block::{AttentionRows, Workspaces};
use crate::cache::{Cache, PackedKeys};
use crate::config::Config;
use crate::error::Result;
use crate::ops::attention::{FEW_QUERIES, Heads, Keys, QUERIES};
use crate::ops::norm::RmsNorm;
use crate::ops::rope::rotate;
use crate::ops::{item_rows, resize};
use crate::weights::{Linear, Weights};

/// Rows of one work item, which share what is in a core's caches.
const ITEM_ROWS: usize = 8;
/// Rows of a sequence from which on packed keys are faster.
const PACKED_ROWS: usize = 8;

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
        let Workspaces { linear, attention, .. } = w;
        let AttentionRows { q, k, v, attended, packed } = attention;
        Linear::forward_all([&self.q, &self.k, &self.v], x, [&mut *q, k, v], linear)?;
        self.place(batch, q, k);
        let mut first = 0;
        for input in &mut *inputs {
            let rows = first..first + input.tokens.len() * self.num_kv_heads * self.head_dim;
            first = rows.end;
            input.cache.store(batch.layer, 0, [&k[rows.clone()], &v[rows]]);
        }
        let caches: Vec<&Cache> = inputs.iter().map(|input| &*input.cache).collect();
        resize(attended, q.len());
        self.attend(batch, (q, packed), &caches, attended);
        self.o.forward(attended, out, linear)
    }

    /// Normalizes and rotates the queries and keys of each row.
    fn place(&self, batch: Batch<'_>, q: &mut [f32], k: &mut [f32]) {
        let [q_size, kv_size] = [self.num_heads, self.num_kv_heads].map(|n| n * self.head_dim);
        let count = item_rows(q_size + kv_size);
        let tables = batch.angles.par_chunks(count * batch.rope.table_len());
        let items = q.par_chunks_mut(count * q_size).zip(k.par_chunks_mut(count * kv_size));
        items.zip(tables).for_each(|((q, k), tables)| {
            if let Some([of_q, of_k]) = &self.norms {
                of_q.apply(q);
                of_k.apply(k);
            }
            let rows = q.chunks_exact_mut(q_size).zip(k.chunks_exact_mut(kv_size));
            for ((q, k), table) in rows.zip(tables.chunks_exact(batch.rope.table_len())) {
                rotate(q, table);
                rotate(k, table);
            }
        });
    }

    /// Every head of every row on its own sequence: `attended` `[M, heads · head_dim]` of `q`.
    fn attend(
        &self,
        batch: Batch<'_>,
        (q, packed): (&[f32], &mut Vec<PackedKeys>),
        caches: &[&Cache],
        attended: &mut [f32],
    ) {
        self.pack_keys(batch, caches, packed);
        let packed: &[PackedKeys] = packed;
        let (head_dim, per_kv) = (self.head_dim, self.num_heads / self.num_kv_heads);
        let width = self.num_heads * head_dim;
        // An item of many rows is several of them with all heads. An item of few rows is heads of one
        // row, in a group that is computed together.
        let busy = batch.rows.len() * self.num_heads >= QUERIES * rayon::current_num_threads();
        let group = if busy { QUERIES } else { FEW_QUERIES };
        let (count, heads) = match batch.rows.len() {
            PACKED_ROWS.. => (ITEM_ROWS * width, per_kv),
            _ if per_kv.is_multiple_of(group) => (group * head_dim, group),
            _ => (per_kv * head_dim, per_kv),
        };
        let columns = count.min(width);
        let items = attended.par_chunks_mut(count).zip(q.par_chunks(count)).enumerate();
        items.for_each_init(Vec::new, |scores, (item, (out, q))| {
            let first = item * count;
            // The rows read the keys and values of one head after the other.
            for at in (0..columns).step_by(heads * head_dim) {
                let rows = out.chunks_exact_mut(columns).zip(q.chunks_exact(columns));
                for (m, (out, q)) in rows.enumerate() {
                    let (row, part) = (batch.rows[first / width + m], at..at + heads * head_dim);
                    let head = (first % width + at) / head_dim;
                    let found = (&q[part.clone()], head, &packed[row.input]);
                    self.attend_heads(batch.layer, row, caches, found, scores, &mut out[part]);
                }
            }
        });
    }

    /// Query heads from `head` on, which share their keys.
    fn attend_heads(
        &self,
        layer: usize,
        row: Row,
        caches: &[&Cache],
        (queries, head, packed): (&[f32], usize, &PackedKeys),
        scores: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        let head_dim = self.head_dim;
        let kv_head = head / (self.num_heads / self.num_kv_heads);
        let end = row.position + 1;
        let first = end.saturating_sub(self.window.unwrap_or(end));
        let [keys, values] = caches[row.input].head(layer, kv_head, first, end);
        let heads = head..head + queries.len() / head_dim;
        Heads {
            queries,
            keys: packed.keys(kv_head, first, head_dim).unwrap_or(Keys::Rows(keys)),
            values,
            count: end - first,
            head_dim,
            value_dim: head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            sinks: self.sinks.as_ref().map(|sinks| &sinks[heads]),
            scores,
            out,
        }
        .attend();
    }

    /// Packs the keys of each input with many rows.
    fn pack_keys(&self, batch: Batch<'_>, caches: &[&Cache], packed: &mut Vec<PackedKeys>) {
        packed.resize_with(caches.len().max(packed.len()), PackedKeys::default);
        for (i, (packed, cache)) in packed.iter_mut().zip(caches).enumerate() {
            let rows = batch.rows.iter().filter(|row| row.input == i);
            let count = rows.clone().count();
            let end = rows.map(|row| row.position + 1).max().unwrap_or(0);
            if count < PACKED_ROWS {
                packed.clear();
                continue;
            }
            // The first key that any row sees.
            let first = (end - count + 1).saturating_sub(self.window.unwrap_or(end));
            packed.fill(cache, batch.layer, [first, end]);
        }
    }
}
