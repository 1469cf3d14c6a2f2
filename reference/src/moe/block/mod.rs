//! The whole MoE block of a model family: hidden states to router logits, and the routed and shared
//! experts to the block's output.
//!
//! Weights are unquantized, as in the block that transformers runs. Every value is computed in f64
//! together with the largest error of an implementation ([`Near`]) that multiplies in f32, adds in
//! any order, and rounds each stage to the type [`Block::dtype`]:
//!
//! | stage | value |
//! | --- | --- |
//! | `router_logits` | x · Wᵀ + b, then c · tanh(l / c) with a soft cap c |
//! | expert | w2 · activation(w13 · x + b13) + b2; id ≥ E (a zero expert): x |
//! | `y_experts` | Σ weight · expert(x), or Σ expert(weight · x) |
//! | `y` | `y_experts` + σ(shared gate · x) · shared(x) + output bias; or the mean of the first two |
//!
//! Ids and weights are inputs of the last two.

mod near;
mod stages;

use serde::{Deserialize, Serialize};

use crate::moe::activation::{Activation, Definition};
use crate::moe::families::RoutingRule;
use crate::num::scalar::ScalarType;
use crate::{Error, Result};

pub use near::Near;
pub use stages::{Mlp, Shared, Sum, logits};

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
        ];
        for (key, found) in numbers {
            if let Some(found) = found.filter(|x| !(x.is_finite() && *x > 0.0)) {
                let rule = "a positive finite number";
                return Err(Error::size(format!("block: {key}"), found, rule));
            }
        }
        Ok(())
    }

    /// The activation of routed experts.
    ///
    /// # Errors
    /// As [`RoutingRule::activation`].
    pub fn activation(&self, rule: &RoutingRule) -> Result<Definition> {
        rule.activation(self.interleaved)
    }

    /// The activation of the shared expert, whose w13 is never interleaved.
    ///
    /// # Errors
    /// As [`RoutingRule::activation`].
    pub fn shared_activation(&self, rule: &RoutingRule) -> Result<Definition> {
        match (self.shared_is_plain, self.shared_swiglustep_limit) {
            (true, _) => Ok(Definition::new(Activation::Silu)),
            (false, Some(limit)) => Ok(Definition::new(Activation::SwigluStep).with_limit(limit)),
            (false, None) => rule.activation(false),
        }
    }
}
