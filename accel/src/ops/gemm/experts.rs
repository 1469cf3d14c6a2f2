//! The arguments of products with experts: which rows go to which expert.

use super::{MOE, MarlinWeight, Tiling, checks};
use crate::{
    device::Device,
    error::AccelError,
    launch::Routing,
    memory::Buffer,
    ops::align::{DeviceBlocks, Runs},
};

use marlinspike::moe::activation::Definition;

/// The arguments that only a product with experts has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Experts<'a> {
    pub(crate) entries: Entries<'a>,
    /// Row t of y is computed from row t / `top_k` of x.
    pub(crate) top_k: usize,
    /// Multiplies row t of the product before it is rounded.
    pub(crate) topk_weights: Option<&'a Buffer<f32>>,
    /// Applied to the product before y is written.
    pub(crate) activation: Option<&'a Definition>,
    /// Whether the previous kernel on the stream does not write the routing.
    pub(crate) is_early: bool,
}

/// Which rows go to which expert.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Entries<'a> {
    /// Aligned in blocks of [`Tiling::rows`] of the product's tiling.
    Blocks(&'a DeviceBlocks),
    /// Found by the product itself: [`Tiling::is_direct`].
    Direct { topk_ids: &'a Buffer<i32>, runs: &'a Runs },
}

impl Experts<'_> {
    pub(super) fn routing(&self) -> Routing {
        let routing = Routing { is_early: self.is_early.into(), ..Routing::default() };
        match self.entries {
            Entries::Blocks(blocks) => Routing {
                sorted_token_ids: (&blocks.sorted_token_ids).into(),
                expert_ids: (&blocks.expert_ids).into(),
                num_tokens_post_padded: (&blocks.num_tokens_post_padded).into(),
                ..routing
            },
            Entries::Direct { topk_ids, runs } => Routing {
                topk_ids: topk_ids.into(),
                expert_of: runs.expert_of.as_ref().into(),
                // At most 8192.
                num_experts: runs.run_of.len() as u32,
                ..routing
            },
        }
    }

    /// Number of blocks of rows in a product of `size_m` rows.
    ///
    /// # Errors
    /// [`AccelError::Argument`] for entries that are not of the product's rows, tiling and weight.
    pub(super) fn row_blocks(
        &self,
        weight: &MarlinWeight,
        tiling: Tiling,
        size_m: usize,
    ) -> Result<usize, AccelError> {
        checks::router_weights(&MOE, "topk_weights", self.topk_weights, size_m)?;
        match self.entries {
            Entries::Blocks(blocks) => {
                checks::blocks(&MOE, blocks, tiling.rows(), size_m, weight.experts())?;
                Ok(blocks.most_blocks())
            }
            Entries::Direct { topk_ids, runs } => {
                if topk_ids.len() != size_m || !tiling.is_direct(weight.form(), size_m)? {
                    let found = format!("{} for {tiling:?}", topk_ids.len());
                    return Err(MOE.refuse(
                        "topk_ids",
                        found,
                        format!("{size_m}, few enough for the tiling"),
                    ));
                }
                let (here, most) = (runs.experts(), weight.experts());
                if here > most {
                    return Err(MOE.refuse("experts", here, format!("at most {most}")));
                }
                Ok(size_m)
            }
        }
    }

    pub(super) fn is_on(&self, device: &Device) -> bool {
        let entries = match self.entries {
            Entries::Blocks(blocks) => blocks.is_on(device),
            Entries::Direct { topk_ids, runs } => topk_ids.is_on(device) && runs.is_on(device),
        };
        entries && self.topk_weights.is_none_or(|weights| weights.is_on(device))
    }
}

/// Which rows go to which expert.
#[derive(Debug, Clone, Copy)]
pub struct Routed<'a> {
    /// Tokens in blocks of one expert, made for [`Tiling::rows`] of the product's tiling.
    pub blocks: &'a DeviceBlocks,
    /// Row t of y is computed from row t / `top_k` of x.
    pub top_k: usize,
    /// Multiplies row t of y before it is rounded.
    pub topk_weights: Option<&'a Buffer<f32>>,
}
