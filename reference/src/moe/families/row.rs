//! The columns of the table of families.

use super::key::Key;
use super::rule::{ChooseBy, GroupScore, Masked, Score, ZeroExpert};
use super::tensors::ExpertsRule;
use crate::moe::activation::Activation;

/// The source of the scoring function.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ScoreRule {
    /// The family fixes it.
    Fixed(Score),
    /// A key selects it.
    Key(Key<Score>),
}

/// The correction bias, relative to the parent of `experts`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BiasRule {
    /// No correction bias.
    None,
    /// Required for routing.
    Required(&'static str),
    /// A flag states whether it exists: key, default, tensor.
    IfKey(&'static str, bool, &'static str),
}

/// Keys of grouped selection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupKeys {
    /// Number of groups when the keys are absent; above 1 groups are chosen.
    pub n_group: Option<usize>,
    /// Groups kept when the key is absent.
    pub topk_group: Option<usize>,
    /// How groups are compared.
    pub score: GroupScore,
    /// Treatment of the other groups.
    pub masked: Masked,
}

/// When and how weights are renormalized.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RenormRule {
    /// Never.
    Never,
    /// Always, with this added to the sum.
    Always(f32),
    /// If a flag is set: keys, default, constant added to the sum.
    Key(Key<bool>, f32),
    /// Always, by the sum or the floor of a key.
    Floor(Key<f32>),
    /// By the p-norm with p from a key; null means never.
    Norm(Key<f32>),
}

/// The activation between the products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ActivationRule {
    /// The name in one of these keys; SiLU if absent.
    Named(&'static [&'static str]),
    /// SiLU of the gate, both limited before: `swiglu_limit`.
    Clamped(Key<f32>),
    /// The activation of gpt-oss under any name in the config: keys of α and limit.
    Oai,
    /// SiLU limited after, by a list of limits over the layers: `swiglu_limits`.
    Step,
}

/// How far a family is supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// Its experts run.
    Right,
    /// The block has parts that only its computation as a whole includes, for this reason.
    RoutingOnly(&'static str),
    /// Neither routing nor layers are supported, for this reason.
    Refused(&'static str),
}

/// One row: a family of models that route alike.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Family {
    /// `model_type`s; `_text` after one of them is the same family.
    pub model_types: &'static [&'static str],
    /// What is supported.
    pub support: Support,
    /// Experts per token.
    pub top_k: Key<usize>,
    /// Keys of the number of experts.
    pub num_experts: &'static [&'static str],
    /// Logits to scores.
    pub score: ScoreRule,
    /// The selection value.
    pub choose_by: ChooseBy,
    /// Correction bias.
    pub bias: BiasRule,
    /// Groups.
    pub groups: Option<GroupKeys>,
    /// Renormalization.
    pub renormalize: RenormRule,
    /// Groups are used only if this key has the first value; the second means no groups.
    pub group_method: Option<(&'static str, [&'static str; 2])>,
    /// vLLM's rule for configs that choose the score: groups by their two best with a bias and by
    /// the best without; a softmax has no bias, a sigmoid has one.
    pub by_vllm: bool,
    /// The softmax is over the chosen experts, which renormalizes it regardless of the flag.
    pub softmax_of_chosen: bool,
    /// Factor on the weights, or on the output.
    pub scale: Option<Key<f32>>,
    /// Tensor of a factor for each expert.
    pub expert_scale: Option<&'static str>,
    /// Key of the number of zero experts; without keys the default applies.
    pub zero_experts: Option<Key<usize>>,
    /// What zero experts do.
    pub zero_expert_type: ZeroExpert,
    /// Key of the number of shared experts with logits of their own.
    pub shared_experts: Option<Key<usize>>,
    /// Table of a layer whose `mlp_layer_types` says `hash`.
    pub token_table: Option<&'static str>,
    /// Whether weights multiply the expert's input.
    pub weight_on_input: bool,
    /// Activation.
    pub activation: ActivationRule,
    /// The experts' tensors, and what the block has besides.
    pub experts: ExpertsRule,
    /// Key of the soft cap of the logits; absent or 0 means none.
    pub logit_softcap: Option<&'static str>,
    /// Keys that vLLM reads and transformers does not, with the only values under which both
    /// compute the same.
    pub vllm: &'static [VllmKey],
}

