//! compressed-tensors integer experts: WNA16 for both its kernels, and W4A8-int8.

use super::{LayerError, LayerParams, MoeShard, ParamSpec, Role, ScaleKind, div};
use crate::config::{ActOrder, CtArgs, CtStrategy};
use crate::num::dims::GroupSize;
use crate::num::tensor::DType;
use crate::select::Capability;

/// What a kernel of WNA16 experts reads, and the orientation of every tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Wna16Kernel {
    /// Whether the file's matrices are transposed, `[E, K/pack, N]`; otherwise `[E, N, K/pack]`.
    pub transposed: bool,
    /// Bits of its codes.
    pub bits: &'static [u32],
    /// Its only group size; absent: it reads every one, and channel-wise scales.
    pub group_size: Option<usize>,
}

impl Wna16Kernel {
    /// Marlin.
    pub const MARLIN: Self = Self { transposed: true, bits: &[4, 8], group_size: None };
    /// `trtllm_mxint4_block_scale_moe`.
    pub const TRTLLM_MXINT4: Self = Self { transposed: false, bits: &[4], group_size: Some(32) };
}

/// Tensors whose shape [`wna16_weight_shape`] computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wna16Weight {
    /// Packed gate and up.
    W13Weight,
    /// Their scales.
    W13Scale,
    /// Packed down.
    W2Weight,
    /// Its scales.
    W2Scale,
}

/// Shape of one WNA16 tensor for `kernel` (upstream `get_weight_shape`); scales require
/// `num_groups`.
///
/// # Errors
/// [`LayerError::GroupsMissing`] for a scale without `num_groups`; [`LayerError::NotDivisible`] if
/// K does not fill whole words (upstream rounds down).
pub fn wna16_weight_shape(
    kernel: Wna16Kernel,
    weight: Wna16Weight,
    shard: &MoeShard,
    packed_factor: usize,
    num_groups: Option<usize>,
) -> Result<[usize; 3], LayerError> {
    let groups = |weight| num_groups.ok_or(LayerError::GroupsMissing { weight });
    let (h, i) = (shard.hidden_size, shard.intermediate_size_per_partition);
    let i_name = "intermediate_size_per_partition";
    let (k, n) = match weight {
        Wna16Weight::W13Weight => {
            (div("hidden_size", h, "packed_factor", packed_factor)?, shard.w13_size()?)
        }
        Wna16Weight::W13Scale => (groups("w13_scale")?, shard.w13_size()?),
        Wna16Weight::W2Weight => (div(i_name, i, "packed_factor", packed_factor)?, h),
        Wna16Weight::W2Scale => (groups("w2_scale")?, h),
    };
    Ok(match kernel.transposed {
        true => [shard.num_experts, k, n],
        false => [shard.num_experts, n, k],
    })
}

/// The activation orderings that count as act-order in the shape rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ActOrderRule {
    /// Only `group`; the other ordering has uniform groups and no `g_idx`.
    #[default]
    GroupOnly,
    /// Any ordering, as vLLM 0.21.0 tests it (`if self.actorder`). With `weight` (`static`) and
    /// several ranks, each rank then loads all scales of w2 but only its slice of the rows, and
    /// multiplies its rows by the scales of the first groups.
    Upstream,
}

/// Settings of WNA16 experts.
#[derive(Debug, Clone)]
pub struct CtWna16Moe<'a> {
    /// Arguments of the weights.
    pub weights: &'a CtArgs,
    /// Kernel.
    pub kernel: Wna16Kernel,
    /// The orderings that count as act-order.
    pub act_order_rule: ActOrderRule,
}

