//! Linear layers: GPTQ-Marlin, compressed-tensors WNA16, FP8, MXFP8.

use super::{LayerError, LayerParams, ParamSpec, Role, ScaleKind, div, mul};
use crate::config::{ActivationScheme, Fp8Scheme, GptqParams, ScaleStrategy, Wna16Scheme};
use crate::formats::blocks::BlockFormat;
use crate::num::dims::GroupSize;
use crate::num::scalar::ScalarType;
use crate::num::tensor::DType;
use crate::select::{Capability, check_marlin_supported, check_marlin_supports_shape};

/// How a linear layer is distributed over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Parallel {
    /// Every rank has the whole matrix.
    Replicated,
    /// Output features are cut.
    Column,
    /// Input features are cut.
    Row,
}

/// One logical matrix among those merged into a layer (q, k, v; gate, up).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OutputPart {
    /// Output features in the checkpoint.
    pub full: usize,
    /// Output features on one rank.
    pub per_rank: usize,
    /// Consecutive ranks that hold the same slice (key and value heads fewer than ranks).
    pub replicas: usize,
}

/// The part of a linear layer on one tensor-parallel rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearShard {
    /// Input features of the whole layer.
    pub input_size: usize,
    /// Input features on one rank.
    pub input_size_per_partition: usize,
    /// The merged matrices.
    pub parts: Vec<OutputPart>,
    /// How the layer is distributed.
    pub parallel: Parallel,
    /// Number of ranks.
    pub tp_size: usize,
}

impl LinearShard {
    /// A layer that every rank holds whole.
    pub fn replicated(input_size: usize, output_size: usize) -> Self {
        Self {
            input_size,
            input_size_per_partition: input_size,
            parts: vec![OutputPart { full: output_size, per_rank: output_size, replicas: 1 }],
            parallel: Parallel::Replicated,
            tp_size: 1,
        }
    }

    /// A column-parallel layer of one or several merged matrices.
    ///
    /// # Errors
    /// [`LayerError::NotDivisible`] unless `tp_size` divides every output size.
    pub fn column(
        input_size: usize,
        output_sizes: &[usize],
        tp_size: usize,
    ) -> Result<Self, LayerError> {
        let part = |&full: &usize| {
            let per_rank = div("output_size", full, "tp_size", tp_size)?;
            Ok(OutputPart { full, per_rank, replicas: 1 })
        };
        Ok(Self {
            input_size,
            input_size_per_partition: input_size,
            parts: output_sizes.iter().map(part).collect::<Result<_, LayerError>>()?,
            parallel: Parallel::Column,
            tp_size,
        })
    }

    /// A row-parallel layer.
    ///
    /// # Errors
    /// [`LayerError::NotDivisible`] unless `tp_size` divides `input_size`.
    pub fn row(input_size: usize, output_size: usize, tp_size: usize) -> Result<Self, LayerError> {
        Ok(Self {
            input_size_per_partition: div("input_size", input_size, "tp_size", tp_size)?,
            parallel: Parallel::Row,
            tp_size,
            ..Self::replicated(input_size, output_size)
        })
    }

    /// Merged query, key and value projections; key and value heads fewer than ranks repeat.
    ///
    /// # Errors
    /// [`LayerError::NotDivisible`] unless heads and ranks divide each other as upstream requires.
    pub fn qkv(
        hidden_size: usize,
        head_size: usize,
        heads: usize,
        kv_heads: usize,
        tp_size: usize,
    ) -> Result<Self, LayerError> {
        let local_heads = div("num_heads", heads, "tp_size", tp_size)?;
        let (local_kv, replicas) = if tp_size >= kv_heads {
            (1, div("tp_size", tp_size, "num_kv_heads", kv_heads)?)
        } else {
            (div("num_kv_heads", kv_heads, "tp_size", tp_size)?, 1)
        };
        let size = |heads| mul("output_size", heads, head_size);
        let kv = OutputPart { full: size(kv_heads)?, per_rank: size(local_kv)?, replicas };
        let q = OutputPart { full: size(heads)?, per_rank: size(local_heads)?, replicas: 1 };
        Ok(Self {
            input_size: hidden_size,
            input_size_per_partition: hidden_size,
            parts: vec![q, kv, kv],
            parallel: Parallel::Column,
            tp_size,
        })
    }

    /// Output features on one rank.
    ///
    /// # Errors
    /// [`LayerError::Overflow`].
    pub fn output_size_per_partition(&self) -> Result<usize, LayerError> {
        let sum = self.parts.iter().try_fold(0usize, |a, p| a.checked_add(p.per_rank));
        sum.ok_or(LayerError::Overflow { what: "output_size_per_partition" })
    }

    /// Whether each rank holds fewer input features than the layer has.
    pub fn is_row_parallel(&self) -> bool {
        self.input_size != self.input_size_per_partition
    }
}

/// The kernel's `is_k_full`: false if the rows of an act-order matrix are distributed over ranks
/// (upstream `marlin_is_k_full`).
pub const fn is_k_full(act_order: bool, is_row_parallel: bool) -> bool {
    !(act_order && is_row_parallel)
}

