//! The router of a layer of experts: upstream's, or a model family's rule with its tensors.

use ndarray::{Array2, ArrayView2};

use crate::moe::activation::Definition;
use crate::moe::families::{RouterTensors, RoutingRule};
use crate::moe::router::{Router, Routing};
use crate::{Error, Result};

/// A family's routing rule and the tensors that it names, for a number of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct FamilyRouting {
    rule: RoutingRule,
    correction_bias: Option<Vec<f32>>,
    expert_scale: Option<Vec<f32>>,
    activation: Definition,
}

impl FamilyRouting {
    /// `rule` for layers of `num_experts` experts. `correction_bias` and `expert_scale` are
    /// `[num_experts]`, present exactly if the rule names them. Gate and up are halves of w13.
    ///
    /// # Errors
    /// As [`RoutingRule::validate`] and [`RoutingRule::activation`]; [`Error::Unsupported`] for zero
    /// experts and for activations without up.
    pub fn new(
        rule: RoutingRule,
        num_experts: usize,
        correction_bias: Option<Vec<f32>>,
        expert_scale: Option<Vec<f32>>,
    ) -> Result<Self> {
        if rule.zero_experts > 0 {
            let what = format!("a layer with {} zero experts", rule.zero_experts);
            return Err(Error::unsupported(what, "their part of the output is not computed"));
        }
        if let Some(what) = rule.token_input() {
            return Err(Error::unsupported(what, "the layer's inputs have no such tensor"));
        }
        let activation = rule.activation(false)?;
        if !activation.is_gated() {
            let what = format!("activation {}", rule.activation);
            return Err(Error::unsupported(what, "w13 has no up; expected an activation with one"));
        }
        let found = Self { rule, correction_bias, expert_scale, activation };
        found.validate(Array2::zeros((0, num_experts)).view())?;
        Ok(found)
    }

    /// The rule.
    pub fn rule(&self) -> &RoutingRule {
        &self.rule
    }

    /// The tensors that the rule names.
    pub fn tensors(&self) -> RouterTensors<'_> {
        RouterTensors {
            correction_bias: self.correction_bias.as_deref(),
            expert_scale: self.expert_scale.as_deref(),
        }
    }

    /// The activation between the products, of halves.
    pub fn activation(&self) -> Definition {
        self.activation
    }

    fn validate(&self, logits: ArrayView2<'_, f32>) -> Result<()> {
        self.rule.validate(logits, self.tensors())
    }
}

/// How a layer routes logits to experts.
#[derive(Debug, Clone, PartialEq)]
pub enum LayerRouter<'a> {
    /// Upstream's router.
    Operator(Router<'a>),
    /// A family's rule.
    Family(Box<FamilyRouting>),
}

impl<'a> From<Router<'a>> for LayerRouter<'a> {
    fn from(router: Router<'a>) -> Self {
        Self::Operator(router)
    }
}

impl From<FamilyRouting> for LayerRouter<'_> {
    fn from(routing: FamilyRouting) -> Self {
        Self::Family(Box::new(routing))
    }
}

impl LayerRouter<'_> {
    /// Experts per token.
    pub fn top_k(&self) -> usize {
        match self {
            Self::Operator(router) => router.top_k,
            Self::Family(routing) => routing.rule.top_k,
        }
    }

    /// Checks sizes, tensors and `logits` `[M, experts]`.
    ///
    /// # Errors
    /// As [`Router::validate`] and [`RoutingRule::validate`].
    pub fn validate(&self, logits: ArrayView2<'_, f32>) -> Result<()> {
        match self {
            Self::Operator(router) => router.validate(logits),
            Self::Family(routing) => routing.validate(logits),
        }
    }

    /// Ids and weights of every row of `logits` `[M, experts]`.
    ///
    /// # Errors
    /// As [`LayerRouter::validate`].
    pub fn route(&self, logits: ArrayView2<'_, f32>) -> Result<Routing> {
        match self {
            Self::Operator(router) => router.route(logits),
            Self::Family(routing) => routing.rule.route(logits, routing.tensors()),
        }
    }
}
