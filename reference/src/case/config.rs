//! What a case's `config` says, typed per operation.

use super::op::Op;
use crate::dims::{GroupSize, LogicalK};
use crate::gemm::Convention;
use crate::gemm::schedule::Schedule;
use crate::moe::ScoringFunc;
use crate::moe::activation::Activation;
use crate::moe::families::RoutingRule;
use crate::moe::router::{Groups, Router};
use crate::named::named;
use crate::quantize::ActivationRule;
use crate::scalar::ScalarType;
use crate::w4a8::quantize::ActivationRounding;

named! {
    /// How a checkpoint stores a matrix.
    CheckpointFormat {
        /// int32 packed along K.
        Gptq "gptq",
        /// int32 packed along N, interleaved, with zero points.
        Awq "awq",
        /// e4m3fn with real scales.
        Fp8 "fp8",
        /// e4m3fn with a power of two per 32 k.
        Mxfp8 "mxfp8",
        /// e2m1 with an e4m3 scale per 16 k and a global scale.
        Nvfp4 "nvfp4",
        /// e2m1 with a power of two per 32 k.
        Mxfp4 "mxfp4",
    }
}

impl CheckpointFormat {
    /// The weight types that the format can hold.
    pub const fn weight_types(self) -> &'static [ScalarType] {
        match self {
            Self::Gptq => &[ScalarType::UINT4B8, ScalarType::UINT8B128],
            Self::Awq => &[ScalarType::UINT4, ScalarType::UINT8],
            Self::Fp8 | Self::Mxfp8 => &[ScalarType::FLOAT8_E4M3FN],
            Self::Nvfp4 | Self::Mxfp4 => &[ScalarType::FLOAT4_E2M1F],
        }
    }

    /// The group size that the format itself fixes.
    pub const fn fixed_group(self) -> Option<GroupSize> {
        match self {
            Self::Mxfp8 | Self::Mxfp4 => Some(GroupSize::Of(32)),
            Self::Nvfp4 => Some(GroupSize::Of(16)),
            _ => None,
        }
    }
}

named! {
    /// Which dimension tensor parallelism cuts.
    ParallelStyle {
        /// N is cut.
        Column "column",
        /// K is cut.
        Row "row",
    }
}

/// A rank's place among the ranks that share a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorParallel {
    /// Number of ranks.
    pub size: usize,
    /// This rank, below `size`.
    pub rank: usize,
    /// Which dimension is cut.
    pub style: ParallelStyle,
}

/// What `linear` and `moe` say about their quantized matrices.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantConfig {
    /// How the weight inputs are stored.
    pub checkpoint_format: CheckpointFormat,
    /// What a code means.
    pub weight_type: ScalarType,
    /// Activations, scales and output: [`ScalarType::FLOAT16`] or [`ScalarType::BFLOAT16`].
    pub dtype: ScalarType,
    /// 8-bit activations: [`ScalarType::INT8`] or [`ScalarType::FLOAT8_E4M3FN`].
    pub input_dtype: Option<ScalarType>,
    /// k per scale.
    pub group_size: GroupSize,
    /// Whether rows are ordered by activation size, with `g_idx`.
    pub desc_act: bool,
    /// Whether a rank holds the whole K.
    pub is_k_full: bool,
    /// Whether there is a bias.
    pub has_bias: bool,
    /// Present on a tensor-parallel rank.
    pub tensor_parallel: Option<TensorParallel>,
    /// Which numbers enter the products, and what is rounded; where absent, every known convention
    /// is tried.
    pub convention: Option<Convention>,
}

impl QuantConfig {
    /// Whether rows belong to groups by `g_idx`. With channel-wise scales `desc_act` has no meaning.
    pub fn has_act_order(&self) -> bool {
        self.desc_act && self.group_size != GroupSize::Channel
    }

    /// Number of scale rows of a matrix with `size_k` rows; `None` where any number is right,
    /// since the rank holds a slice of K and all scales of the whole matrix.
    pub fn scale_rows(&self, size_k: usize) -> crate::Result<Option<usize>> {
        let cut = self.tensor_parallel.is_some_and(|tp| tp.style == ParallelStyle::Row);
        if self.has_act_order() && (cut || !self.is_k_full) {
            return Ok(None);
        }
        self.group_size.groups(LogicalK(size_k)).map(Some)
    }

    /// Codes per 32-bit word.
    pub fn pack(&self) -> usize {
        32 / self.weight_type.size_bits().max(1) as usize
    }
}

/// Config of `linear`.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearConfig {
    /// The matrix's format.
    pub quant: QuantConfig,
    /// Rows of x.
    pub size_m: usize,
    /// Output features.
    pub size_n: usize,
    /// Input features.
    pub size_k: usize,
    /// The power of two that NVFP4 scales were multiplied with (bf16).
    pub scale_factor: Option<f64>,
    /// How `y` was computed, where it is to be equal for every bit.
    pub schedule: Option<ScheduleChoice>,
    /// The rule by which `in.a_q` and `in.a_scales` were made of `in.x`; where absent, any known one.
    pub quantizer: Option<ActivationRule>,
}

/// The schedule that a case declares for a product.
#[derive(Debug, Clone, PartialEq)]
pub enum ScheduleChoice {
    /// The name `canonical`: [`Schedule::canonical`] of the case's weight and types.
    Canonical,
    /// A schedule that stands in the config.
    Given(Box<Schedule>),
}

