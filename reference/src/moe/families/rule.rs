//! One layer's routing, with every number resolved, and the definition of its result in f32.

use serde::{Deserialize, Serialize};

use crate::case::{Activation, ScoringFunc};
use crate::moe::activation::{Columns, Definition};
use crate::moe::math;
use crate::moe::router::{self, Router, Routing};
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
    /// Phi-3.5-MoE's two softmaxes, each over the experts within a threshold of the best one.
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

/// What the choice of experts goes by, before the correction bias.
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

/// What experts of a group that is not kept compete with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Masked {
    /// −∞: they cannot be chosen.
    #[default]
    Excluded,
    /// Zero: they can be chosen before experts with a negative value.
    Zero,
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
    /// What happens to the others.
    #[serde(default)]
    pub masked: Masked,
}

/// What the chosen weights are divided by.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Renormalize {
    /// Nothing.
    Never,
    /// Their sum plus a constant.
    SumPlus(f32),
    /// Their sum, or a floor where that is larger.
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
    /// What the choice goes by.
    pub choose_by: ChooseBy,
    /// Present where groups are chosen before experts.
    pub groups: Option<GroupRule>,
    /// What the chosen weights are divided by.
    pub renormalize: Renormalize,
    /// Factor on the weights, after renormalizing; a factor on the experts' sum is folded in.
    pub routed_scaling_factor: f32,
    /// Threshold of [`Score::SparseMixer`]: `router_jitter_noise`.
    pub jitter: f32,
    /// Tensor added to the scores (or logits) for the choice alone, relative to the parent of the
    /// module `experts`; each leading `../` goes one module up.
    pub correction_bias: Option<String>,
    /// Tensor of a factor on each expert's weight, named as the bias is.
    pub expert_scale: Option<String>,
    /// Classes of the router after the last expert: identity, y += weight · x.
    pub zero_experts: usize,
    /// Whether weights multiply the expert's input instead of its output.
    pub apply_router_weight_on_input: bool,
    /// Function between the products, by upstream's name.
    pub activation: Activation,
    /// Limit of gate and up, in the place where [`RoutingRule::activation`] has it.
    pub swiglu_limit: Option<f32>,
    /// Factor inside the sigmoid of `swigluoai`.
    pub swiglu_alpha: Option<f32>,
}

/// The parameters of [`RoutingRule::route`] that are tensors of the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RouterTensors<'t> {
    /// `[experts + zero experts]`.
    pub correction_bias: Option<&'t [f32]>,
    /// `[experts]`.
    pub expert_scale: Option<&'t [f32]>,
}