/// A key under which vLLM's routing differs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VllmKey {
    /// The key.
    pub key: &'static str,
    /// The values that change nothing.
    pub same: Same,
    /// The different behaviour of vLLM.
    pub does: &'static str,
}

/// Values that change nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Same {
    /// This flag.
    Flag(bool),
    /// This number.
    Number(f64),
}

const PER_TOK: &[&str] = &["num_experts_per_tok", "num_experts_per_token"];
pub(super) const EXPERTS: &[&str] = &["num_experts", "num_local_experts", "n_routed_experts"];
pub(super) const NORM: &[&str] = &["norm_topk_prob"];
pub(super) const SCALE: &[&str] = &["routed_scaling_factor"];
pub(super) const HIDDEN_ACT: ActivationRule =
    ActivationRule::Named(&["hidden_act", "hidden_activation"]);

impl Family {
    /// Softmax of all experts, renormalized, no bias, no groups, no factor.
    pub(super) const fn softmax(model_types: &'static [&'static str], top_k: usize) -> Self {
        Self {
            model_types,
            support: Support::Right,
            top_k: Key::new(PER_TOK, top_k),
            num_experts: EXPERTS,
            score: ScoreRule::Fixed(Score::Softmax),
            choose_by: ChooseBy::Score,
            bias: BiasRule::None,
            groups: None,
            renormalize: RenormRule::Always(0.0),
            group_method: None,
            by_vllm: false,
            softmax_of_chosen: false,
            scale: None,
            expert_scale: None,
            zero_experts: None,
            zero_expert_type: ZeroExpert::Identity,
            shared_experts: None,
            token_table: None,
            weight_on_input: false,
            activation: HIDDEN_ACT,
            experts: ExpertsRule::PLAIN,
            logit_softcap: None,
            vllm: &[],
        }
    }

    /// DeepSeek-V3's rule: sigmoid, correction bias for the choice, groups by their two best,
    /// renormalized with 1e-20 where `norm_topk_prob` says so, times a factor.
    pub(super) const fn deepseek_v3(model_types: &'static [&'static str], top_k: usize) -> Self {
        Self {
            score: ScoreRule::Fixed(Score::Sigmoid),
            bias: BiasRule::Required("gate.e_score_correction_bias"),
            groups: Some(Self::groups_of(1, 1)),
            renormalize: RenormRule::Key(Key::new(NORM, true), 1e-20),
            scale: Some(Key::required(SCALE)),
            ..Self::softmax(model_types, top_k)
        }
    }

    /// Groups of [`Family::deepseek_v3`] by default.
    pub(super) const fn groups_of(n_group: usize, topk_group: usize) -> GroupKeys {
        GroupKeys {
            n_group: Some(n_group),
            topk_group: Some(topk_group),
            score: GroupScore::TopTwo,
            masked: Masked::Excluded,
        }
    }

    /// Sets the factor.
    pub(super) const fn scaled(self, keys: &'static [&'static str], default: f32) -> Self {
        Self { scale: Some(Key::new(keys, default)), ..self }
    }

    /// Sets the keys of the activation.
    pub(super) const fn act(self, keys: &'static [&'static str]) -> Self {
        Self { activation: ActivationRule::Named(keys), ..self }
    }
}

/// Names of activations in configs.
pub(super) fn activation(name: &str) -> Option<Activation> {
    Some(match name {
        "silu" | "swish" | "swiglu" => Activation::Silu,
        "gelu" => Activation::Gelu,
        "gelu_pytorch_tanh" | "gelu_tanh" => Activation::GeluTanh,
        _ => return None,
    })
}
