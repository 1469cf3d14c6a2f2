//! The decoder: tokens to logits.

use std::sync::{Mutex, MutexGuard, PoisonError};

use marlinspike::num::dims::Shape;
use marlinspike_model::model::Model;
use rayon::prelude::*;

use crate::attention::{Attention, Batch, Input, Row};
use crate::block::{Block, Workspaces};
use crate::cache::Cache;
use crate::config::Config;
use crate::error::{GenerateError, Result};
use crate::ops::add;
use crate::ops::dense::Dense;
use crate::ops::norm::RmsNorm;
use crate::ops::rope::Rope;
use crate::weights::{Linear, Weights, for_packing};

/// A loaded model. Weights are borrowed from the mapped files, except layers that had to be packed.
#[derive(Debug)]
pub struct Decoder<'f> {
    config: Config,
    embedding: Dense<'f>,
    layers: Vec<Layer<'f>>,
    norm: RmsNorm,
    /// The output product, if it does not use the embedding.
    head: Option<Linear<'f>>,
    rope: Rope,
    /// Bytes of the layers that were packed.
    packed_bytes: u64,
    /// Buffers of the last call.
    workspaces: Mutex<Workspaces>,
}

#[derive(Debug)]
struct Layer<'f> {
    input_norm: RmsNorm,
    attention: Attention<'f>,
    block_norm: RmsNorm,
    block: Block<'f>,
}

/// For which tokens logits are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsOf {
    /// The last token of each input.
    Last,
    /// Every token.
    All,
}

impl<'f> Decoder<'f> {
    /// Loads the model of a folder: a checkpoint, or one converted for the int4 path. A converted
    /// folder is mapped and read when a token first needs it; quantized layers of a checkpoint are
    /// packed now, on rayon's current pool.
    ///
    /// # Errors
    /// [`GenerateError`] naming the key or the tensor that is missing, unexpected or of another shape;
    /// [`GenerateError::Memory`] if packing needs more than `memory_limit` bytes.
    pub fn load(model: &Model<'f>, memory_limit: u64) -> Result<Self> {
        let config = Config::read(&model.config)?;
        let packing = for_packing(model);
        let weights = Weights::new(model, &packing)?;
        let needed = weights.packed_bytes().saturating_add(weights.expanded_bytes(&config));
        if needed > memory_limit {
            let what = "packing the checkpoint's layers (a converted folder needs none)".to_owned();
            return Err(GenerateError::Memory { what, needed, limit: memory_limit });
        }
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let embedding = weights.dense("model.embed_tokens.weight", vocab, hidden)?;
        let layers = (0..config.num_layers).map(|i| Layer::load(&weights, &config, i));
        let layers = layers.collect::<Result<_>>()?;
        let norm = weights.norm("model.norm", hidden, config.rms_norm_eps)?;
        let head = match config.tie_word_embeddings {
            true => {
                // Some writers store the shared matrix twice.
                weights.mark("lm_head.weight".to_owned());
                None
            }
            false => Some(weights.linear("lm_head", Shape::new(hidden, vocab), false)?),
        };
        weights.expect_all_used(&config)?;
        let rope = match &config.yarn {
            Some(yarn) => Rope::yarn(config.rope_theta, config.head_dim, yarn),
            None => Rope::new(config.rope_theta, config.head_dim),
        };
        Ok(Self {
            config,
            embedding,
            layers,
            norm,
            head,
            rope,
            packed_bytes: needed,
            workspaces: Mutex::default(),
        })
    }

    /// Sizes and constants.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Bytes of packed layers, of a cache for `capacity` tokens, and, estimated, of the buffers of a
    /// call of `rows` tokens. Mapped weights do not count.
    pub fn memory(&self, capacity: usize, rows: usize) -> u64 {
        let c = &self.config;
        let row =
            7 * c.hidden_size + 3 * c.query_size() + 6 * c.kv_size() + 4 * c.intermediate_size;
        let values = (row as u64).saturating_mul(rows as u64).saturating_add(c.vocab_size as u64);
        let buffers = values.saturating_mul(size_of::<f32>() as u64);
        let weights = self.packed_bytes.saturating_add(Cache::bytes(c, capacity));
        weights.saturating_add(buffers)
    }

    /// A cache for one sequence of up to `capacity` tokens.
    ///
    /// # Errors
    /// [`GenerateError::TooLong`] for more positions than the model has; [`GenerateError::Memory`] if
    /// the cache needs more than `memory_limit` bytes.
    pub fn cache(&self, capacity: usize, memory_limit: u64) -> Result<Cache> {
        let limit = self.config.max_positions;
        if capacity > limit {
            return Err(GenerateError::TooLong { prompt: capacity, new: 0, limit });
        }
        let needed = Cache::bytes(&self.config, capacity);
        if needed > memory_limit {
            let what = format!("a KV cache for {capacity} tokens");
            return Err(GenerateError::Memory { what, needed, limit: memory_limit });
        }
        Ok(Cache::new(&self.config, capacity))
    }

