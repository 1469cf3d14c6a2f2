//! A layer's first half: attention over the tokens of each row's own sequence.

mod grouped;
mod latent;

use crate::block::Workspaces;
use crate::cache::Cache;
use crate::config::Config;
use crate::error::Result;
use crate::ops::rope::Rope;
use crate::weights::Weights;

use grouped::Grouped;
use latent::LatentAttention;

/// New tokens of one sequence.
#[derive(Debug)]
pub struct Input<'i> {
    /// The tokens after those that the cache holds, 1 or more.
    pub tokens: &'i [u32],
    /// The sequence's keys and values; the tokens are added.
    pub cache: &'i mut Cache,
}

/// A row of a batch: its input and its position in the sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    pub(crate) input: usize,
    pub(crate) position: usize,
}

/// The rows of a call, for one layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Batch<'b> {
    pub(crate) layer: usize,
    pub(crate) rows: &'b [Row],
    /// [`Rope::angles`] of each row.
    pub(crate) angles: &'b [f32],
    pub(crate) rope: &'b Rope,
}

impl<'b> Batch<'b> {
    /// cos and sin of each row.
    fn tables(&self) -> impl Iterator<Item = &'b [f32]> {
        self.angles.chunks_exact(self.rope.table_len())
    }
}

/// Attention, by what the cache holds.
#[derive(Debug)]
pub(crate) enum Attention<'f> {
    /// Keys and values of each group of heads.
    Grouped(Box<Grouped<'f>>),
    /// One latent for all heads.
    Latent(Box<LatentAttention<'f>>),
}

impl<'f> Attention<'f> {
    /// The attention of layer `i`.
    pub(crate) fn load(weights: &Weights<'_, 'f>, config: &Config, i: usize) -> Result<Self> {
        match &config.latent {
            Some(sizes) => {
                let latent = LatentAttention::load(weights, config, *sizes, i)?;
                Ok(Self::Latent(Box::new(latent)))
            }
            None => Grouped::load(weights, config, i).map(Box::new).map(Self::Grouped),
        }
    }

    /// `out` `[M, H]` of the normalized rows `x` `[M, H]`; the caches receive the new tokens.
    pub(crate) fn forward(
        &self,
        batch: Batch<'_>,
        x: &[f32],
        inputs: &mut [Input<'_>],
        out: &mut Vec<f32>,
        w: &mut Workspaces,
    ) -> Result<()> {
        match self {
            Self::Grouped(grouped) => grouped.forward(batch, x, inputs, out, w),
            Self::Latent(latent) => latent.forward(batch, x, inputs, out, w),
        }
    }
}