/// The groups of the experts' scales, after the constructor's checks.
fn ct_wna16_group(weights: &CtArgs, kernel: Wna16Kernel) -> Result<GroupSize, LayerError> {
    let method = "compressed-tensors WNA16 MoE";
    if !weights.symmetric {
        return Err(LayerError::Asymmetric { method });
    }
    let bits = weights.num_bits;
    if !kernel.bits.contains(&bits) {
        let expected = if kernel.bits.contains(&8) { "4 or 8" } else { "4" };
        return Err(LayerError::Bits { method, bits, expected });
    }
    let scales = || LayerError::StrategyPair {
        weights: format!("{} {:?}", weights.strategy.name(), weights.group_size),
        activations: "none".to_owned(),
    };
    let group = match (weights.strategy, weights.group_size) {
        (CtStrategy::Channel, _) => GroupSize::Channel,
        (CtStrategy::Group, Some(g)) if g > 0 => GroupSize::Of(g as usize),
        _ => return Err(scales()),
    };
    if kernel.group_size.is_some_and(|only| group != GroupSize::Of(only)) {
        return Err(scales());
    }
    Ok(group)
}

/// Parameters of compressed-tensors WNA16 experts.
///
/// `w13_weight_shape` and `w2_weight_shape` have the 16-bit default type upstream, which cannot
/// hold every size exactly; nothing reads them.
///
/// # Errors
/// [`LayerError::Asymmetric`]; [`LayerError::Bits`] unless the kernel reads them;
/// [`LayerError::NotDivisible`] if a size does not fill whole groups or words;
/// [`LayerError::StrategyPair`] for scales that are neither per channel nor per group, or not
/// in the kernel's groups.
pub fn ct_wna16_moe(
    settings: &CtWna16Moe<'_>,
    shard: &MoeShard,
) -> Result<LayerParams, LayerError> {
    let CtWna16Moe { weights, kernel, act_order_rule } = settings;
    let group = ct_wna16_group(weights, *kernel)?;
    let bits = weights.num_bits;
    let act_order = match act_order_rule {
        ActOrderRule::GroupOnly => weights.actorder == Some(ActOrder::Group),
        ActOrderRule::Upstream => weights.actorder.is_some(),
    };
    // Upstream compares the configured group with −1, so channel-wise scales without a group size
    // count as grouped.
    let load_full_w2 = act_order && weights.group_size != Some(-1);
    let pack = 32 / bits as usize;
    let (h, i) = (shard.hidden_size, shard.intermediate_size_per_partition);
    let (groups13, groups2, kind) = match group {
        GroupSize::Channel => (1, 1, ScaleKind::Channel),
        GroupSize::Of(g) => {
            let (what, size) = if load_full_w2 {
                ("intermediate_size", shard.intermediate_size_full)
            } else {
                ("intermediate_size_per_partition", i)
            };
            let groups13 = div("hidden_size", h, "group_size", g)?;
            (groups13, div(what, size, "group_size", g)?, ScaleKind::Group)
        }
    };
    let transposed = kernel.transposed;
    let spec = |name, shape: &[usize], dtype, role| {
        let mut spec = ParamSpec::new(name, shape.to_vec(), dtype, role);
        spec.is_transposed = transposed;
        spec.transpose_on_load = transposed && matches!(role, Role::Weight | Role::Scale(_));
        spec
    };
    let shape = |weight, groups| wna16_weight_shape(*kernel, weight, shard, pack, groups);
    let packed_dim = if transposed { 1 } else { 2 };
    let (e, dtype, scale) = (shard.num_experts, shard.params_dtype, Role::Scale(kind));
    let w13 = shape(Wna16Weight::W13Weight, None)?;
    let w2 = shape(Wna16Weight::W2Weight, None)?;
    let s13 = shape(Wna16Weight::W13Scale, Some(groups13))?;
    let s2 = shape(Wna16Weight::W2Scale, Some(groups2))?;
    let mut w2_scale = spec("w2_weight_scale", &s2, dtype, scale);
    w2_scale.load_full_w2 = load_full_w2;
    let list = vec![
        spec("w13_weight_packed", &w13, DType::I32, Role::Weight).packed(packed_dim, pack),
        spec("w2_weight_packed", &w2, DType::I32, Role::Weight).packed(packed_dim, pack),
        spec("w13_weight_scale", &s13, dtype, scale),
        w2_scale,
        spec("w2_weight_shape", &[e, 2], dtype, Role::WeightShape),
        spec("w13_weight_shape", &[e, 2], dtype, Role::WeightShape),
        spec("w13_weight_g_idx", &[e, h], DType::I32, Role::GroupIndex),
        spec("w2_weight_g_idx", &[e, i], DType::I32, Role::GroupIndex),
        spec("w13_g_idx_sort_indices", &[e, h], DType::I32, Role::SortIndices),
        spec("w2_g_idx_sort_indices", &[e, i], DType::I32, Role::SortIndices),
    ];
    Ok(LayerParams {
        params: list,
        is_k_full: !act_order || shard.is_full(),
        num_groups_w13: Some(groups13),
        num_groups_w2: Some(groups2),
    })
}

