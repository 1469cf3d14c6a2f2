//! Every combination of formats, types, group sizes and ranks that the reference accepts.

use std::collections::HashMap;

use crate::config::{
    ActivationScheme, FloatContainer, Fp8Scheme, ScaleStrategy, Scheme, Wna16Scheme, ZeroPoints,
};
use crate::formats;
use crate::layers::{ParallelStyle, TensorParallel};
use crate::layouts::marlin::{InputDtype, Options, prepare};
use crate::num::dims::{GroupSize, Shape};
use crate::num::scalar::ScalarType;
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