/// Whether every rank holds all scales: with act-order, or when a channel-wise layer is cut by
/// rows (upstream `marlin_repeat_scales_on_all_ranks`).
pub fn repeat_scales_on_all_ranks(
    act_order: bool,
    group_size: GroupSize,
    is_row_parallel: bool,
) -> bool {
    act_order || (group_size == GroupSize::Channel && is_row_parallel)
}

/// Rows of the scale table on one rank, and whether row parallelism cuts them.
fn scale_rows(
    act_order: bool,
    group_size: GroupSize,
    shard: &LinearShard,
) -> Result<(usize, bool), LayerError> {
    let cut = !repeat_scales_on_all_ranks(act_order, group_size, shard.is_row_parallel());
    let rows = match group_size {
        GroupSize::Channel => 1,
        GroupSize::Of(g) if cut => {
            div("input_size_per_partition", shard.input_size_per_partition, "group_size", g)?
        }
        GroupSize::Of(g) => div("input_size", shard.input_size, "group_size", g)?,
    };
    Ok((rows, cut))
}

/// Checks that Marlin can run the layer: type, group size, shape.
fn check_marlin(
    weight_type: ScalarType,
    group_size: GroupSize,
    zero_points: bool,
    eight_bit_activations: bool,
    shard: &LinearShard,
    device: &Capability,
) -> Result<usize, LayerError> {
    if eight_bit_activations && weight_type != ScalarType::UINT4B8 {
        return Err(LayerError::EightBitActivations { weight_type });
    }
    check_marlin_supported(weight_type, group_size, zero_points, device)?;
    let n = shard.output_size_per_partition()?;
    let (k, full_k) = (shard.input_size_per_partition, shard.input_size);
    check_marlin_supports_shape(n, k, full_k, group_size)?;
    Ok(n)
}

/// Parameters of a GPTQ-Marlin linear layer: `qweight` `[K/pack, N]`, `g_idx` `[K]`, `scales`
/// `[G, N]`, `qzeros` `[G, N/pack]`, per rank.
///
/// `eight_bit_activations`: activations in int8 or e4m3fn.
///
/// # Errors
/// [`LayerError::Marlin`] with the type, group size or shape that Marlin refuses;
/// [`LayerError::EightBitActivations`]; [`LayerError::NotDivisible`] when the group does not
/// divide K.
pub fn gptq_linear(
    params: &GptqParams,
    shard: &LinearShard,
    params_dtype: DType,
    eight_bit_activations: bool,
    device: &Capability,
) -> Result<LayerParams, LayerError> {
    let (ty, group) = (params.weight_type, params.group_size);
    let n = check_marlin(ty, group, false, eight_bit_activations, shard, device)?;
    let pack = 32 / params.bits as usize;
    let k = shard.input_size_per_partition;
    let (rows, cut) = scale_rows(params.desc_act, group, shard)?;
    let input = cut.then_some(0);
    let kind = if cut { ScaleKind::Group } else { ScaleKind::Channel };
    let list = vec![
        ParamSpec::new("qweight", vec![k / pack, n], DType::I32, Role::Weight)
            .dims(Some(0), Some(1))
            .packed(0, pack),
        ParamSpec::new("g_idx", vec![k], DType::I32, Role::GroupIndex).dims(Some(0), None),
        ParamSpec::new("scales", vec![rows, n], params_dtype, Role::Scale(kind))
            .dims(input, Some(1)),
        ParamSpec::new("qzeros", vec![rows, n / pack], DType::I32, Role::Scale(kind))
            .dims(input, Some(1))
            .packed(1, pack),
    ];
    Ok(LayerParams::linear(list, is_k_full(params.desc_act, shard.is_row_parallel())))
}

/// Parameters of a compressed-tensors WNA16 linear layer: `weight_packed` `[N, K/pack]`,
/// `weight_scale` `[N, G]`, `weight_shape` `[2]`, and, if applicable, `weight_zero_point`
/// `[N/pack, G]` and `weight_g_idx` `[K]`.
///
/// # Errors
/// As [`gptq_linear`].
pub fn ct_wna16_linear(
    scheme: &Wna16Scheme,
    shard: &LinearShard,
    params_dtype: DType,
    device: &Capability,
) -> Result<LayerParams, LayerError> {
    let (ty, group) = (scheme.weight_type, scheme.group_size);
    let n = check_marlin(ty, group, !scheme.symmetric(), false, shard, device)?;
    let pack = 32 / scheme.bits() as usize;
    let k = shard.input_size_per_partition;
    let (rows, cut) = scale_rows(scheme.desc_act, group, shard)?;
    let input = cut.then_some(1);
    let kind = if cut { ScaleKind::Group } else { ScaleKind::Channel };
    let mut list = vec![
        ParamSpec::new("weight_packed", vec![n, k / pack], DType::I32, Role::Weight)
            .dims(Some(1), Some(0))
            .packed(1, pack),
        ParamSpec::new("weight_scale", vec![n, rows], params_dtype, Role::Scale(kind))
            .dims(input, Some(0)),
        ParamSpec::new("weight_shape", vec![2], DType::I64, Role::WeightShape),
    ];
    if !scheme.symmetric() {
        let zeros = vec![n / pack, rows];
        list.push(
            ParamSpec::new("weight_zero_point", zeros, DType::I32, Role::Scale(kind))
                .dims(input, Some(0))
                .packed(0, pack),
        );
    }
    if scheme.desc_act {
        list.push(
            ParamSpec::new("weight_g_idx", vec![k], DType::I32, Role::GroupIndex)
                .dims(Some(0), None),
        );
    }
    Ok(LayerParams::linear(list, is_k_full(scheme.desc_act, shard.is_row_parallel())))
}