/// The group size of W4A8-int8 experts, after the constructor's checks.
///
/// # Errors
/// [`LayerError::NotDynamicPerToken`], [`LayerError::Bits`] unless 4, [`LayerError::CpuOnly`].
pub fn w4a8_int8_group(
    weights: &CtArgs,
    inputs: &CtArgs,
    device: &Capability,
) -> Result<GroupSize, LayerError> {
    let method = "W4A8-int8 MoE";
    if inputs.strategy != CtStrategy::Token || !inputs.dynamic.truthy() {
        return Err(LayerError::NotDynamicPerToken { found: inputs.summary() });
    }
    if weights.num_bits != 4 {
        return Err(LayerError::Bits { method, bits: weights.num_bits, expected: "4" });
    }
    if !device.platform.is_cpu() {
        return Err(LayerError::CpuOnly { method, platform: device.platform });
    }
    match weights.group_size {
        None | Some(-1) => Ok(GroupSize::Channel),
        Some(g) if g > 0 => Ok(GroupSize::Of(g as usize)),
        Some(_) => Err(LayerError::Zero { what: "group_size" }),
    }
}

/// Parameters of W4A8-int8 experts: int8 codes `[E, N, K]`, scales `[E, N, groups]` in float32
/// (channel-wise) or bf16 (grouped), biases, and the placeholders that packing fills. Always
/// gated.
///
/// # Errors
/// [`LayerError::NotDivisible`] if K does not fill whole groups (upstream rounds down).
pub fn ct_w4a8_int8_moe(
    group_size: GroupSize,
    shard: &MoeShard,
) -> Result<LayerParams, LayerError> {
    let (e, h, i) = (shard.num_experts, shard.hidden_size, shard.intermediate_size_per_partition);
    let n13 = super::mul("w13", 2, i)?;
    let (g13, g2, dtype, kind) = match group_size {
        GroupSize::Channel => (1, 1, DType::F32, ScaleKind::Channel),
        GroupSize::Of(g) => (
            div("hidden_size", h, "group_size", g)?,
            div("intermediate_size_per_partition", i, "group_size", g)?,
            DType::BF16,
            ScaleKind::Group,
        ),
    };
    let mut list = vec![
        ParamSpec::new("w13_weight", vec![e, n13, h], DType::I8, Role::Weight),
        ParamSpec::new("w2_weight", vec![e, h, i], DType::I8, Role::Weight),
        ParamSpec::new("w13_weight_scale", vec![e, n13, g13], dtype, Role::Scale(kind)),
        ParamSpec::new("w2_weight_scale", vec![e, h, g2], dtype, Role::Scale(kind)),
    ];
    if shard.has_bias {
        let dtype = shard.params_dtype;
        list.push(ParamSpec::new("w13_bias", vec![e, n13], dtype, Role::Bias));
        list.push(ParamSpec::new("w2_bias", vec![e, h], dtype, Role::Bias));
    }
    for name in ["w13_weight_packed", "w2_weight_packed"] {
        // `torch.empty(0)`: the default type of an empty tensor that packing replaces.
        list.push(ParamSpec::new(name, vec![0], shard.params_dtype, Role::Placeholder));
    }
    Ok(LayerParams {
        params: list,
        is_k_full: true,
        num_groups_w13: Some(g13),
        num_groups_w2: Some(g2),
    })
}
