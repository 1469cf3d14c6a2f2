//! The modules of a model as data: stacks of quantized matrices, and what is none.

use std::collections::{BTreeMap, BTreeSet};

use marlinspike::config::Scheme;

use super::fused::Fused;
use super::matrix::{Matrix, Role};

/// The largest number of experts of one layer; real models have a few hundred.
pub(super) const MAX_EXPERTS: usize = 1 << 16;

/// Quantized matrices that form one stack in the kernel's format.
#[derive(Debug, Clone, PartialEq)]
pub struct Stack {
    /// `model.layers.0.self_attn.q_proj`, or `model.layers.0.mlp.experts` for experts.
    pub module: String,
    /// Which matrices.
    pub role: Role,
    /// Their storage format.
    pub scheme: Scheme,
    /// Experts (one for a dense layer), each with the matrices that are concatenated along N.
    pub experts: Vec<Vec<Matrix>>,
}

impl Stack {
    /// Whether rows of gate and up alternate in w13, as gpt-oss stores them.
    pub fn is_interleaved(&self) -> bool {
        let alternates = |m: &Matrix| m.index.is_some() && m.columns.is_none();
        self.role == Role::W13 && self.experts.iter().flatten().any(alternates)
    }
}

impl Stack {
    /// Whether w13 has gate and up, and not up alone.
    pub fn has_gate(&self) -> bool {
        let up_alone = |row: &Vec<Matrix>| row.len() == 1 && row[0].index.is_none();
        self.role == Role::W13 && !self.experts.iter().any(up_alone)
    }
}

/// A module that is not quantized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unquantized {
    /// The module.
    pub module: String,
    /// Why.
    pub reason: String,
}

/// A model's modules.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Layers {
    /// The stacks that can be converted, sorted by name.
    pub stacks: Vec<Stack>,
    /// The modules that are not quantized.
    pub unquantized: Vec<Unquantized>,
    /// Names of the tensors that belong to a stack.
    pub owned: BTreeSet<String>,
    /// Experts in unsupported storage forms.
    pub fused: Vec<Fused>,
    /// Modules of experts with 16 or 32 bits, in any form.
    pub plain: Vec<String>,
    /// Quantized modules that no command may read as their config says, with the reasons. A module
    /// that has a scheme is also in `stacks`.
    pub refused: BTreeMap<String, Vec<String>>,
}
