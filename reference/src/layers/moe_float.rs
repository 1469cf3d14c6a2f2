//! compressed-tensors floating-point experts: block formats with a global scale, and W8A8-FP8.

use super::{LayerError, LayerParams, MoeShard, ParamSpec, Role, ScaleKind, div, mul};
use crate::config::{ActivationScheme, Fp8Scheme, ScaleStrategy};
use crate::formats::blocks::BlockFormat;
use crate::num::tensor::DType;

/// Parameters of experts in a block format with a global scale: `[E, N, K/2]` bytes of two values,
/// `[E, N, K/block]` scales, one global scale and one activation scale per stacked matrix.
///
/// # Errors
/// [`LayerError::NotDivisible`] unless K is whole blocks (upstream rounds down).
pub fn ct_block_moe(format: &BlockFormat, shard: &MoeShard) -> Result<LayerParams, LayerError> {
    let (e, h, i) = (shard.num_experts, shard.hidden_size, shard.intermediate_size_per_partition);
    let (n13, shards) = (shard.w13_size()?, shard.w13_num_shards());
    let g13 = div("hidden_size", h, "group_size", format.block)?;
    let g2 = div("intermediate_size_per_partition", i, "group_size", format.block)?;
    let (codes, pack) = (format.weight_dtype(), format.codes_per_byte());
    let scales = format.kernel_scale_dtype();
    let (group, tensor) = (Role::Scale(ScaleKind::Group), Role::Scale(ScaleKind::Tensor));
    let list = vec![
        ParamSpec::new("w13_weight_packed", vec![e, n13, h / pack], codes, Role::Weight)
            .packed(2, pack),
        ParamSpec::new("w2_weight_packed", vec![e, h, i / pack], codes, Role::Weight)
            .packed(2, pack),
        ParamSpec::new("w13_weight_scale", vec![e, n13, g13], scales, group),
        ParamSpec::new("w2_weight_scale", vec![e, h, g2], scales, group),
        ParamSpec::new("w13_weight_global_scale", vec![e, shards], DType::F32, tensor),
        ParamSpec::new("w2_weight_global_scale", vec![e], DType::F32, tensor),
        ParamSpec::new("w13_input_global_scale", vec![e, shards], DType::F32, tensor),
        ParamSpec::new("w2_input_global_scale", vec![e], DType::F32, tensor),
    ];
    Ok(LayerParams {
        params: list,
        is_k_full: true,
        num_groups_w13: Some(g13),
        num_groups_w2: Some(g2),
    })
}

/// Parameters of W8A8-FP8 experts: `[E, N, K]` e4m3fn; scales per tensor (`[E, 2]` for the two
/// of w13, `[E]`), per channel `[E, N, 1]`, or per block; activation scales `[E]` when static.
///
/// # Errors
/// [`LayerError::StrategyPair`] unless the scales are tensor with tensor, channel with token, or
/// blocks, and for blocks or channels with static activations;
/// [`LayerError::NotDivisible`] unless block_n divides the intermediate size per rank, and, with
/// several ranks, block_k too.
pub fn ct_fp8_moe(scheme: &Fp8Scheme, shard: &MoeShard) -> Result<LayerParams, LayerError> {
    use ActivationScheme as A;
    let pair = || LayerError::StrategyPair {
        weights: format!("{:?}", scheme.strategy),
        activations: format!("{:?}", scheme.activations),
    };
    let fits = match scheme.strategy {
        ScaleStrategy::Tensor => matches!(scheme.activations, A::StaticTensor | A::DynamicTensor),
        ScaleStrategy::Channel => scheme.activations == A::DynamicToken,
        ScaleStrategy::Block { .. } => !matches!(scheme.activations, A::None | A::StaticTensor),
    };
    if !fits {
        return Err(pair());
    }
    let (e, h, i) = (shard.num_experts, shard.hidden_size, shard.intermediate_size_per_partition);
    let (n13, shards) = (shard.w13_size()?, shard.w13_num_shards());
    let mut list = vec![
        ParamSpec::new("w13_weight", vec![e, n13, h], DType::F8E4M3, Role::Weight),
        ParamSpec::new("w2_weight", vec![e, h, i], DType::F8E4M3, Role::Weight),
    ];
    let (kind, s13, s2) = match scheme.strategy {
        ScaleStrategy::Tensor => (ScaleKind::Tensor, vec![e, shards], vec![e]),
        ScaleStrategy::Channel => (ScaleKind::Channel, vec![e, n13, 1], vec![e, h, 1]),
        ScaleStrategy::Block { block_n, block_k } => {
            let rows = div("intermediate_size_per_partition", i, "block_n", block_n)?;
            if block_k == 0 {
                return Err(LayerError::BlockMissing);
            }
            if shard.tp_size > 1 {
                div("intermediate_size_per_partition", i, "block_k", block_k)?;
            }
            let s13 = vec![e, mul("w13", shards, rows)?, h.div_ceil(block_k)];
            (ScaleKind::Block, s13, vec![e, h.div_ceil(block_n), i.div_ceil(block_k)])
        }
    };
    for (name, shape) in [("w13_weight_scale", s13), ("w2_weight_scale", s2)] {
        let mut spec = ParamSpec::new(name, shape, DType::F32, Role::Scale(kind));
        if let ScaleStrategy::Block { block_n, block_k } = scheme.strategy {
            spec.block = Some([block_n, block_k]);
        }
        list.push(spec);
    }
    if scheme.activations == A::StaticTensor {
        for name in ["w13_input_scale", "w2_input_scale"] {
            list.push(ParamSpec::new(name, vec![e], DType::F32, Role::InputScale));
        }
    }
    Ok(LayerParams { params: list, is_k_full: true, num_groups_w13: None, num_groups_w2: None })
}
