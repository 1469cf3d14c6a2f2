//! What a run says of its routing, and the comparison with the second implementation.

use marlinspike::Result;
use marlinspike::case::ScoringFunc;
use marlinspike::moe::families::{Differences, Renormalize, RouterTensors, RoutingRule, Score};
use marlinspike::moe::router::{Router, Routing as Made};
use serde_json::json;

/// How tokens found their experts.
pub(super) struct RoutingReport {
    /// Whose rule it is.
    pub(super) source: String,
    pub(super) rule: RoutingRule,
    /// Against the second implementation, where it was asked for.
    pub(super) differences: Option<Differences>,
}

impl RoutingReport {
    /// The report of `logits`, rows of some experts; `made` is compared with the second
    /// implementation where it is given.
    ///
    /// # Errors
    /// As [`RoutingRule::compare`].
    pub(super) fn new(
        source: String,
        rule: RoutingRule,
        tensors: RouterTensors<'_>,
        (logits, experts): (&[f32], usize),
        made: Option<Made>,
    ) -> Result<Self> {
        let compare =
            |m: Made| rule.compare(logits, experts, tensors, (&m.topk_ids, &m.topk_weights));
        let differences = made.map(compare).transpose()?;
        Ok(Self { source, rule, differences })
    }

    pub(super) fn json(&self) -> serde_json::Value {
        let check = self.differences.as_ref().map(|d| {
            let first = d.ids.first().or(d.weights.first()).map(|(_, text)| text);
            json!({"ids": d.ids.len(), "weights": d.weights.len(), "first": first})
        });
        json!({"source": self.source, "rule": self.rule.to_json(), "check": check})
    }

    pub(super) fn line(&self) -> Option<String> {
        let d = self.differences.as_ref()?;
        Some(match d.ids.first().or(d.weights.first()) {
            None => "routing equal to its definition in f64, within f32's rounding".to_owned(),
            Some((_, first)) => format!(
                "ROUTING DIFFERENT: {} ids, {} weights; {first}",
                d.ids.len(),
                d.weights.len()
            ),
        })
    }
}

/// The rule of a router without groups, bias or factor, which is all that the int4 path has.
pub(super) fn plain_rule(router: &Router<'_>) -> RoutingRule {
    let renormalize = if router.renormalize { Renormalize::SUM } else { Renormalize::Never };
    let scoring_func = match router.scoring_func {
        ScoringFunc::Sigmoid => Score::Sigmoid,
        _ => Score::Softmax,
    };
    RoutingRule { scoring_func, ..RoutingRule::softmax(router.top_k, renormalize) }
}
