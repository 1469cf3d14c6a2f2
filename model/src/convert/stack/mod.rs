//! One stack on one rank: its outputs, and how the work is cut into jobs.

pub(crate) mod info;
pub mod part;

use std::ops::Range;

use marlinspike::config::Scheme;
use marlinspike::container::TensorSpec;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::tensor::DType;
use marlinspike::prepare::padded_shard::PaddedShard;

use super::names::{self, TensorKind};
use super::settings::Settings;
use crate::load::Reading;
use crate::load::preparation::Preparation;
use crate::model::bind::{self, Bound};
use crate::model::layers::{Role, Stack};
use info::{StackInfo, cut};
use part::Jobs;

/// A tensor in the kernel's format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// What it holds.
    pub kind: TensorKind,
    /// Name, type, shape.
    pub spec: TensorSpec,
}

/// A rank's part of each expert's matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankSlice {
    /// Rows of the file's matrices.
    pub k: Range<usize>,
    /// Columns of each of the file's matrices.
    pub n: Vec<Range<usize>>,
    /// Shape of the rank's matrix, rounded up where `padding` says so.
    pub shape: Shape,
    /// gpt-oss: the rank whose sizes are rounded up.
    pub padding: Option<PaddedShard>,
}

/// The rows of a rank's matrix that share scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScaleGroups {
    /// k per scale.
    pub size: GroupSize,
    /// Rows of each expert's scales.
    pub count: usize,
    /// Whether rows are ordered by their groups.
    pub act_order: bool,
    /// Whether the rank has all rows of each of its groups.
    pub is_k_full: bool,
}

/// One stack on one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct StackPlan {
    /// The module.
    pub module: String,
    /// Which matrices.
    pub role: Role,
    /// How they are stored.
    pub scheme: Scheme,
    /// The tensors of this rank's experts.
    pub experts: Vec<Vec<Bound>>,
    /// This rank's part of each expert's matrix.
    pub slice: RankSlice,
    /// The groups of rows that share scales.
    pub groups: ScaleGroups,
    /// How each expert's matrix is cut into jobs.
    pub jobs: Jobs,
    /// The output tensors.
    pub outputs: Vec<Output>,
}

impl StackPlan {
    /// `stack` cut to its rank, with one group, whole experts as jobs, and no outputs yet.
    ///
    /// # Errors
    /// The reason why it cannot be cut.
    pub(crate) fn cut(
        stack: &Stack,
        info: StackInfo,
        kv_heads: Option<usize>,
        settings: &Settings,
    ) -> Result<Self, String> {
        let (k, n) = cut(stack, &info, kv_heads, settings)?;
        let shape = Shape::new(k.len(), n.iter().map(Range::len).sum());
        Ok(Self {
            module: stack.module.clone(),
            role: stack.role,
            scheme: stack.scheme.clone(),
            experts: info.experts,
            slice: RankSlice { k, n, shape, padding: None },
            groups: ScaleGroups {
                size: bind::group_size(&stack.scheme, info.size_k),
                count: 1,
                act_order: false,
                is_k_full: true,
            },
            jobs: Jobs::Experts,
            outputs: Vec::new(),
        })
    }

    /// Adds an output, with the name that `names` has for its kind.
    pub(crate) fn push(&mut self, kind: TensorKind, dtype: DType, shape: Vec<usize>) {
        let name = names::full(&self.module, &self.scheme, self.role, kind);
        self.outputs.push(Output { kind, spec: TensorSpec { name, dtype, shape } });
    }

    /// The output of this kind, if there is one.
    pub fn output(&self, kind: TensorKind) -> Option<&Output> {
        self.outputs.iter().find(|o| o.kind == kind)
    }

    /// How its matrices are read.
    pub fn reading(&self, preparation: Preparation) -> Reading<'_> {
        // Preparation is for experts: parts of a merged linear layer keep their own scales.
        let preparation = match self.role {
            Role::Dense => Preparation { padding: preparation.padding, ..Preparation::AS_STORED },
            _ => preparation,
        };
        Reading {
            scheme: &self.scheme,
            n: &self.slice.n,
            group_size: self.groups.size,
            act_order: self.groups.act_order,
            preparation,
        }
    }

    /// Bits of one packed code.
    pub fn code_bits(&self) -> u32 {
        self.scheme.bits().unwrap_or(8)
    }
}
