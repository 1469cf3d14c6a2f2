//! What the routing of a token depends on besides its logits.

use super::rule::{RoutingRule, Score};
use crate::{Error, Result};

/// Parameters of [`RoutingRule::route_tokens`] that belong to the tokens of a batch. Rules without
/// [`RoutingRule::token_table`], shared experts and token groups need none of them.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Tokens<'t> {
    /// `[M, top_k]`: rows of [`RoutingRule::token_table`] at the ids of the tokens.
    pub experts: Option<&'t [i32]>,
    /// `[M]`: the group of experts that each token belongs to.
    pub groups: Option<&'t [usize]>,
    /// `[M, shared_experts]`: logits of the shared experts.
    pub shared_logits: Option<&'t [f64]>,
    /// `[M, shared_experts]`: the largest error of each of them.
    pub shared_errors: Option<&'t [f64]>,
}

impl<'t> Tokens<'t> {
    /// The parameters of token `t` alone.
    pub(super) fn of(self, rule: &RoutingRule, t: usize) -> Self {
        let shared = t * rule.shared_experts..(t + 1) * rule.shared_experts;
        Self {
            experts: self.experts.map(|all| &all[t * rule.top_k..(t + 1) * rule.top_k]),
            groups: self.groups.map(|all| &all[t..=t]),
            shared_logits: self.shared_logits.map(|all| &all[shared.clone()]),
            shared_errors: self.shared_errors.map(|all| &all[shared]),
        }
    }

    /// This token's part of a tensor that has an entry for each expert of each group.
    pub(super) fn part<'v>(self, rule: &RoutingRule, values: &'v [f32]) -> &'v [f32] {
        let own = values.len() / rule.token_groups.max(1);
        let group = self.groups.map_or(0, |g| g[0]);
        &values[group * own..(group + 1) * own]
    }

    /// Checks that `rows` tokens over `experts` experts have what the rule needs, and nothing else.
    pub(super) fn validate(self, rule: &RoutingRule, rows: usize, experts: usize) -> Result<()> {
        let lengths = [
            ("token_table", rule.token_table.is_some(), self.experts.map(<[_]>::len), rule.top_k),
            ("token_types", rule.token_groups > 1, self.groups.map(<[_]>::len), 1),
            (
                "shared_logits",
                rule.shared_experts > 0,
                self.shared_logits.map(<[_]>::len),
                rule.shared_experts,
            ),
        ];
        for (name, needed, found, each) in lengths {
            match found {
                None if needed && rows > 0 => return Err(Error::missing(name, "the routing")),
                Some(_) if !needed => return Err(Error::unsupported(name, "the rule has none")),
                Some(len) if len != rows * each => {
                    return Err(Error::shape(name, &[len], format!("[{rows}, {each}]")));
                }
                _ => {}
            }
        }
        if let Some(errors) = self.shared_errors.filter(|e| e.len() != rows * rule.shared_experts) {
            let expected = format!("[{rows}, {}]", rule.shared_experts);
            return Err(Error::shape("errors of shared_logits", &[errors.len()], expected));
        }
        let shared = self.shared_logits.unwrap_or_default();
        if let Some(i) = shared.iter().position(|x| !x.is_finite()) {
            return Err(Error::value("shared_logits", &[i], shared[i], "a finite number"));
        }
        if let Some(t) = self.groups.and_then(|g| g.iter().position(|&g| g >= rule.token_groups)) {
            let found = self.groups.unwrap_or_default()[t];
            let expected = format!("a group below {}", rule.token_groups);
            return Err(Error::value("token_types", &[t], found, expected));
        }
        for (t, ids) in self.experts.unwrap_or_default().chunks(rule.top_k.max(1)).enumerate() {
            for (j, &id) in ids.iter().enumerate() {
                let known = usize::try_from(id).is_ok_and(|id| id < experts);
                if !known || ids[..j].contains(&id) {
                    let expected = format!("distinct experts below {experts}");
                    return Err(Error::value(
                        "token_table: token and entry",
                        &[t, j],
                        id,
                        expected,
                    ));
                }
            }
        }
        Ok(())
    }
}

impl RoutingRule {
    /// The part of the rule that needs more of a token than its logits.
    pub fn token_input(&self) -> Option<&'static str> {
        match self {
            Self { token_table: Some(_), .. } => Some("a routing by token ids"),
            Self { shared_experts: 1.., .. } => Some("a routing with shared experts"),
            Self { token_groups: 2.., .. } => Some("a routing by the tokens' types"),
            _ => None,
        }
    }

    /// Checks that the parts of the rule that depend on tokens fit the others.
    pub(super) fn tokens_in_range(&self) -> Result<()> {
        if self.token_groups == 0 {
            return Err(Error::size("token_groups", 0, "1 or more"));
        }
        if self.token_groups > 1 && self.zero_experts > 0 {
            let reason = "the classes of a group are its experts";
            return Err(Error::unsupported("token_groups with zero_experts", reason));
        }
        let by_logit = matches!(self.scoring_func, Score::Sigmoid | Score::SqrtSoftplus);
        if self.shared_experts > 0 && !by_logit {
            let reason = "the score of a shared expert depends on its logit alone";
            return Err(Error::unsupported("shared_experts with this scoring function", reason));
        }
        let chooses = self.correction_bias.is_some() || self.groups.is_some();
        if self.token_table.is_some() && (chooses || self.scoring_func == Score::SparseMixer) {
            let reason = "the table chooses the experts";
            return Err(Error::unsupported(
                "token_table with a bias, groups or sparsemixer",
                reason,
            ));
        }
        Ok(())
    }
}
