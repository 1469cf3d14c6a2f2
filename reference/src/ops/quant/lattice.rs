//! Every combination of formats, types, group sizes and ranks that the reference accepts.

use std::cell::RefCell;
use std::collections::HashMap;

use crate::config::{
    ActivationScheme, FloatContainer, Fp8Scheme, ScaleStrategy, Scheme, Wna16Scheme, ZeroPoints,
};
use crate::formats;
use crate::layers::{ParallelStyle, TensorParallel};
use crate::layouts::marlin::{InputDtype, Options, prepare};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
use crate::ops::CaseConfig;
use crate::ops::axes::{Space, shown};
use crate::ops::draw::Rng;
use crate::ops::quant::{CheckpointFormat, QuantConfig, weight};
use crate::ops::tensors::{FLAGS, HALF};
use crate::select::{Capability, Options as Deployment};
use crate::{Result, act_order};

const INPUTS: [Option<ScalarType>; 3] =
    [None, Some(ScalarType::INT8), Some(ScalarType::FLOAT8_E4M3FN)];

/// The group sizes of the kernels, and 16, which only block formats use.
const GROUPS: [GroupSize; 5] = [
    GroupSize::Channel,
    GroupSize::Of(16),
    GroupSize::Of(32),
    GroupSize::Of(64),
    GroupSize::Of(128),
];

/// The axes of the quantized matrices of `linear` and `moe`: formats, types, groups and orders, of
/// which upstream has kernels for some combinations. `quant` is where a config has them.
pub(crate) fn quant_axes<C>(space: Space<C>, quant: fn(&mut C) -> &mut QuantConfig) -> Space<C>
where
    C: Clone + Into<CaseConfig> + Send + Sync + 'static,
{
    let weights = formats::ALL.iter().flat_map(|&format| {
        let of = move |&ty: &ScalarType| (format!("{format} {ty}"), (format, ty));
        format.weight_types().iter().map(of)
    });
    let inputs =
        INPUTS.map(|input| (input.map_or("16 bits".to_owned(), |ty| ty.to_string()), input));
    let probe = RefCell::new(Probe::default());
    let types = ["weight", "dtype", "input_dtype"];
    let copy = move |c: &C| quant(&mut c.clone()).clone();
    space
        .axis("weight", weights, move |c, &(format, ty)| {
            (quant(c).checkpoint_format, quant(c).weight_type) = (format, ty);
        })
        .axis("dtype", shown(HALF), move |c, &ty| quant(c).dtype = ty)
        .axis("input_dtype", inputs, move |c, &ty| quant(c).input_dtype = ty)
        .axis("group_size", shown(GROUPS), move |c, &size| quant(c).group_size = size)
        .axis("desc_act", shown(FLAGS), move |c, &flag| quant(c).desc_act = flag)
        .illegal("upstream has no kernel for these types", &types, move |c| {
            !probe.borrow_mut().takes(&copy(c))
        })
        .illegal("the format has groups of one size", &["weight", "group_size"], move |c| {
            let q = copy(c);
            q.checkpoint_format.fixed_group().is_some_and(|fixed| fixed != q.group_size)
        })
        .illegal("only GPTQ's files have a g_idx", &["weight", "desc_act"], move |c| {
            let q = copy(c);
            q.desc_act && !q.checkpoint_format.has_act_order()
        })
}

/// Every tensor-parallel rank of the lattices, with labels.
pub(crate) fn ranks(
    styles: &[(usize, usize, ParallelStyle)],
) -> Vec<(String, Option<TensorParallel>)> {
    let of = |&(size, rank, style): &(usize, usize, ParallelStyle)| {
        (format!("{} {rank}/{size}", style.name()), parallel(size, rank, style))
    };
    std::iter::once(("whole".to_owned(), None)).chain(styles.iter().map(of)).collect()
}

/// Sets what follows from the other keys: whether a rank holds the whole K.
pub(crate) fn settle(quant: &mut QuantConfig) {
    let row = quant.tensor_parallel.is_some_and(|tp| tp.style == ParallelStyle::Row);
    quant.is_k_full = act_order::is_k_full(quant.desc_act, row);
}

/// The first of the formats, with channel scales.
pub(crate) fn plain_quant() -> QuantConfig {
    let format = formats::ALL[0];
    QuantConfig {
        checkpoint_format: format,
        weight_type: format.weight_types()[0],
        dtype: HALF[0],
        input_dtype: None,
        group_size: GroupSize::Channel,
        desc_act: false,
        is_k_full: true,
        has_bias: false,
        tensor_parallel: None,
        convention: None,
    }
}

