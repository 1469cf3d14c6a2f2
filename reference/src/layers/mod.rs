//! Parameters of a layer on one rank: names, shapes, dtypes, and how a checkpoint's tensors are
//! cut into them.
//!
//! Each function returns the parameters that upstream's `create_weights` registers for one kind of
//! layer, and returns an error where its constructor or `create_weights` does (vLLM 0.21.0
//! `gptq_marlin.py`, `compressed_tensors_moe*.py`, `fp8.py`, `modelopt.py`). [`slices`] maps parts
//! of a full tensor to parts of a rank's parameter (`parameter.py`, `fused_moe/layer.py`).

mod error;
mod experts;
mod linear;
mod moe;
mod moe_ct;
mod moe_float;
mod parallel;
pub mod slices;

use crate::num::tensor::DType;

pub use error::LayerError;
pub use experts::{ExpertMap, ExpertPlacement, determine_expert_map};
pub use linear::{
    LinearShard, OutputPart, Parallel, ct_wna16_linear, fp8_linear, gptq_linear, is_k_full,
    mx_linear, repeat_scales_on_all_ranks,
};
pub use moe::{MoeShard, gptq_moe};
pub use moe_ct::{
    ActOrderRule, CtWna16Moe, Wna16Kernel, Wna16Weight, ct_w4a8_int8_moe, ct_wna16_moe,
    w4a8_int8_group, wna16_weight_shape,
};
pub use moe_float::{ct_block_moe, ct_fp8_moe};
pub use parallel::{ParallelStyle, TensorParallel};

/// The role of a parameter; determines how it is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Codes, packed or not.
    Weight,
    /// Scales or zero points of weights, with their granularity.
    Scale(ScaleKind),
    /// Static activation scale: one value per expert or shard.
    InputScale,
    /// Group of each row.
    GroupIndex,
    /// Filled by processing, never loaded.
    SortIndices,
    /// The unpacked shape, two numbers.
    WeightShape,
    /// Bias.
    Bias,
    /// Empty until processing fills it.
    Placeholder,
}

/// The attribute `quant_method` that loaders read on a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleKind {
    /// `tensor`.
    Tensor,
    /// `channel`.
    Channel,
    /// `group`.
    Group,
    /// `block`.
    Block,
}

/// Several values in one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Packed {
    /// Dimension along which values are packed.
    pub dim: usize,
    /// Values per element.
    pub factor: usize,
}

/// One registered parameter of one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamSpec {
    /// Parameter name.
    pub name: &'static str,
    /// Shape on this rank; of MoE layers the first dimension is the local expert.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// Its role.
    pub role: Role,
    /// Linear layers: the dimension that row parallelism cuts, if any.
    pub input_dim: Option<usize>,
    /// Linear layers: the dimension that column parallelism cuts, if any.
    pub output_dim: Option<usize>,
    /// Packing.
    pub packed: Option<Packed>,
    /// `[block_n, block_k]` covered by one element.
    pub block: Option<[usize; 2]>,
    /// MoE layers: the parameter is `[E, in, out]`, so the cut dimensions are exchanged.
    pub is_transposed: bool,
    /// MoE layers: the file stores each expert's matrix transposed to the parameter.
    pub transpose_on_load: bool,
    /// MoE layers: every rank loads all of w2's scales (act-order).
    pub load_full_w2: bool,
}

impl ParamSpec {
    fn new(name: &'static str, shape: Vec<usize>, dtype: DType, role: Role) -> Self {
        Self {
            name,
            shape,
            dtype,
            role,
            input_dim: None,
            output_dim: None,
            packed: None,
            block: None,
            is_transposed: false,
            transpose_on_load: false,
            load_full_w2: false,
        }
    }

    fn dims(mut self, input: Option<usize>, output: Option<usize>) -> Self {
        self.input_dim = input;
        self.output_dim = output;
        self
    }

    fn packed(mut self, dim: usize, factor: usize) -> Self {
        self.packed = Some(Packed { dim, factor });
        self
    }

    /// Number of elements; `None` on overflow.
    pub fn elements(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |a, &d| a.checked_mul(d))
    }

    /// Number of bytes; `None` on overflow.
    pub fn bytes(&self) -> Option<usize> {
        self.elements()?.checked_mul(self.dtype.bytes())
    }
}

/// A layer's parameters on one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerParams {
    /// In the order of registration.
    pub params: Vec<ParamSpec>,
    /// Whether this rank holds every row of the matrix that act-order permutes: the kernel's
    /// argument `is_k_full` (for MoE layers, of w2).
    pub is_k_full: bool,
    /// MoE layers: scale groups of w13, if grouped or channel-wise.
    pub num_groups_w13: Option<usize>,
    /// MoE layers: scale groups of w2 held by this rank.
    pub num_groups_w2: Option<usize>,
}

impl LayerParams {
    fn linear(params: Vec<ParamSpec>, is_k_full: bool) -> Self {
        Self { params, is_k_full, num_groups_w13: None, num_groups_w2: None }
    }

    /// The parameter of this name.
    pub fn get(&self, name: &str) -> Option<&ParamSpec> {
        self.params.iter().find(|p| p.name == name)
    }
}

fn mul(what: &'static str, a: usize, b: usize) -> Result<usize, LayerError> {
    a.checked_mul(b).ok_or(LayerError::Overflow { what })
}

/// Exact division.
fn div(what: &'static str, found: usize, by: &'static str, of: usize) -> Result<usize, LayerError> {
    match found.checked_rem(of) {
        None => Err(LayerError::Zero { what: by }),
        Some(0) => Ok(found / of),
        Some(_) => Err(LayerError::NotDivisible { what, found, by, of }),
    }
}
