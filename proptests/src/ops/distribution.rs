//! Distributions of tokens over experts.

use marlinspike::vectors::Rng;
use proptest::prelude::*;

use super::one_of;

/// A distribution of tokens over experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Distribution {
    /// Every token goes to the same experts.
    One,
    /// Tokens take turns, so each expert has about the same number.
    Turns,
    /// Any experts, each once for a token.
    Random,
    /// Half of the tokens to the same expert, the rest anywhere.
    Skewed,
    /// As random, but a quarter of the entries have no expert (−1).
    Gaps,
    /// No entry has an expert.
    None,
}

impl Distribution {
    pub(crate) fn any() -> impl Strategy<Value = Self> {
        one_of(&[Self::One, Self::Turns, Self::Random, Self::Skewed, Self::Gaps, Self::None])
    }

    /// `[tokens, top_k]` ids below `experts`, −1 for none; slots beyond the experts are −1.
    pub fn topk_ids(self, rng: &mut Rng, tokens: usize, top_k: usize, experts: usize) -> Vec<i32> {
        let mut order: Vec<i32> = (0..experts as i32).collect();
        rng.shuffle(&mut order);
        let mut ids = Vec::with_capacity(tokens * top_k);
        for token in 0..tokens {
            match self {
                Self::One | Self::None => {}
                Self::Turns => order.rotate_left(usize::from(token > 0)),
                Self::Skewed if token % 2 == 0 => {
                    if let Some(at) = order.iter().position(|&e| e == 0) {
                        order.swap(0, at);
                    }
                }
                Self::Random | Self::Skewed | Self::Gaps => rng.shuffle(&mut order),
            }
            ids.extend((0..top_k).map(|slot| order.get(slot).copied().unwrap_or(-1)));
        }
        match self {
            Self::None => ids.fill(-1),
            Self::Gaps => ids.iter_mut().for_each(|id| {
                if rng.chance(1, 4) {
                    *id = -1;
                }
            }),
            _ => {}
        }
        ids
    }
}