/// K × N of one rank. Includes K = 128, where a group of 128 covers all of K, and N an odd multiple
/// of 64.
pub(crate) const LINEAR_SHAPES: [(usize, usize); 6] =
    [(128, 64), (128, 192), (128, 320), (256, 64), (256, 128), (384, 192)];

pub(crate) const fn parallel(
    size: usize,
    rank: usize,
    style: ParallelStyle,
) -> Option<TensorParallel> {
    Some(TensorParallel { size, rank, style })
}

/// Types, group sizes and orders, in every combination.
pub(crate) fn quants() -> impl Iterator<Item = QuantConfig> {
    formats::ALL.iter().flat_map(|&checkpoint_format| {
        checkpoint_format.weight_types().iter().flat_map(move |&weight_type| {
            HALF.into_iter().flat_map(move |dtype| {
                INPUTS.into_iter().flat_map(move |input_dtype| {
                    GROUPS.into_iter().flat_map(move |group_size| {
                        FLAGS.into_iter().map(move |desc_act| QuantConfig {
                            checkpoint_format,
                            weight_type,
                            dtype,
                            input_dtype,
                            group_size,
                            desc_act,
                            is_k_full: true,
                            has_bias: false,
                            tensor_parallel: None,
                            convention: None,
                        })
                    })
                })
            })
        })
    })
}

/// `quant` on a rank; the slice of a row-parallel rank may cut groups.
pub(crate) fn on_rank(
    quant: &QuantConfig,
    tp: Option<TensorParallel>,
    has_bias: bool,
) -> QuantConfig {
    let row = tp.is_some_and(|tp| tp.style == ParallelStyle::Row);
    QuantConfig {
        is_k_full: act_order::is_k_full(quant.desc_act, row),
        has_bias,
        tensor_parallel: tp,
        ..quant.clone()
    }
}

/// A device on which every Marlin kernel runs, so that native FP8 hides no format: compute
/// capability 8.9.
pub(crate) const DEVICE: Capability = Capability::cuda(8, 9);

/// Cached results of the packing functions that do not depend on the shape: few and costly.
#[derive(Debug, Default)]
pub(crate) struct Probe {
    types: HashMap<(CheckpointFormat, ScalarType, ScalarType, Option<ScalarType>), bool>,
}

impl Probe {
    /// Whether the packing functions accept these types, tested with one small matrix.
    pub(crate) fn takes(&mut self, q: &QuantConfig) -> bool {
        let key = (q.checkpoint_format, q.weight_type, q.dtype, q.input_dtype);
        *self.types.entry(key).or_insert_with(|| pack_small(q).is_ok())
    }
}

fn pack_small(q: &QuantConfig) -> Result<()> {
    let shape = Shape::new(128, 64);
    let quant = QuantConfig {
        group_size: q.checkpoint_format.fixed_group().unwrap_or(GroupSize::Channel),
        desc_act: false,
        tensor_parallel: None,
        ..q.clone()
    };
    let weight = weight(&mut Rng::new(0), "probe", &quant, shape, shape.size_k)?;
    let options =
        Options { input_dtype: InputDtype::from_config(q.input_dtype)?, ..Options::new(q.dtype) };
    prepare(&[weight], options).map(|_| ())
}

/// The config as a scheme for kernel selection.
pub(crate) fn scheme(q: &QuantConfig) -> Scheme {
    let container = FloatContainer::CompressedTensors;
    match q.checkpoint_format {
        CheckpointFormat::Int(format) => Scheme::Wna16(Wna16Scheme {
            checkpoint_format: format,
            weight_type: q.weight_type,
            group_size: q.group_size,
            desc_act: q.desc_act,
            actorder: None,
            zeros: match q.has_zero_points() {
                true => ZeroPoints::Stored,
                false => ZeroPoints::Symmetric,
            },
        }),
        CheckpointFormat::Fp8 => Scheme::Fp8(Fp8Scheme {
            container,
            strategy: match q.group_size {
                GroupSize::Channel => ScaleStrategy::Channel,
                GroupSize::Of(g) => ScaleStrategy::Block { block_n: g, block_k: g },
            },
            activations: ActivationScheme::None,
            scale_inv: false,
        }),
        CheckpointFormat::Block(format) => Scheme::Block { format, container, weight_only: true },
    }
}

/// Ignores 8-bit activations: a layer's method accepts fewer pairs of types than its operators, and
/// a case describes one operator.
pub(crate) fn deployment() -> Deployment {
    Deployment { force_fp8_marlin: true, ..Deployment::default() }
}