/// Parameters of an FP8 linear layer: `weight` `[N, K]` e4m3fn, `weight_scale` per merged matrix
/// `[parts]` or per channel `[N, 1]`, or per block under `weight_scale_inv` (FP8 files) or
/// `weight_scale` (others) `[ceil(N / block_n), ceil(K / block_k)]`; `input_scale` `[parts]` when
/// activations are static.
///
/// # Errors
/// [`LayerError::NotDivisible`] if a block would cross ranks or merged matrices (upstream
/// `validate_fp8_block_shape`; the last merged matrix may end inside a block when N is not cut);
/// [`LayerError::StrategyPair`] for block scales with static activations.
pub fn fp8_linear(scheme: &Fp8Scheme, shard: &LinearShard) -> Result<LayerParams, LayerError> {
    let (n, k) = (shard.output_size_per_partition()?, shard.input_size_per_partition);
    let parts = shard.parts.len();
    let is_static = scheme.activations == ActivationScheme::StaticTensor;
    let mut list = vec![
        ParamSpec::new("weight", vec![n, k], DType::F8E4M3, Role::Weight).dims(Some(1), Some(0)),
    ];
    list.push(match scheme.strategy {
        ScaleStrategy::Tensor => {
            ParamSpec::new("weight_scale", vec![parts], DType::F32, Role::Scale(ScaleKind::Tensor))
        }
        ScaleStrategy::Channel => {
            ParamSpec::new("weight_scale", vec![n, 1], DType::F32, Role::Scale(ScaleKind::Channel))
                .dims(None, Some(0))
        }
        ScaleStrategy::Block { block_n, block_k } => {
            if is_static {
                return Err(LayerError::StrategyPair {
                    weights: "block".to_owned(),
                    activations: "static".to_owned(),
                });
            }
            check_blocks(shard, block_n, block_k)?;
            let name = if scheme.scale_inv { "weight_scale_inv" } else { "weight_scale" };
            let shape = vec![n.div_ceil(block_n), k.div_ceil(block_k)];
            let mut spec = ParamSpec::new(name, shape, DType::F32, Role::Scale(ScaleKind::Block))
                .dims(Some(1), Some(0));
            spec.block = Some([block_n, block_k]);
            spec
        }
    });
    if is_static {
        list.push(ParamSpec::new("input_scale", vec![parts], DType::F32, Role::InputScale));
    }
    Ok(LayerParams::linear(list, true))
}

fn check_blocks(shard: &LinearShard, block_n: usize, block_k: usize) -> Result<(), LayerError> {
    if block_n == 0 || block_k == 0 {
        return Err(LayerError::Zero { what: "block" });
    }
    let tp = shard.tp_size;
    if tp > 1 && shard.parallel == Parallel::Row {
        div("input_size_per_partition", shard.input_size_per_partition, "block_k", block_k)?;
    }
    let n_is_cut = tp > 1 && shard.parallel == Parallel::Column;
    let merged = shard.parts.len() > 1;
    let checked = match (n_is_cut, merged) {
        (true, _) => &shard.parts[..],
        (false, true) => &shard.parts[..shard.parts.len() - 1],
        (false, false) => &[],
    };
    for part in checked {
        div("output_partition_size", part.per_rank, "block_n", block_n)?;
    }
    Ok(())
}

/// Parameters of a linear layer in a Microscaling format: `weight` `[N, K]` (two codes in a byte:
/// `[N, K/2]`), `weight_scale` `[N, K/32]` e8m0 in bytes.
///
/// # Errors
/// [`LayerError::NotDivisible`] unless K on this rank is a multiple of 32.
pub fn mx_linear(format: &BlockFormat, shard: &LinearShard) -> Result<LayerParams, LayerError> {
    let (n, k) = (shard.output_size_per_partition()?, shard.input_size_per_partition);
    let groups = div("input_size_per_partition", k, "block", format.block)?;
    let pack = format.codes_per_byte();
    let weight = ParamSpec::new("weight", vec![n, k / pack], format.weight_dtype(), Role::Weight)
        .dims(Some(1), Some(0));
    let list = vec![
        if pack > 1 { weight.packed(1, pack) } else { weight },
        ParamSpec::new("weight_scale", vec![n, groups], DType::U8, Role::Scale(ScaleKind::Group))
            .dims(Some(1), Some(0)),
    ];
    Ok(LayerParams::linear(list, true))
}
