//! The alignment as an operation that the tests compare with the reference.

use marlinspike::moe::align::Align;

use super::{Blocks, ROW, moe_align_block_size};
use crate::{
    call::{Call, Outputs},
    device::Device,
    error::AccelError,
    operation::Row,
};

impl Outputs for Blocks {
    fn bits(&self) -> Vec<u32> {
        let total = std::iter::once(&self.num_tokens_post_padded);
        let all = total.chain(&self.sorted_token_ids).chain(&self.expert_ids);
        all.map(|value| value.cast_unsigned()).collect()
    }
}

/// [`moe_align_block_size`].
#[derive(Debug, Clone, Copy)]
pub struct AlignTokens<'a> {
    /// How tokens are aligned.
    pub align: &'a Align<'a>,
    /// Flattened.
    pub topk_ids: &'a [i32],
}

impl Call for AlignTokens<'_> {
    type Output = Blocks;

    fn row(&self) -> &'static Row {
        &ROW
    }

    fn on_device(&self, device: &Device) -> Result<Blocks, AccelError> {
        moe_align_block_size(device, self.align, self.topk_ids)
    }

    fn by_reference(&self) -> marlinspike::Result<Blocks> {
        let aligned = self.align.run(self.topk_ids)?;
        Ok(Blocks {
            sorted_token_ids: aligned.sorted_token_ids,
            expert_ids: aligned.expert_ids,
            num_tokens_post_padded: aligned.num_tokens_post_padded,
        })
    }
}
