//! The routing of a whole block's tokens.

use marlinspike::moe::block::Near;
use marlinspike::{Error, Result};

use super::routes::{Floats, Routes};
use super::tokens::{TokenInputs, TokenNeeds};
use super::whole::WholeBlock;
use crate::run::error::RunError;
use crate::run::input::{Inputs, Routing};
use crate::run::options::Source;
use crate::run::routing::RoutingReport;

impl WholeBlock {
    /// What the routing of `inputs` takes from the tokens.
    pub(super) fn tokens(
        &self,
        source: &Source,
        inputs: &Inputs<Floats>,
    ) -> std::result::Result<TokenInputs, RunError> {
        let by_logits = matches!(inputs.routing, Routing::Logits(_));
        let needs = TokenNeeds {
            tokens: inputs.x.values.len() / self.hidden,
            table: self.table.as_ref().filter(|_| by_logits),
            groups: self.routing.rule.token_groups,
        };
        let made = TokenInputs::new(source, needs)?;
        let (count, router) = (self.routing.rule.shared_experts, &self.surrounding.router);
        match router.as_ref().filter(|_| count > 0) {
            None => Ok(made),
            Some(router) => {
                let logits = router.shared_logits(&inputs.x.values, inputs.x.ty, count)?;
                Ok(made.with_shared(&logits))
            }
        }
    }

    /// Ids and weights of the inputs, routed from logits if they have those.
    pub(super) fn routes(
        &self,
        x: &Floats,
        routing: &Routing,
        tokens: &TokenInputs,
    ) -> Result<Routes> {
        let (top_k, mut ids, weights) = self.routed(routing, tokens)?;
        let shared = self.shared_weights(x, routing, (top_k, &ids), tokens)?;
        let group = self.experts.count / self.routing.rule.token_groups;
        for (slot, id) in ids.iter_mut().enumerate() {
            *id += tokens.groups.as_ref().map_or(0, |g| (g[slot / top_k] * group) as i32);
        }
        Ok(Routes { top_k, ids, weights, shared })
    }

    /// Weights of the shared experts for the chosen ids, if the router gives them.
    fn shared_weights(
        &self,
        x: &Floats,
        routing: &Routing,
        (top_k, ids): (usize, &[i32]),
        tokens: &TokenInputs,
    ) -> Result<Option<Vec<Near>>> {
        let rule = &self.routing.rule;
        let Some(router) = self.surrounding.router.as_ref().filter(|_| rule.shared_experts > 0)
        else {
            return Ok(None);
        };
        let logits = match routing {
            Routing::Logits(logits) => logits.clone(),
            Routing::Given { .. } => router.logits(&x.values, x.ty, tokens.groups.as_deref()),
        };
        let rows = logits.chunks_exact(self.scores).zip(ids.chunks_exact(top_k)).enumerate();
        let of = |(t, (row, ids)): (usize, (&[f32], &[i32]))| {
            let ids: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
            let all =
                rule.define_shared_weights(row, &ids, self.routing.tensors(), (tokens.tokens(), t));
            all.into_iter().map(|(exact, error)| Near { exact, error })
        };
        Ok(Some(rows.flat_map(of).collect()))
    }

    fn routed(
        &self,
        routing: &Routing,
        tokens: &TokenInputs,
    ) -> Result<(usize, Vec<i32>, Vec<f32>)> {
        match routing {
            Routing::Given { top_k, ids, weights } => {
                let known = |id: &i32| usize::try_from(*id).is_ok_and(|id| id < self.scores);
                if let Some(i) = ids.iter().position(|id| !known(id)) {
                    let at = [i / top_k, i % top_k];
                    let rule = format!("an expert below {}", self.scores);
                    return Err(Error::value("topk_ids", &at, ids[i], rule));
                }
                Ok((*top_k, ids.clone(), weights.clone()))
            }
            Routing::Logits(logits) => {
                let made = self.routing.route_tokens(logits, self.scores, tokens.tokens())?;
                let made = made.routed()?;
                Ok((made.topk_ids().ncols(), made.ids().to_vec(), made.weights().to_vec()))
            }
        }
    }

    /// The report on the routing of logits; with `check`, compared with a second implementation.
    pub(super) fn report(
        &self,
        routing: &Routing,
        tokens: &TokenInputs,
        check: bool,
    ) -> Result<Option<RoutingReport>> {
        let Routing::Logits(logits) = routing else { return Ok(None) };
        let r = &self.routing;
        let route = || r.route_tokens(logits, self.scores, tokens.tokens());
        let made = check.then(route).transpose()?;
        let (given, rule) = ((&logits[..], self.scores), r.rule.clone());
        let own = (r.tensors(), tokens.tokens());
        RoutingReport::new(r.source.clone(), rule, own, given, made).map(Some)
    }
}
