//! The part of a MoE layer on one rank, and GPTQ-Marlin experts.

use super::{LayerError, LayerParams, ParamSpec, Role, ScaleKind, div, mul};
use crate::config::GptqParams;
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;
use crate::num::tensor::DType;

/// The part of a MoE layer on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeShard {
    /// Experts on this rank.
    pub num_experts: usize,
    /// Hidden size.
    pub hidden_size: usize,
    /// Intermediate size of the whole layer.
    pub intermediate_size_full: usize,
    /// Intermediate size on this rank.
    pub intermediate_size_per_partition: usize,
    /// Tensor-parallel ranks that share the intermediate size.
    pub tp_size: usize,
    /// Whether w13 holds gate and up (otherwise only up).
    pub is_act_and_mul: bool,
    /// Whether experts have biases.
    pub has_bias: bool,
    /// 16-bit type of scales and biases.
    pub params_dtype: DType,
}

impl MoeShard {
    /// A gated layer without bias, in bf16.
    ///
    /// # Errors
    /// [`LayerError::NotDivisible`] unless `tp_size` divides the intermediate size.
    pub fn new(
        num_experts: usize,
        hidden_size: usize,
        intermediate_size: usize,
        tp_size: usize,
    ) -> Result<Self, LayerError> {
        Ok(Self {
            num_experts,
            hidden_size,
            intermediate_size_full: intermediate_size,
            intermediate_size_per_partition: div(
                "intermediate_size",
                intermediate_size,
                "tp_size",
                tp_size,
            )?,
            tp_size,
            is_act_and_mul: true,
            has_bias: false,
            params_dtype: DType::BF16,
        })
    }

    /// Matrices stacked in w13: 2 (gate, up), or 1.
    pub const fn w13_num_shards(&self) -> usize {
        if self.is_act_and_mul { 2 } else { 1 }
    }

    /// Output features of w13 on this rank.
    pub(super) fn w13_size(&self) -> Result<usize, LayerError> {
        mul("w13", self.w13_num_shards(), self.intermediate_size_per_partition)
    }

    /// Whether this rank has the whole intermediate size.
    pub const fn is_full(&self) -> bool {
        self.intermediate_size_per_partition == self.intermediate_size_full
    }
}

/// Parameters of GPTQ-Marlin experts, `[E, K/pack, N]` per matrix. `w13` always holds gate and
/// up: the method has no ungated form.
///
/// With act-order every rank holds all scales of w2, since its rows may belong to any group. The
/// zero points have the 16-bit type of the scales, not int32 as in linear layers; they are never
/// read.
///
/// # Errors
/// [`LayerError::Bits`] unless 4 or 8; [`LayerError::EightBitActivations`];
/// [`LayerError::NotDivisible`] if a size does not fill whole groups or words (upstream rounds down
/// and fails when it loads the tensor).
pub fn gptq_moe(
    params: &GptqParams,
    shard: &MoeShard,
    eight_bit_activations: bool,
) -> Result<LayerParams, LayerError> {
    let weight_type = match params.bits {
        4 => ScalarType::UINT4B8,
        8 => ScalarType::UINT8B128,
        bits => {
            return Err(LayerError::Bits { method: "GPTQ-Marlin MoE", bits, expected: "4 or 8" });
        }
    };
    if eight_bit_activations && weight_type != ScalarType::UINT4B8 {
        return Err(LayerError::EightBitActivations { weight_type });
    }
    let pack = 32 / params.bits as usize;
    let (e, h) = (shard.num_experts, shard.hidden_size);
    let i = shard.intermediate_size_per_partition;
    let n13 = mul("w13", 2, i)?;
    let (groups13, groups2, kind) = match params.group_size {
        GroupSize::Channel => (1, 1, ScaleKind::Channel),
        GroupSize::Of(g) => {
            let (what, size) = if params.desc_act {
                ("intermediate_size", shard.intermediate_size_full)
            } else {
                ("intermediate_size_per_partition", i)
            };
            let groups13 = div("hidden_size", h, "group_size", g)?;
            (groups13, div(what, size, "group_size", g)?, ScaleKind::Group)
        }
    };
    let k13 = div("hidden_size", h, "pack_factor", pack)?;
    let k2 = div("intermediate_size_per_partition", i, "pack_factor", pack)?;
    let z13 = div("w13", n13, "pack_factor", pack)?;
    let scale = Role::Scale(kind);
    let dtype = shard.params_dtype;
    let spec = |name, shape: &[usize], dtype, role| {
        let mut spec = ParamSpec::new(name, shape.to_vec(), dtype, role);
        spec.is_transposed = true;
        spec
    };
    let w2_scale = |name, shape: &[usize]| {
        let mut spec = spec(name, shape, dtype, scale);
        spec.load_full_w2 = params.desc_act;
        spec
    };
    let list = vec![
        spec("w13_qweight", &[e, k13, n13], DType::I32, Role::Weight).packed(1, pack),
        spec("w2_qweight", &[e, k2, h], DType::I32, Role::Weight).packed(1, pack),
        spec("w13_scales", &[e, groups13, n13], dtype, scale),
        w2_scale("w2_scales", &[e, groups2, h]),
        spec("w13_qzeros", &[e, groups13, z13], dtype, scale).packed(2, pack),
        w2_scale("w2_qzeros", &[e, groups2, k13]).packed(2, pack),
        spec("w13_g_idx", &[e, h], DType::I32, Role::GroupIndex),
        spec("w2_g_idx", &[e, i], DType::I32, Role::GroupIndex),
        spec("w13_g_idx_sort_indices", &[e, h], DType::I32, Role::SortIndices),
        spec("w2_g_idx_sort_indices", &[e, i], DType::I32, Role::SortIndices),
    ];
    Ok(LayerParams {
        params: list,
        is_k_full: !params.desc_act || shard.is_full(),
        num_groups_w13: Some(groups13),
        num_groups_w2: Some(groups2),
    })
}