/// Config of `moe`.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Both matrices' format.
    pub quant: QuantConfig,
    /// Tokens.
    pub size_m: usize,
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// H: K of w13, N of w2.
    pub hidden_size: usize,
    /// I: K of w2; N of w13 is I for each of gate and up.
    pub intermediate_size: usize,
    /// Between the products.
    pub activation: Activation,
    /// Logits to scores.
    pub scoring_func: ScoringFunc,
    /// Whether the chosen weights are made to sum to one.
    pub renormalize: bool,
    /// Whether router weights multiply `gate_up` instead of `down`.
    pub apply_router_weight_on_input: bool,
    /// Tokens per block.
    pub block_size_m: usize,
    /// Expert-parallel ranks.
    pub ep_size: usize,
    /// This rank.
    pub ep_rank: usize,
    /// NVFP4's power of two for w13 (bf16).
    pub scale_factor_w13: Option<f64>,
    /// NVFP4's power of two for w2 (bf16).
    pub scale_factor_w2: Option<f64>,
    /// How `gate_up` was computed, where it is to be equal for every bit.
    pub schedule_w13: Option<ScheduleChoice>,
    /// How `down` was computed.
    pub schedule_w2: Option<ScheduleChoice>,
}

impl MoeConfig {
    /// N of w13: 2I for gate and up, I where the activation has no up.
    pub const fn w13_size_n(&self) -> usize {
        if self.activation.is_gated() { 2 * self.intermediate_size } else { self.intermediate_size }
    }

    /// The layer's router.
    pub fn router(&self) -> Router<'static> {
        Router::new(self.scoring_func, self.top_k, self.renormalize)
    }
}

/// Config of `router`.
#[derive(Debug, Clone, PartialEq)]
pub struct RouterConfig {
    /// Logits to scores.
    pub scoring_func: ScoringFunc,
    /// Experts per token.
    pub top_k: usize,
    /// Whether the chosen weights are made to sum to one.
    pub renormalize: bool,
    /// Present for grouped top-k.
    pub grouped: Option<GroupedTopk>,
    /// A family's routing, or a stated one; the keys above then say nothing.
    pub rule: Option<RoutingRule>,
}

impl RouterConfig {
    /// The router of this config, for logits of `logits_type` and the correction `bias`.
    pub fn router<'a>(&self, logits_type: ScalarType, bias: Option<&'a [f32]>) -> Router<'a> {
        let groups = self
            .grouped
            .map(|g| Groups { num_expert_group: g.num_expert_group, topk_group: g.topk_group });
        let routed_scaling_factor = self.grouped.map_or(1.0, |g| g.routed_scaling_factor as f32);
        let plain = Router::new(self.scoring_func, self.top_k, self.renormalize);
        Router { groups, routed_scaling_factor, bias, logits_type, ..plain }
    }
}

/// Grouped top-k: groups are chosen first, then experts in them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupedTopk {
    /// Number of groups; divides the number of experts.
    pub num_expert_group: usize,
    /// Groups chosen.
    pub topk_group: usize,
    /// Factor on the weights.
    pub routed_scaling_factor: f64,
}

/// Config of `moe_align_block_size`.
#[derive(Debug, Clone, PartialEq)]
pub struct AlignConfig {
    /// Tokens per block.
    pub block_size: usize,
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Expert-parallel ranks.
    pub ep_size: usize,
    /// This rank.
    pub ep_rank: usize,
}

/// Config of `int4_fp8_preprocess`.
#[derive(Debug, Clone, PartialEq)]
pub struct PreprocessConfig {
    /// [`CheckpointFormat::Gptq`] or [`CheckpointFormat::Awq`].
    pub checkpoint_format: CheckpointFormat,
    /// Input features.
    pub size_k: usize,
    /// Output features.
    pub size_n: usize,
}

/// Tile sizes of a packed left or right matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// Rows of x per tile.
    pub mr: usize,
    /// Columns of w per tile.
    pub nr: usize,
    /// k per tile.
    pub kr: usize,
    /// Splits of a tile's k.
    pub sr: usize,
}

/// Config of `dyn_quant_linear`.
#[derive(Debug, Clone, PartialEq)]
pub struct DynQuantConfig {
    /// Activations and output: [`ScalarType::FLOAT32`] or [`ScalarType::BFLOAT16`].
    pub dtype: ScalarType,
    /// k per scale.
    pub group_size: GroupSize,
    /// Whether there is a bias.
    pub has_bias: bool,
    /// Rows of x.
    pub size_m: usize,
    /// Output features.
    pub size_n: usize,
    /// Input features.
    pub size_k: usize,
    /// Tile sizes.
    pub packing: Packing,
    /// How activations are rounded.
    pub activation_rounding: ActivationRounding,
    /// Which micro-kernel; information only.
    pub kleidiai_variant: Option<String>,
}

/// A case's config, by operation.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum CaseConfig {
    /// `linear`.
    Linear(LinearConfig),
    /// `moe`.
    Moe(MoeConfig),
    /// `router`.
    Router(RouterConfig),
    /// `moe_align_block_size`.
    Align(AlignConfig),
    /// `int4_fp8_preprocess`.
    Preprocess(PreprocessConfig),
    /// `dyn_quant_linear`.
    DynQuant(DynQuantConfig),
    /// An operation of another method.
    Method(super::MethodConfig),
}

impl CaseConfig {
    /// The format of the quantized matrices of `linear` and `moe`.
    pub const fn quant(&self) -> Option<&QuantConfig> {
        match self {
            Self::Linear(c) => Some(&c.quant),
            Self::Moe(c) => Some(&c.quant),
            _ => None,
        }
    }

    /// The operation that this configures.
    pub const fn op(&self) -> Op {
        match self {
            Self::Linear(_) => Op::Linear,
            Self::Moe(_) => Op::Moe,
            Self::Router(_) => Op::Router,
            Self::Align(_) => Op::MoeAlignBlockSize,
            Self::Preprocess(_) => Op::Int4Fp8Preprocess,
            Self::DynQuant(_) => Op::DynQuantLinear,
            Self::Method(c) => c.op(),
        }
    }
}
