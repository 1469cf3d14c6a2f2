//! The experts of each call.

use marlinspike::vectors::Rng;

/// Experts of every token of one call.
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    /// Expert ids, `[T, top_k]`.
    pub topk_ids: Vec<i32>,
    /// Router weights, `[T, top_k]`; a token's sum to 1.
    pub topk_weights: Vec<f32>,
    /// Experts that at least one token uses.
    pub distinct: usize,
}

/// The routings that calls alternate between. With one token, enough of them to visit all experts in
/// order, so that an expert's weights have left the caches before it is used again. With more tokens,
/// four routings of uniformly drawn experts.
pub fn routings(num_experts: usize, top_k: usize, tokens: usize, seed: u64) -> Vec<Routing> {
    let mut rng = Rng::new(seed);
    let calls = if tokens == 1 { num_experts.div_ceil(top_k) } else { 4 };
    let call = |call| {
        let mut topk_ids = Vec::with_capacity(tokens * top_k);
        for _ in 0..tokens {
            if tokens == 1 {
                topk_ids.extend((0..top_k).map(|j| ((call * top_k + j) % num_experts) as i32));
                continue;
            }
            // The first steps of a shuffle.
            let mut experts: Vec<i32> = (0..num_experts as i32).collect();
            for j in 0..top_k {
                let other = j + rng.below(num_experts - j);
                experts.swap(j, other);
            }
            topk_ids.extend(&experts[..top_k]);
        }
        let mut taken = vec![false; num_experts];
        topk_ids.iter().for_each(|&e| taken[e as usize] = true);
        Routing {
            topk_weights: vec![1.0 / top_k as f32; tokens * top_k],
            topk_ids,
            distinct: taken.iter().filter(|&&taken| taken).count(),
        }
    };
    (0..calls).map(call).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_tokens_go_through_every_expert() {
        let calls = routings(8, 3, 1, 1);
        assert_eq!(calls.len(), 3);
        assert_eq!(calls[0].topk_ids, [0, 1, 2]);
        assert_eq!(calls[2].topk_ids, [6, 7, 0]);
        assert!(calls.iter().all(|c| c.distinct == 3));
    }

    #[test]
    fn a_token_takes_different_experts() {
        let calls = routings(16, 5, 40, 7);
        assert_eq!(calls.len(), 4);
        for call in &calls {
            for ids in call.topk_ids.chunks(5) {
                let set: std::collections::BTreeSet<_> = ids.iter().collect();
                assert!(set.len() == 5 && ids.iter().all(|&e| (0..16).contains(&e)), "{ids:?}");
            }
            let all: std::collections::BTreeSet<_> = call.topk_ids.iter().collect();
            assert_eq!(call.distinct, all.len());
        }
        assert_ne!(calls[0], calls[1]);
    }
}
