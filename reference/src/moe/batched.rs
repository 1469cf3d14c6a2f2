//! The batched form of an expert-parallel layer: tokens arrive sorted by expert, `[E_local,
//! max_tokens, H]`, with the number of valid ones in each batch.
//!
//! Token t of batch e has the index e · max_tokens + t in the flattened input; each batch is cut
//! into separate blocks. Facts: vLLM 0.21.0 `batched_moe_align_block_size`,
//! `batched_fused_marlin_moe`, `fused_marlin_moe`.

use super::align::{Aligned, Run};
use crate::num::scalar::ScalarType;
use crate::{Error, Result};

/// The block size of upstream's batched layer.
pub const BLOCK_SIZE_M: usize = 64;

/// The block sizes of upstream's Marlin kernel.
const BLOCK_SIZES: [usize; 5] = [8, 16, 32, 48, 64];

/// Arguments of the batched alignment.
#[derive(Debug, Clone, Copy)]
pub struct BatchedAlign {
    /// Tokens per block.
    pub block_size: usize,
    /// Capacity of each batch in tokens.
    pub max_tokens: usize,
}

/// The operator's output: the aligned tokens, padded to the allocated length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Padded {
    /// `[E_local · round_up(max_tokens, block_size)]`; padded with the sentinel E_local ·
    /// max_tokens.
    pub sorted_token_ids: Vec<i32>,
    /// One for each block, −1 beyond the valid ones.
    pub expert_ids: Vec<i32>,
    /// Length of the valid part.
    pub num_tokens_post_padded: i32,
}

impl BatchedAlign {
    /// Aligns batches of `expert_num_tokens` valid tokens each; the result is trimmed to the
    /// valid length.
    ///
    /// # Errors
    /// [`Error::Size`] for sizes of 0, and when the padded tokens are 2^31 or more;
    /// [`Error::Value`] for a number of tokens that is negative or above `max_tokens`.
    pub fn run(&self, expert_num_tokens: &[i32]) -> Result<Aligned> {
        let (block, max) = (self.block_size, self.max_tokens);
        self.padded_len(expert_num_tokens.len())?;
        // Within the padded length, so below 2^31.
        let sentinel = (expert_num_tokens.len() * max) as i32;
        let mut aligned = Aligned {
            sorted_token_ids: Vec::new(),
            expert_ids: Vec::new(),
            num_tokens_post_padded: 0,
            runs: Vec::new(),
        };
        for (expert, &count) in expert_num_tokens.iter().enumerate() {
            let count = usize::try_from(count).ok().filter(|&c| c <= max).ok_or_else(|| {
                Error::value("expert_num_tokens", &[expert], count, format!("0 to {max}"))
            })?;
            if count == 0 {
                continue;
            }
            let first = expert * max;
            let tokens: Vec<i32> = (first..first + count).map(|i| i as i32).collect();
            let start = aligned.sorted_token_ids.len();
            let blocks = count.div_ceil(block);
            aligned.sorted_token_ids.extend(&tokens);
            aligned.sorted_token_ids.resize(start + blocks * block, sentinel);
            let label = expert as i32;
            aligned.expert_ids.extend(std::iter::repeat_n(label, blocks));
            aligned.runs.push(Run { expert, label, start, tokens });
        }
        aligned.num_tokens_post_padded = aligned.sorted_token_ids.len() as i32;
        Ok(aligned)
    }

    /// The same, padded like the operator's outputs.
    ///
    /// # Errors
    /// As [`BatchedAlign::run`].
    pub fn padded(&self, expert_num_tokens: &[i32]) -> Result<Padded> {
        let aligned = self.run(expert_num_tokens)?;
        let len = self.padded_len(expert_num_tokens.len())?;
        let sentinel = (expert_num_tokens.len() * self.max_tokens) as i32;
        let (mut sorted_token_ids, mut expert_ids) = (aligned.sorted_token_ids, aligned.expert_ids);
        sorted_token_ids.resize(len, sentinel);
        expert_ids.resize(len / self.block_size, -1);
        let num_tokens_post_padded = aligned.num_tokens_post_padded;
        Ok(Padded { sorted_token_ids, expert_ids, num_tokens_post_padded })
    }

    /// E_local · round_up(max_tokens, block_size).
    fn padded_len(&self, experts: usize) -> Result<usize> {
        let (block, max) = (self.block_size, self.max_tokens);
        if block == 0 || max == 0 || experts == 0 {
            let found = format!("{block}, {max} and {experts}");
            return Err(Error::size("block_size, max_tokens and experts", found, "1 or more"));
        }
        let padded = max.checked_next_multiple_of(block).and_then(|n| n.checked_mul(experts));
        padded.filter(|&n| i32::try_from(n).is_ok()).ok_or_else(|| {
            Error::size("padded tokens", format!("{experts} x {max}"), "below 2^31 in all")
        })
    }
}

/// The expert of each row of the flattened input, for
/// [`Stack`](crate::products::schedule::Stack): `None` for a place without a valid token.
///
/// # Errors
/// As [`BatchedAlign::run`].
pub fn experts_of_rows(max_tokens: usize, expert_num_tokens: &[i32]) -> Result<Vec<Option<usize>>> {
    let aligned = BatchedAlign { block_size: 1, max_tokens }.run(expert_num_tokens)?;
    let mut rows = vec![None; expert_num_tokens.len() * max_tokens];
    for run in aligned.runs {
        for token in run.tokens {
            rows[token as usize] = Some(run.expert);
        }
    }
    Ok(rows)
}

/// The block size of upstream's layer: the first of 8, 16, 32, 48, 64 for which M · top_k / E /
/// size is below 0.9, otherwise 64; at least 16 for 8-bit activations. `num_experts` is this rank's
/// number of experts. The quotient is taken in f64, two divisions, as in Python.
///
/// # Errors
/// [`Error::Size`] without experts.
pub fn block_size_m(
    size_m: usize,
    top_k: usize,
    num_experts: usize,
    input_dtype: Option<ScalarType>,
) -> Result<usize> {
    if num_experts == 0 {
        return Err(Error::size("num_experts", 0, "1 or more"));
    }
    let pairs = size_m.saturating_mul(top_k) as f64;
    let fits = |&&size: &&usize| pairs / num_experts as f64 / (size as f64) < 0.9;
    let size = BLOCK_SIZES.iter().find(fits).copied().unwrap_or(BLOCK_SIZE_M);
    let eight_bits = input_dtype.is_some_and(|ty| ty.size_bits() == 8);
    Ok(if eight_bits { size.max(16) } else { size })
}
