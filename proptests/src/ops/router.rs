//! Router logits to experts and their weights.

use marlinspike::Result;
use marlinspike::case::ScoringFunc;
use marlinspike::moe::router::{Groups, Router};
use marlinspike::num::scalar::ScalarType;
use marlinspike::vectors::Rng;
use proptest::prelude::*;

use super::one_of;
use crate::Operation;

/// `topk_softmax`, `topk_sigmoid` and `grouped_topk`; the output is `topk_ids` and then the bits of
/// `topk_weights`.
#[derive(Debug)]
pub struct TopkRouter;

/// Arguments of [`TopkRouter`].
#[derive(Debug, Clone)]
pub struct RouterInput {
    /// `[M, experts]`, finite numbers of `logits_type`.
    pub logits: Vec<f32>,
    /// Number of experts.
    pub experts: usize,
    /// Logits to scores.
    pub scoring_func: ScoringFunc,
    /// Experts per token.
    pub top_k: usize,
    /// Whether the chosen weights are divided by their sum.
    pub renormalize: bool,
    /// Groups of experts, and how many of them are kept.
    pub groups: Option<Groups>,
    /// Factor on the weights.
    pub routed_scaling_factor: f32,
    /// `[experts]`: added to the scores for the selection only.
    pub bias: Option<Vec<f32>>,
    /// float32, float16 or bfloat16.
    pub logits_type: ScalarType,
}

impl RouterInput {
    /// The router of these arguments.
    pub fn router(&self) -> Router<'_> {
        Router {
            groups: self.groups,
            routed_scaling_factor: self.routed_scaling_factor,
            bias: self.bias.as_deref(),
            logits_type: self.logits_type,
            ..Router::new(self.scoring_func, self.top_k, self.renormalize)
        }
    }

    /// Entries of `topk_ids`.
    fn entries(&self) -> usize {
        self.logits.len() / self.experts * self.top_k
    }
}

/// Experts, experts per token, groups and how many are kept of them.
type Sizes = (usize, usize, Option<(usize, usize)>);

const SIZES: &[Sizes] = &[
    (1, 1, None),
    (3, 3, None),
    (8, 2, None),
    (31, 4, None),
    (64, 6, Some((1, 1))),
    (128, 8, None),
    (129, 2, None),
    (256, 8, Some((8, 4))),
    (300, 1, None),
];

impl Operation for TopkRouter {
    const NAME: &'static str = "topk_router";
    type Input = RouterInput;
    type Element = u32;

    fn inputs() -> BoxedStrategy<RouterInput> {
        let types = [ScalarType::FLOAT32, ScalarType::FLOAT16, ScalarType::BFLOAT16];
        let kinds = (any::<bool>(), any::<bool>(), 0usize..3, any::<bool>(), 0u32..4);
        (1usize..20, one_of(SIZES), kinds, any::<u64>())
            .prop_map(move |(rows, (experts, top_k, groups), kinds, seed)| {
                let (sigmoid, renormalize, ty, has_bias, kind) = kinds;
                let (mut rng, logits_type) = (Rng::new(seed), types[ty]);
                let mut number = |spread: f64| {
                    let x = (rng.next_u32() as f64 / 2f64.powi(31) - 1.0) * spread;
                    // Kind 0: integers, which give ties that the lower id decides.
                    let x = if kind == 0 { x.round() } else { x };
                    logits_type.to_f64(logits_type.encode_rne(x)) as f32
                };
                let spread = [3.0, 1.0, 20.0, 300.0][kind as usize];
                let logits = (0..rows * experts).map(|_| number(spread)).collect();
                let bias = has_bias.then(|| (0..experts).map(|_| number(1.0)).collect());
                let groups = groups
                    .map(|(num_expert_group, topk_group)| Groups { num_expert_group, topk_group });
                RouterInput {
                    logits,
                    experts,
                    scoring_func: if sigmoid { ScoringFunc::Sigmoid } else { ScoringFunc::Softmax },
                    top_k,
                    renormalize,
                    groups,
                    routed_scaling_factor: if kind == 1 { 2.5 } else { 1.0 },
                    bias,
                    logits_type,
                }
            })
            .boxed()
    }

    fn expected(i: &RouterInput) -> Result<Vec<u32>> {
        let routing = i.router().route(&i.logits, i.experts)?;
        let ids = routing.topk_ids.iter().map(|id| id.cast_unsigned());
        Ok(ids.chain(routing.topk_weights.iter().map(|w| w.to_bits())).collect())
    }

    fn len(i: &RouterInput) -> Result<usize> {
        Ok(2 * i.entries())
    }

    fn place(i: &RouterInput, element: usize, _bit: u32) -> String {
        let (what, entry) = match element.checked_sub(i.entries()) {
            None => ("id", element),
            Some(entry) => ("weight", entry),
        };
        format!("{what} of token {} slot {}", entry / i.top_k, entry % i.top_k)
    }

    fn describe(i: &RouterInput) -> String {
        let RouterInput { experts, top_k, renormalize, groups, logits_type, .. } = i;
        format!(
            "{} {logits_type} [{}, {experts}] top_k {top_k} renormalize {renormalize} {groups:?} bias \
             {} factor {}",
            i.scoring_func,
            i.logits.len() / experts,
            i.bias.is_some(),
            i.routed_scaling_factor
        )
    }
}
