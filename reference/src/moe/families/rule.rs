//! The routing of one layer with every parameter resolved.

use ndarray::ArrayView2;

use serde::{Deserialize, Serialize};

use crate::moe::ScoringFunc;
use crate::moe::activation::Activation;
use crate::moe::activation::{Columns, Definition};
use crate::moe::router::Router;
use crate::num::array::row_major;
use crate::{Error, Result};

/// Logits to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Score {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// √softplus(x) of each logit.
    SqrtSoftplus,
    /// Phi-3.5-MoE: two softmaxes, each over the experts within a threshold of the best one.
    SparseMixer,
}

impl Score {
    /// The name in configs and routing files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Softmax => "softmax",
            Self::Sigmoid => "sigmoid",
            Self::SqrtSoftplus => "sqrtsoftplus",
            Self::SparseMixer => "sparsemixer",
        }
    }
}

/// The selection value of experts before the correction bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChooseBy {
    /// The score.
    #[default]
    Score,
    /// The logit.
    Logit,
}

/// The score of a group of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// The sum of its two best experts (DeepSeek-V3).
    #[default]
    TopTwo,
    /// Its best expert (DeepSeek-V2).
    Max,
}

/// The selection value of experts in discarded groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Masked {
    /// −∞: they cannot be chosen.
    #[default]
    Excluded,
    /// Zero: they can be chosen before experts with a negative value.
    Zero,
}

/// What a class of the router after the last expert does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ZeroExpert {
    /// It adds weight · x (LongCat).
    #[default]
    Identity,
    /// It adds nothing: the token's entry is id 0 with weight 0 (Zaya).
    Skip,
}

/// Groups of consecutive experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupRule {
    /// Number of groups.
    pub n_group: usize,
    /// Groups kept.
    pub topk_group: usize,
    /// How groups are compared.
    #[serde(default)]
    pub group_score: GroupScore,
    /// Treatment of the other groups.
    #[serde(default)]
    pub masked: Masked,
}

/// The divisor of the chosen weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Renormalize {
    /// No division.
    Never,
    /// Their sum plus a constant.
    SumPlus(f32),
    /// The larger of their sum and a floor.
    SumAtLeast(f32),
    /// Their p-norm.
    Norm(f32),
}

impl Renormalize {
    /// Division by the plain sum.
    pub const SUM: Self = Self::SumPlus(0.0);
}

/// Routing of one layer, and the activation between its products.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutingRule {
    /// Logits to scores.
    pub scoring_func: Score,
    /// Experts per token.
    pub top_k: usize,
    /// The selection value before the bias.
    pub choose_by: ChooseBy,
    /// Set if groups are selected before experts.
    pub groups: Option<GroupRule>,
    /// The divisor of the chosen weights.
    pub renormalize: Renormalize,
    /// Factor on the weights, after renormalizing; a factor on the experts' sum is folded in.
    pub routed_scaling_factor: f32,
    /// Threshold of [`Score::SparseMixer`]: `router_jitter_noise`.
    pub jitter: f32,
    /// Tensor added to the scores (or logits) for selection only, relative to the parent of the
    /// module `experts`; each leading `../` moves up one module.
    pub correction_bias: Option<String>,
    /// Tensor of a factor on each expert's weight, named as the bias is.
    pub expert_scale: Option<String>,
    /// Classes of the router after the last expert, without matrices.
    pub zero_experts: usize,
    /// What those classes do.
    pub zero_expert_type: ZeroExpert,
    /// Shared experts with logits of their own: always chosen, and part of the sum that divides the
    /// weights.
    pub shared_experts: usize,
    /// Table of expert ids `[vocabulary, top_k]`, named as the bias is: the token's id chooses the
    /// experts, the scores give the weights.
    pub token_table: Option<String>,
    /// Groups of experts with a router each; a token's type chooses its group. Logits and ids count
    /// within the group.
    pub token_groups: usize,
    /// Whether weights multiply the expert's input instead of its output.
    pub apply_router_weight_on_input: bool,
    /// Function between the products, by upstream's name.
    pub activation: Activation,
    /// Limit of gate and up, at its position in [`RoutingRule::activation`].
    pub swiglu_limit: Option<f32>,
    /// Factor inside the sigmoid of `swigluoai`.
    pub swiglu_alpha: Option<f32>,
}

/// The parameters of [`RoutingRule::route`] that are tensors of the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RouterTensors<'t> {
    /// `[experts + zero experts]`.
    pub correction_bias: Option<&'t [f32]>,
    /// `[experts]`, or `[1]` for all weights.
    pub expert_scale: Option<&'t [f32]>,
}

impl RoutingRule {
    /// Softmax over all experts, `top_k` and SiLU; nothing else is set.
    pub const fn softmax(top_k: usize, renormalize: Renormalize) -> Self {
        Self {
            scoring_func: Score::Softmax,
            top_k,
            choose_by: ChooseBy::Score,
            groups: None,
            renormalize,
            routed_scaling_factor: 1.0,
            jitter: 0.01,
            correction_bias: None,
            expert_scale: None,
            zero_experts: 0,
            zero_expert_type: ZeroExpert::Identity,
            shared_experts: 0,
            token_table: None,
            token_groups: 1,
            apply_router_weight_on_input: false,
            activation: Activation::Silu,
            swiglu_limit: None,
            swiglu_alpha: None,
        }
    }