    /// Runs the new tokens of every input, on rayon's current pool, and adds them to the caches.
    /// Returns logits `[rows][vocab_size]`, inputs one after the other.
    ///
    /// A row's logits depend only on its sequence's tokens: the other inputs, the tokens per call and
    /// the number of threads change no bit.
    ///
    /// # Errors
    /// [`GenerateError::EmptyPrompt`], [`GenerateError::Token`] and [`GenerateError::CacheFull`] before
    /// anything is computed; [`GenerateError::NotFinite`] for logits that are not finite. Caches do not
    /// hold the tokens of a failed call.
    pub fn forward(&self, inputs: &mut [Input<'_>], wanted: LogitsOf) -> Result<Vec<f32>> {
        let rows = self.rows(inputs)?;
        let (mut x, angles) = self.begin(inputs, &rows);
        let (mut normed, mut out) = (Vec::new(), Vec::new());
        // A call at the same time finds none, and makes its own.
        let mut w = std::mem::take(&mut *self.workspaces());
        for (i, layer) in self.layers.iter().enumerate() {
            match i {
                0 => layer.input_norm.of(&x, &mut normed),
                _ => layer.input_norm.of_sum(&mut x, &out, &mut normed),
            }
            let batch = Batch { layer: i, rows: &rows, angles: &angles, rope: &self.rope };
            layer.attention.forward(batch, &normed, inputs, &mut out, &mut w)?;
            layer.block_norm.of_sum(&mut x, &out, &mut normed);
            layer.block.forward(&normed, &mut out, &mut w)?;
        }
        add(&mut x, &out);
        let mut positions: Vec<usize> = rows.iter().map(|row| row.position).collect();
        if wanted == LogitsOf::Last {
            (x, positions) = self.last_rows(inputs, &x);
        }
        self.norm.of(&x, &mut normed);
        let mut logits = Vec::new();
        match &self.head {
            Some(head) => head.forward(&normed, &mut logits, &mut w.linear)?,
            None => {
                logits.resize(positions.len() * self.config.vocab_size, 0.0);
                self.embedding.forward(&normed, &mut logits);
            }
        }
        for (row, &position) in logits.chunks(self.config.vocab_size).zip(&positions) {
            if let Some(found) = not_finite(row) {
                return Err(GenerateError::NotFinite { position, found });
            }
        }
        for input in inputs {
            input.cache.advance(input.tokens.len());
        }
        *self.workspaces() = w;
        Ok(logits)
    }

    /// The rows' embeddings, and the angles of their positions.
    fn begin(&self, inputs: &[Input<'_>], rows: &[Row]) -> (Vec<f32>, Vec<f32>) {
        let (width, table) = (self.config.hidden_size, self.rope.table_len());
        let tokens: Vec<u32> = inputs.iter().flat_map(|input| input.tokens).copied().collect();
        let (mut x, mut angles) = (vec![0.0; rows.len() * width], vec![0.0; rows.len() * table]);
        let items = x.par_chunks_exact_mut(width).zip(angles.par_chunks_exact_mut(table));
        items.zip(tokens).zip(rows).for_each(|(((x, angles), token), row)| {
            self.embedding.row(token as usize, x);
            self.rope.angles(row.position, angles);
        });
        (x, angles)
    }

    fn workspaces(&self) -> MutexGuard<'_, Workspaces> {
        self.workspaces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rows of a batch, whose inputs are checked.
    fn rows(&self, inputs: &[Input<'_>]) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (i, input) in inputs.iter().enumerate() {
            if input.tokens.is_empty() {
                return Err(GenerateError::EmptyPrompt);
            }
            input.cache.expect_room(input.tokens.len())?;
            let vocab = self.config.vocab_size;
            if let Some(&found) = input.tokens.iter().find(|&&t| t as usize >= vocab) {
                return Err(GenerateError::Token { found, vocab });
            }
            let first = input.cache.len();
            let positions = first..first + input.tokens.len();
            rows.extend(positions.map(|position| Row { input: i, position }));
        }
        Ok(rows)
    }

    /// The last row of each input, and its position.
    fn last_rows(&self, inputs: &[Input<'_>], x: &[f32]) -> (Vec<f32>, Vec<usize>) {
        let (mut last, mut positions, mut end) = (Vec::new(), Vec::new(), 0);
        for input in inputs {
            end += input.tokens.len();
            let hidden = self.config.hidden_size;
            last.extend_from_slice(&x[(end - 1) * hidden..end * hidden]);
            positions.push(input.cache.len() + input.tokens.len() - 1);
        }
        (last, positions)
    }
}

/// The first value that is not finite. Whole pieces are tested at once, which compilers vectorize.
fn not_finite(row: &[f32]) -> Option<f32> {
    let is_finite = |piece: &&[f32]| piece.iter().fold(true, |all, x| all & x.is_finite());
    let piece = row.par_chunks(4096).find_first(|piece| !is_finite(piece))?;
    piece.iter().copied().find(|x| !x.is_finite())
}

impl<'f> Layer<'f> {
    fn load(weights: &Weights<'_, 'f>, config: &Config, i: usize) -> Result<Self> {
        let prefix = format!("model.layers.{i}");
        let norm =
            |name: &str, size| weights.norm(&format!("{prefix}.{name}"), size, config.rms_norm_eps);
        let hidden = config.hidden_size;
        Ok(Self {
            input_norm: norm("input_layernorm", hidden)?,
            attention: Attention::load(weights, config, i)?,
            block_norm: norm("post_attention_layernorm", hidden)?,
            block: Block::load(weights, config, i)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_that_is_not_finite_is_found_anywhere() {
        assert_eq!(not_finite(&[f32::MAX; 9001]), None);
        for at in [0, 255, 4095, 4096, 8192, 8999] {
            let mut row = [f32::MIN; 9001];
            row[at] = f32::NEG_INFINITY;
            row[at + 1..].fill(f32::INFINITY);
            assert_eq!(not_finite(&row), Some(f32::NEG_INFINITY), "{at}");
            row[at] = f32::NAN;
            assert!(not_finite(&row).is_some_and(f32::is_nan), "{at}");
        }
    }
}
