//! Tokens in blocks of one expert.

use marlinspike::Result;
use marlinspike::moe::align::{Absent, Align};
use marlinspike::vectors::Rng;
use proptest::prelude::*;

use super::{Distribution, one_of};
use crate::Operation;

/// `moe_align_block_size`, entries of a run ascending; the output is `num_tokens_post_padded`, the
/// valid part of `sorted_token_ids`, then that of `expert_ids`.
#[derive(Debug)]
pub struct AlignBlocks;

/// Arguments of [`AlignBlocks`].
#[derive(Debug, Clone)]
pub struct AlignInput {
    /// Flattened; ids of `num_experts` and above belong to no expert.
    pub topk_ids: Vec<i32>,
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Global to local expert, −1 for those of other ranks.
    pub expert_map: Option<Vec<i32>>,
    /// Treatment of experts of other ranks.
    pub absent: Absent,
    /// Entries of a block.
    pub block_size: usize,
}

impl AlignInput {
    /// The alignment of these arguments.
    pub fn align(&self) -> Align<'_> {
        let Self { block_size, num_experts, absent, .. } = *self;
        Align { block_size, num_experts, expert_map: self.expert_map.as_deref(), absent }
    }
}

impl Operation for AlignBlocks {
    const NAME: &'static str = "moe_align_block_size";
    type Input = AlignInput;
    type Element = u32;

    fn inputs() -> BoxedStrategy<AlignInput> {
        let experts = one_of(&[1usize, 4, 8, 33, 128, 257]);
        let sizes = (0usize..40, 1usize..5, experts, one_of(&[1usize, 8, 16, 48, 64]));
        (sizes, Distribution::any(), 0u32..3, any::<u64>())
            .prop_map(|((tokens, top_k, num_experts, block_size), spread, kind, seed)| {
                let mut rng = Rng::new(seed);
                let mut topk_ids = spread.topk_ids(&mut rng, tokens, top_k, num_experts);
                // Alignment does not accept negative ids; entries without an expert use ids beyond
                // the experts.
                topk_ids.iter_mut().filter(|id| **id < 0).for_each(|id| *id = num_experts as i32);
                let expert_map = (kind > 0).then(|| {
                    let mut places: Vec<i32> = (0..num_experts as i32).collect();
                    rng.shuffle(&mut places);
                    let local = |place: i32| if place % 3 == 0 { place / 3 } else { -1 };
                    places.into_iter().map(local).collect()
                });
                let absent = if kind == 2 { Absent::Mark } else { Absent::Ignore };
                AlignInput { topk_ids, num_experts, expert_map, absent, block_size }
            })
            .boxed()
    }

    fn expected(i: &AlignInput) -> Result<Vec<u32>> {
        let aligned = i.align().run(&i.topk_ids)?;
        let total = std::iter::once(&aligned.num_tokens_post_padded);
        let all = total.chain(&aligned.sorted_token_ids).chain(&aligned.expert_ids);
        Ok(all.map(|x| x.cast_unsigned()).collect())
    }

    fn place(i: &AlignInput, element: usize, _bit: u32) -> String {
        let total = Self::len(i).map_or(0, |len| (len - 1) / (i.block_size + 1) * i.block_size);
        match element.checked_sub(1) {
            None => "num_tokens_post_padded".to_owned(),
            Some(p) if p < total => {
                format!("position {} of block {}", p % i.block_size, p / i.block_size)
            }
            Some(p) => format!("expert of block {}", p - total),
        }
    }

    fn describe(i: &AlignInput) -> String {
        let AlignInput { topk_ids, num_experts, absent, block_size, .. } = i;
        let map = i.expert_map.is_some();
        format!(
            "{} entries, {num_experts} experts, map {map}, {absent:?}, blocks of {block_size}",
            topk_ids.len()
        )
    }
}
