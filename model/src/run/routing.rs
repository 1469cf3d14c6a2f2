//! A run's report on its routing, and the comparison with the second implementation.

use marlinspike::Result;
use marlinspike::case::ScoringFunc;
use marlinspike::moe::families::{
    Differences, Renormalize, RouterTensors, RoutingRule, Score, Tokens,
};
use marlinspike::moe::router::{Router, Routing as Made};
use marlinspike::num::array::rows_of;

/// How tokens were routed.
#[derive(Debug)]
#[non_exhaustive]
pub struct RoutingReport {
    /// The source of the rule.
    pub source: String,
    /// The rule.
    pub rule: RoutingRule,
    /// Differences from the second implementation, if the comparison was requested.
    pub differences: Option<Differences>,
}

impl RoutingReport {
    /// The report of `logits`, rows of some experts; `made` is compared with the second
    /// implementation where it is given.
    ///
    /// # Errors
    /// As [`RoutingRule::compare_tokens`].
    pub(super) fn new(
        source: String,
        rule: RoutingRule,
        (tensors, tokens): (RouterTensors<'_>, Tokens<'_>),
        (logits, experts): (&[f32], usize),
        made: Option<Made>,
    ) -> Result<Self> {
        let logits = rows_of("router_logits", logits, experts)?;
        let compare = |m: Made| rule.compare_tokens(logits, tensors, tokens, m.routed()?);
        let differences = made.map(compare).transpose()?;
        Ok(Self { source, rule, differences })
    }
}

/// The rule of a router of upstream's int4 method, which has no groups, bias or factor.
pub(super) fn plain_rule(router: &Router<'_>) -> RoutingRule {
    let renormalize = if router.renormalize { Renormalize::SUM } else { Renormalize::Never };
    let scoring_func = match router.scoring_func {
        ScoringFunc::Sigmoid => Score::Sigmoid,
        _ => Score::Softmax,
    };
    RoutingRule { scoring_func, ..RoutingRule::softmax(router.top_k, renormalize) }
}