impl RoutingRule {
    /// Softmax over all experts, `top_k` of them, SiLU; everything else absent.
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
            apply_router_weight_on_input: false,
            activation: Activation::Silu,
            swiglu_limit: None,
            swiglu_alpha: None,
        }
    }

    /// The router of [`crate::moe::router`], where it is the same function.
    pub fn plain(&self) -> Option<Router<'static>> {
        let scoring_func = match self.scoring_func {
            Score::Softmax => ScoringFunc::Softmax,
            Score::Sigmoid => ScoringFunc::Sigmoid,
            _ => return None,
        };
        let renormalize = match self.renormalize {
            Renormalize::Never => false,
            Renormalize::SumPlus(0.0) => true,
            // A softmax's chosen weights sum to at least 1 / experts, so the constant is lost.
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
            && self.routed_scaling_factor == 1.0;
        same.then(|| Router::new(scoring_func, self.top_k, renormalize))
    }

    /// The activation between the products; `interleaved` where rows of gate and up alternate in
    /// the stored w13.
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

    /// Fails unless sizes, numbers and tensors fit `experts` (zero experts included).
    ///
    /// # Errors
    /// [`Error::Size`] for sizes and numbers; [`Error::Shape`] and [`Error::Value`] for logits and
    /// tensors.
    pub fn validate(
        &self,
        logits: &[f32],
        experts: usize,
        tensors: RouterTensors<'_>,
    ) -> Result<()> {
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
        let stated = [
            ("correction_bias", &self.correction_bias, tensors.correction_bias, experts),
            ("expert_scale", &self.expert_scale, tensors.expert_scale, matrices),
        ];
        for (what, name, found, len) in stated {
            let (name, values) = match (name, found) {
                (None, None) => continue,
                (Some(name), Some(values)) => (name, values),
                (Some(name), None) => return Err(Error::missing(name, what)),
                (None, Some(_)) => return Err(Error::unsupported(what, "the rule has none")),
            };
            if values.len() != len {
                return Err(Error::shape(name, &[values.len()], format!("[{len}]")));
            }
            if let Some(i) = values.iter().position(|x| !x.is_finite()) {
                return Err(Error::value(name, &[i], values[i], "a finite number"));
            }
        }
        Ok(())
    }

    /// Fails unless the rule's numbers are finite and not negative.
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
        Ok(())
    }

    /// Routes every row of `logits`, row-major `[M, experts]`, `experts` with the zero experts.
    /// Of equal experts the lower id comes first.
    ///
    /// # Errors
    /// As [`RoutingRule::validate`].
    pub fn route(
        &self,
        logits: &[f32],
        experts: usize,
        tensors: RouterTensors<'_>,
    ) -> Result<Routing> {
        self.validate(logits, experts, tensors)?;
        let rows = logits.len() / experts;
        let mut topk_ids = Vec::with_capacity(rows * self.top_k);
        let mut topk_weights = Vec::with_capacity(rows * self.top_k);
        for row in logits.chunks_exact(experts) {
            let (ids, mut weights) = match self.scoring_func {
                Score::SparseMixer => sparse_mixer(row, self.jitter),
                _ => self.best(row, tensors.correction_bias),
            };
            self.finish(&mut weights);
            for (w, &id) in weights.iter_mut().zip(&ids) {
                // A zero expert has no factor of its own.
                *w *= tensors.expert_scale.and_then(|s| s.get(id)).copied().unwrap_or(1.0);
            }
            topk_ids.extend(ids.iter().map(|&id| id as i32));
            topk_weights.extend(weights);
        }
        let token_expert_indices = router::token_expert_indices(rows, self.top_k);
        Ok(Routing { topk_weights, topk_ids, token_expert_indices })
    }

    /// Scores of one token. Softmax: eᵢ = exp(xᵢ − max), added from the first expert on, times 1/Σ.
    fn scores(&self, row: &[f32]) -> Vec<f32> {
        match self.scoring_func {
            Score::Sigmoid => row.iter().map(|&x| math::sigmoid(x)).collect(),
            Score::SqrtSoftplus => row.iter().map(|&x| sqrt_softplus(x)).collect(),
            _ => softmax(row),
        }
    }

    /// The best experts of one token and their scores.
    fn best(&self, row: &[f32], bias: Option<&[f32]>) -> (Vec<usize>, Vec<f32>) {
        let scores = self.scores(row);
        let mut choice = match self.choose_by {
            ChooseBy::Score => scores.clone(),
            ChooseBy::Logit => row.to_vec(),
        };
        for (c, b) in choice.iter_mut().zip(bias.unwrap_or_default()) {
            *c += b;
        }
        let mut ids: Vec<usize> = (0..row.len()).collect();
        if let Some(g) = self.groups {
            let per = row.len() / g.n_group;
            let values: Vec<f32> =
                choice.chunks_exact(per).map(|c| group_score(c, g.group_score)).collect();
            let mut groups: Vec<usize> = (0..g.n_group).collect();
            sort(&mut groups, &values);
            groups.truncate(g.topk_group);
            match g.masked {
                Masked::Excluded => ids.retain(|id| groups.contains(&(id / per))),
                Masked::Zero => {
                    let others = (0..row.len()).filter(|id| !groups.contains(&(id / per)));
                    others.for_each(|id| choice[id] = 0.0);
                }
            }
        }
        sort(&mut ids, &choice);
        ids.truncate(self.top_k);
        let weights = ids.iter().map(|&id| scores[id]).collect();
        (ids, weights)
    }

    /// Renormalizes, the sum in the order of the ids, and multiplies by the factor.
    fn finish(&self, weights: &mut [f32]) {
        let sum: f32 = weights.iter().sum();
        let divisor = match self.renormalize {
            Renormalize::Never => 1.0,
            Renormalize::SumPlus(epsilon) => sum + epsilon,
            Renormalize::SumAtLeast(floor) => sum.max(floor),
            Renormalize::Norm(p) => norm(weights, p),
        };
        let divisor = if divisor > 0.0 { divisor } else { 1.0 };
        if self.renormalize != Renormalize::Never {
            weights.iter_mut().for_each(|w| *w /= divisor);
        }
        weights.iter_mut().for_each(|w| *w *= self.routed_scaling_factor);
    }
}

fn softmax(row: &[f32]) -> Vec<f32> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let e: Vec<f32> = row.iter().map(|&x| math::exp(x - max)).collect();
    let reciprocal = 1.0 / e.iter().sum::<f32>();
    e.iter().map(|e| e * reciprocal).collect()
}

/// In f64, rounded once: the same bits on every machine.
fn sqrt_softplus(x: f32) -> f32 {
    let x = f64::from(x);
    let softplus = if x > 20.0 { x } else { libm::log1p(libm::exp(x)) };
    softplus.sqrt() as f32
}

fn norm(weights: &[f32], p: f32) -> f32 {
    if p == 1.0 {
        return weights.iter().sum();
    }
    let p = f64::from(p);
    let sum: f64 = weights.iter().map(|&w| libm::pow(f64::from(w), p)).sum();
    libm::pow(sum, 1.0 / p) as f32
}

fn group_score(choice: &[f32], rule: GroupScore) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &c in choice {
        if c > first {
            (first, second) = (c, first);
        } else if c > second {
            second = c;
        }
    }
    if rule == GroupScore::Max { first } else { first + second }
}

/// The two experts of one token; each weight is a softmax over the experts that the threshold
/// keeps, the second without the first expert.
fn sparse_mixer(row: &[f32], jitter: f32) -> (Vec<usize>, Vec<f32>) {
    let mut left: Vec<f32> = row.to_vec();
    let (mut ids, mut weights) = (Vec::with_capacity(2), Vec::with_capacity(2));
    for _ in 0..2 {
        let max = left.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let keep = |(&l, &x): (&f32, &f32)| {
            // 0 / 0 is not above the threshold.
            let dropped = (max - x) / x.abs().max(max) > 2.0 * jitter;
            if dropped { f32::NEG_INFINITY } else { l }
        };
        let kept: Vec<f32> = left.iter().zip(row).map(keep).collect();
        let best = kept.iter().position(|&x| x == max).unwrap_or(0);
        weights.push(softmax(&kept)[best]);
        ids.push(best);
        left[best] = f32::NEG_INFINITY;
    }
    (ids, weights)
}

/// Sorts ids by falling value; equal values keep the order of the ids.
fn sort(ids: &mut [usize], values: &[f32]) {
    ids.sort_by(|&a, &b| values[b].partial_cmp(&values[a]).unwrap_or(std::cmp::Ordering::Equal));
}