    /// The equivalent router of [`crate::moe::router`], if there is one.
    pub fn plain(&self) -> Option<Router<'static>> {
        let scoring_func = match self.scoring_func {
            Score::Softmax => ScoringFunc::Softmax,
            Score::Sigmoid => ScoringFunc::Sigmoid,
            _ => return None,
        };
        let renormalize = match self.renormalize {
            Renormalize::Never => false,
            Renormalize::SumPlus(0.0) => true,
            // The chosen weights of a softmax sum to at least 1 / experts, so rounding drops the
            // constant.
            Renormalize::SumPlus(e) | Renormalize::SumAtLeast(e)
                if e <= 1e-12 && scoring_func == ScoringFunc::Softmax =>
            {
                true
            }
            _ => return None,
        };
        let same = self.choose_by == ChooseBy::Score
            && self.groups.is_none()
            && self.correction_bias.is_none()
            && self.expert_scale.is_none()
            && self.zero_experts == 0
            && self.shared_experts == 0
            && self.token_table.is_none()
            && self.token_groups == 1
            && self.routed_scaling_factor == 1.0;
        same.then(|| Router::new(scoring_func, self.top_k, renormalize))
    }

    /// The activation between the products; `interleaved` states whether rows of gate and up
    /// alternate in the stored w13.
    ///
    /// # Errors
    /// [`Error::Size`] for a limit or factor out of range.
    pub fn activation(&self, interleaved: bool) -> Result<Definition> {
        let mut definition = Definition::new(self.activation);
        if let Some(limit) = self.swiglu_limit {
            definition = definition.with_limit(limit);
        }
        if let Some(alpha) = self.swiglu_alpha {
            definition.alpha = alpha;
        }
        if definition.columns != Columns::Gate {
            definition.columns = if interleaved { Columns::Interleaved } else { Columns::Halves };
        }
        definition.validate()?;
        Ok(definition)
    }

    /// Checks that sizes, numbers and tensors fit `logits` `[M, experts]` (zero experts included).
    ///
    /// # Errors
    /// [`Error::Size`] for sizes and numbers; [`Error::Shape`] and [`Error::Value`] for logits and
    /// tensors.
    pub fn validate(&self, logits: ArrayView2<'_, f32>, tensors: RouterTensors<'_>) -> Result<()> {
        let (experts, logits) = (logits.ncols(), row_major(logits));
        let size = |what: &str, found: usize, rule: String| Err(Error::size(what, found, rule));
        if experts == 0 || self.top_k == 0 || self.top_k > experts {
            return size("top_k", self.top_k, format!("1 to the number of experts, {experts}"));
        }
        if i32::try_from(experts).is_err() || !logits.len().is_multiple_of(experts) {
            let rule = format!("rows of {experts} experts");
            return Err(Error::shape("router_logits", &[logits.len()], rule));
        }
        if self.scoring_func == Score::SparseMixer && self.top_k != 2 {
            return size("top_k", self.top_k, "2, since sparsemixer chooses two".to_owned());
        }
        if let Some(g) = self.groups {
            let n = g.n_group;
            if n == 0 || !experts.is_multiple_of(n) {
                return size("n_group", n, format!("a divisor of {experts} experts"));
            }
            if g.topk_group == 0 || g.topk_group > n {
                return size("topk_group", g.topk_group, format!("1 to {n}"));
            }
            if g.group_score == GroupScore::TopTwo && experts / n < 2 {
                return size("n_group", n, "groups of 2 experts or more".to_owned());
            }
            let reachable = g.topk_group * (experts / n);
            if self.top_k > reachable {
                return size("top_k", self.top_k, format!("the {reachable} experts of the groups"));
            }
        }
        self.in_range()?;
        if let Some(i) = logits.iter().position(|x| !x.is_finite()) {
            let at = [i / experts, i % experts];
            return Err(Error::value("router_logits", &at, logits[i], "a finite number"));
        }
        let Some(matrices) = experts.checked_sub(self.zero_experts).filter(|&n| n > 0) else {
            return size("zero_experts", self.zero_experts, format!("below {experts} experts"));
        };
        let g = self.token_groups;
        let stated = [
            ("correction_bias", &self.correction_bias, tensors.correction_bias, g * experts),
            ("expert_scale", &self.expert_scale, tensors.expert_scale, g * matrices),
        ];
        for (what, name, found, len) in stated {
            let (name, values) = match (name, found) {
                (None, None) => continue,
                (Some(name), Some(values)) => (name, values),
                (Some(name), None) => return Err(Error::missing(name, what)),
                (None, Some(_)) => return Err(Error::unsupported(what, "the rule has none")),
            };
            let for_all = what == "expert_scale" && values.len() == 1;
            if values.len() != len && !for_all {
                return Err(Error::shape(name, &[values.len()], format!("[{len}]")));
            }
            if let Some(i) = values.iter().position(|x| !x.is_finite()) {
                return Err(Error::value(name, &[i], values[i], "a finite number"));
            }
        }
        Ok(())
    }

    /// Checks that the rule's numbers are finite and not negative.
    pub(super) fn in_range(&self) -> Result<()> {
        let divisor = match self.renormalize {
            Renormalize::Never => 0.0,
            Renormalize::SumPlus(x) | Renormalize::SumAtLeast(x) | Renormalize::Norm(x) => x,
        };
        let numbers = [
            ("routed_scaling_factor", self.routed_scaling_factor),
            ("renormalize", divisor),
            ("router_jitter_noise", self.jitter),
        ];
        for (what, found) in numbers {
            if !found.is_finite() || found < 0.0 {
                return Err(Error::size(what, found, "a finite number that is not negative"));
            }
        }
        let scores = self.scoring_func;
        if scores == Score::SparseMixer && (self.groups.is_some() || self.correction_bias.is_some())
        {
            let reason = "sparsemixer chooses two experts by their logits";
            return Err(Error::unsupported("sparsemixer with groups or a correction bias", reason));
        }
        self.tokens_in_range()
    }
}
