//! The whole MoE block of a model family: hidden states to router logits, and the routed and shared
//! experts to the block's output.
//!
//! Weights are unquantized, as in the block that transformers runs. Every value is computed in f64
//! together with the largest error of an implementation ([`Near`]) that multiplies in f32, adds in
//! any order, and rounds each stage to the type [`Block::dtype`]:
//!
//! | stage | value |
//! | --- | --- |
//! | `router_logits` | x · Wᵀ + b, then times a factor, then c · tanh(l / c) with a soft cap c |
//! | expert | w2 · activation(w13 · x + b13) + b2; id ≥ E (a zero expert): x |
//! | `y_experts` | Σ weight · expert(x), or Σ expert(weight · x) |
//! | `y` | `y_experts` + σ(shared gate · x) · shared(x) + output bias; or the mean of the first two |
//!
//! Ids and weights are inputs of the last two. [`Stage`]s (norms, projections, factors) may stand at
//! the inputs of router and experts, after each expert, after `y_experts` and after `y`.

mod near;
mod stage;
mod stages;
mod values;

use serde::{Deserialize, Serialize};

use crate::moe::activation::{Activation, Definition, Function};
use crate::moe::families::RoutingRule;
use crate::num::scalar::ScalarType;
use crate::{Error, Result};

pub use near::Near;
pub use stage::{Stage, apply_stages};
pub use stages::{AfterLogits, Capped, Mlp, Shared, Sum, logits};

/// Sizes and rules of a block, beyond its [`RoutingRule`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Block {
    /// H: features of the hidden states.
    pub hidden_size: usize,
    /// I: features between an expert's two products.
    pub intermediate_size: usize,
    /// E: experts with matrices.
    pub num_experts: usize,
    /// Whether rows of gate and up alternate in w13.
    #[serde(default)]
    pub interleaved: bool,
    /// Features between the shared expert's products; 0 without a shared expert.
    #[serde(default)]
    pub shared_intermediate_size: usize,
    /// Whether the shared expert's activation has no limits, unlike the routed experts'.
    #[serde(default)]
    pub shared_is_plain: bool,
    /// Limit of a shared expert whose activation is `swiglustep`; for `shared_is_plain` false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_swiglustep_limit: Option<f32>,
    /// Whether the output is the mean of the routed sum and the shared expert's output.
    #[serde(default)]
    pub shared_is_averaged: bool,
    /// c of the logits' soft cap c · tanh(l / c).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logit_softcap: Option<f32>,
    /// Factor on the logits, before the soft cap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logit_multiplier: Option<f32>,
    /// c of the soft cap of the gate: c · tanh(g / c) · σ(g) instead of g · σ(g).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate_softcap: Option<f32>,
    /// c of the soft cap of up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub up_softcap: Option<f32>,
    /// Hidden states to the router's input.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub router_input: Vec<Stage>,
    /// Hidden states to the routed experts' input.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expert_input: Vec<Stage>,
    /// The output of each routed expert, before its weight.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expert_output: Vec<Stage>,
    /// `y_experts`, before the shared expert is added.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routed_output: Vec<Stage>,
    /// The sum with the shared expert, to `y`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub output: Vec<Stage>,
    /// The type that each stage is rounded to: `float32`, `float16` or `bfloat16`.
    #[serde(default)]
    pub dtype: StageType,
}

/// A type that stages are rounded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StageType {
    /// f32.
    #[default]
    Float32,
    /// f16.
    Float16,
    /// bf16.
    BFloat16,
}

impl StageType {
    /// The scalar type.
    pub const fn scalar(self) -> ScalarType {
        match self {
            Self::Float32 => ScalarType::FLOAT32,
            Self::Float16 => ScalarType::FLOAT16,
            Self::BFloat16 => ScalarType::BFLOAT16,
        }
    }
}

impl Block {
    /// A block without shared experts whose stages are f32.
    pub const fn new(hidden_size: usize, intermediate_size: usize, num_experts: usize) -> Self {
        Self {
            hidden_size,
            intermediate_size,
            num_experts,
            interleaved: false,
            shared_intermediate_size: 0,
            shared_is_plain: false,
            shared_swiglustep_limit: None,
            shared_is_averaged: false,
            logit_softcap: None,
            logit_multiplier: None,
            gate_softcap: None,
            up_softcap: None,
            router_input: Vec::new(),
            expert_input: Vec::new(),
            expert_output: Vec::new(),
            routed_output: Vec::new(),
            output: Vec::new(),
            dtype: StageType::Float32,
        }
    }

