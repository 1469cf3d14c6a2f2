//! How the layers of each model family route tokens to experts.
//!
//! [`FAMILIES`] has one row for each family, keyed by `model_type`: the keys of `config.json` with
//! the defaults of absent ones, the score, groups, bias, renormalization and factor, and the
//! activation between the products. [`resolve`] reads a config by its row and gives the
//! [`RoutingRule`] of one layer. A `model_type` without a row is refused: there is no default
//! routing. [`RoutingRule::from_json`] reads a rule that a user states instead.
//!
//! Rows follow the classes of transformers 5.23.0; if vLLM 0.33.0 computes something else for the
//! same config, [`Resolved::notes`] states it. Two implementations share no code:
//! [`RoutingRule::route`] in f32 and [`RoutingRule::define`] in f64.

mod block;
mod checks;
mod config;
mod definition;
mod describe;
mod json;
mod key;
mod route;
mod row;
mod rule;
mod sigmoid;
mod softmax;
mod stack;
mod stage_rules;
mod surroundings;
mod tensors;
mod tokens;

pub use block::{BlockNumbers, block_rule};
pub use config::{Resolved, family, resolve};
pub use definition::{Differences, Token};
pub use describe::markdown;
pub use json::EXAMPLE;
pub use key::Key;
pub use row::{
    ActivationRule, BiasRule, Family, GroupKeys, RenormRule, Same, ScoreRule, Support, VllmKey,
};
pub use rule::{
    ChooseBy, GroupRule, GroupScore, Masked, Renormalize, RouterTensors, RoutingRule, Score,
    ZeroExpert,
};
pub use stage_rules::{FoundStage, Path, StageRule};
pub use surroundings::{Surroundings, logits_are_f32};
pub use tensors::{BlockTensors, ExpertsRule, SharedRule, tensor_below};
pub use tokens::Tokens;

/// Every known family.
pub static FAMILIES: &[&[Family]] = &[softmax::ROWS, sigmoid::ROWS];

/// The rows of [`FAMILIES`] one after the other.
pub fn families() -> impl Iterator<Item = &'static Family> {
    FAMILIES.iter().flat_map(|rows| rows.iter())
}