    /// Checks the sizes and numbers.
    ///
    /// # Errors
    /// [`Error::Size`] naming the key.
    pub fn validate(&self) -> Result<()> {
        let largest = i32::MAX as usize;
        let sizes = [
            ("hidden_size", self.hidden_size, 1),
            ("intermediate_size", self.intermediate_size, 1),
            ("num_experts", self.num_experts, 1),
            ("shared_intermediate_size", self.shared_intermediate_size, 0),
        ];
        for (key, found, least) in sizes {
            if !(least..=largest).contains(&found) {
                let rule = format!("{least} to {largest}");
                return Err(Error::size(format!("block: {key}"), found, rule));
            }
        }
        let numbers = [
            ("logit_softcap", self.logit_softcap),
            ("shared_swiglustep_limit", self.shared_swiglustep_limit),
            ("gate_softcap", self.gate_softcap),
            ("up_softcap", self.up_softcap),
            ("logit_multiplier", self.logit_multiplier),
        ];
        for (key, found) in numbers {
            if let Some(found) = found.filter(|x| !(x.is_finite() && *x > 0.0)) {
                let rule = "a positive finite number";
                return Err(Error::size(format!("block: {key}"), found, rule));
            }
        }
        self.validate_stages()
    }

    /// The five lists of stages: key, features before, features required after.
    fn stages(&self) -> [(&'static str, &[Stage], usize, Option<usize>); 5] {
        let (h, inner) = (self.hidden_size, self.experts_hidden_size());
        [
            ("router_input", &self.router_input, h, None),
            ("expert_input", &self.expert_input, h, None),
            ("expert_output", &self.expert_output, inner, Some(inner)),
            ("routed_output", &self.routed_output, inner, Some(h)),
            ("output", &self.output, h, Some(h)),
        ]
    }

    fn validate_stages(&self) -> Result<()> {
        for (key, stages, before, after) in self.stages() {
            let mut width = before;
            for stage in stages {
                width = stage.width(width);
                let (largest, key) = (i32::MAX as usize, format!("block: {key}"));
                if !(1..=largest).contains(&width) {
                    return Err(Error::size(
                        format!("{key}: size_n"),
                        width,
                        format!("1 to {largest}"),
                    ));
                }
                let number = match stage {
                    Stage::RmsNorm { eps, .. } if !(eps.is_finite() && *eps >= 0.0) => Some(*eps),
                    Stage::RmsNorm { weight_offset: x, .. } | Stage::Multiply { factor: x } => {
                        Some(*x).filter(|x| !x.is_finite())
                    }
                    _ => None,
                };
                if let Some(found) = number {
                    return Err(Error::size(key, found, "a finite number, and eps 0 or more"));
                }
            }
            if let Some(expected) = after.filter(|&expected| expected != width) {
                let key = format!("block: {key}: features after the last stage");
                return Err(Error::size(key, width, expected));
            }
        }
        Ok(())
    }

    /// Features of the router's input.
    pub fn router_hidden_size(&self) -> usize {
        self.router_input.iter().fold(self.hidden_size, |width, stage| stage.width(width))
    }

    /// Features of the routed experts' input and output.
    pub fn experts_hidden_size(&self) -> usize {
        self.expert_input.iter().fold(self.hidden_size, |width, stage| stage.width(width))
    }

    /// The tensors of all stages: names and shapes.
    pub fn stage_tensors(&self) -> Vec<(&str, Vec<usize>)> {
        let mut all = Vec::new();
        for (_, stages, mut width, _) in self.stages() {
            for stage in stages {
                all.extend(stage.tensors(width));
                width = stage.width(width);
            }
        }
        all
    }

    /// The activation of routed experts.
    ///
    /// # Errors
    /// As [`RoutingRule::activation`].
    pub fn activation(&self, rule: &RoutingRule) -> Result<Capped> {
        let definition = rule.activation(self.interleaved)?;
        let capped = Capped { definition, gate: self.gate_softcap, up: self.up_softcap };
        let plain = definition.function == Function::Silu && definition.alpha == 1.0;
        if capped.gate.is_some() && !plain {
            let reason = "the cap replaces the gate in g · σ(g)";
            return Err(Error::unsupported("gate_softcap without SiLU", reason));
        }
        Ok(capped)
    }

    /// The activation of the shared expert, whose w13 is never interleaved.
    ///
    /// # Errors
    /// As [`RoutingRule::activation`].
    pub fn shared_activation(&self, rule: &RoutingRule) -> Result<Capped> {
        match (self.shared_is_plain, self.shared_swiglustep_limit) {
            (true, _) => Ok(Capped::none(Definition::new(Activation::Silu))),
            (false, Some(limit)) => {
                Ok(Capped::none(Definition::new(Activation::SwigluStep).with_limit(limit)))
            }
            (false, None) => Ok(Capped {
                definition: rule.activation(false)?,
                gate: self.gate_softcap,
                up: self.up_softcap,
            }),
        }
    }
}
