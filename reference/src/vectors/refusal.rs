//! Which configurations are left out: those that the reference itself refuses.

use std::collections::HashMap;

use crate::case::{CaseConfig, CaseError, CheckpointFormat, LinearConfig, MoeConfig, QuantConfig};
use crate::config::{
    ActivationScheme, CheckpointFormat as Stored, FloatContainer, Fp8Scheme, ScaleStrategy, Scheme,
    Wna16Scheme, ZeroPoints,
};
use crate::dims::{GroupSize, Shape};
use crate::layout::kleidi::RhsLayout;
use crate::layout::marlin::{InputDtype, Options, prepare};
use crate::scalar::ScalarType;
use crate::select::{
    Capability, LinearDesc, MoeActivation, MoeDesc, Options as Deployment, Selection,
    select_linear, select_moe,
};
use crate::{Error, Result};

/// A device on which no choice between Marlin and native FP8 hides a format: every Marlin kernel
/// runs on compute capability 8.9.
const DEVICE: Capability = Capability::cuda(8, 9);

/// Answers of the packing functions for what does not depend on a shape. They are costly to ask
/// and few.
#[derive(Debug, Default)]
pub(super) struct Probe {
    types: HashMap<(CheckpointFormat, ScalarType, ScalarType, Option<ScalarType>), Result<()>>,
}

impl Probe {
    /// `Err` with the reference's reason when `config` is not a case that can be made: the case
    /// reader's, backend selection's, or the packing functions'.
    pub(super) fn ask(&mut self, config: &CaseConfig) -> Result<()> {
        CaseConfig::from_json(config.op(), &config.to_json())?;
        match config {
            CaseConfig::Linear(c) => {
                self.ask_types(&c.quant)?;
                linear(c)
            }
            CaseConfig::Moe(c) => {
                self.ask_types(&c.quant)?;
                moe(c)
            }
            CaseConfig::DynQuant(c) => {
                let shape = Shape::new(c.size_k, c.size_n);
                RhsLayout::new(shape, c.group_size, c.packing.nr).map(|_| ())
            }
            CaseConfig::Router(_)
            | CaseConfig::Align(_)
            | CaseConfig::Preprocess(_)
            | CaseConfig::Method(_) => Ok(()),
        }
    }

    /// Whether the packing functions take these types, by packing one small matrix of them.
    fn ask_types(&mut self, q: &QuantConfig) -> Result<()> {
        let key = (q.checkpoint_format, q.weight_type, q.dtype, q.input_dtype);
        self.types.entry(key).or_insert_with(|| pack_small(q)).clone()
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
    let weight = super::weight(&mut super::Rng::new(0), "probe", &quant, shape, shape.size_k)?;
    let options =
        Options { input_dtype: InputDtype::from_config(q.input_dtype)?, ..Options::new(q.dtype) };
    prepare(&[weight], options).map(|_| ())
}

/// The config as selection knows it.
fn scheme(q: &QuantConfig) -> Scheme {
    let container = FloatContainer::CompressedTensors;
    match q.checkpoint_format {
        CheckpointFormat::Gptq | CheckpointFormat::Awq => {
            let awq = q.checkpoint_format == CheckpointFormat::Awq;
            Scheme::Wna16(Wna16Scheme {
                checkpoint_format: if awq { Stored::Awq } else { Stored::Gptq },
                weight_type: q.weight_type,
                group_size: q.group_size,
                desc_act: q.desc_act,
                actorder: None,
                zeros: if awq { ZeroPoints::Stored } else { ZeroPoints::Symmetric },
            })
        }
        CheckpointFormat::Fp8 => Scheme::Fp8(Fp8Scheme {
            container,
            strategy: match q.group_size {
                GroupSize::Channel => ScaleStrategy::Channel,
                GroupSize::Of(g) => ScaleStrategy::Block { block_n: g, block_k: g },
            },
            activations: ActivationScheme::None,
            scale_inv: false,
        }),
        CheckpointFormat::Mxfp8 => Scheme::Mxfp8 { container },
        CheckpointFormat::Nvfp4 => Scheme::Nvfp4 { container, weight_only: true },
        CheckpointFormat::Mxfp4 => Scheme::Mxfp4 { container },
    }
}

/// 8-bit activations are not asked about here: a layer's method takes fewer pairs of types than
/// the operators behind it, and a case is one operator's.
fn deployment() -> Deployment {
    Deployment { force_fp8_marlin: true, ..Deployment::default() }
}

fn chosen(selection: &Selection) -> Result<()> {
    match (selection.chosen, selection.refusals.first()) {
        (None, Some(refusal)) => {
            Err(Error::unsupported(refusal.backend.name(), refusal.reason.to_string()))
        }
        _ => Ok(()),
    }
}

fn linear(c: &LinearConfig) -> Result<()> {
    let desc = LinearDesc {
        input_size: super::whole_k(&c.quant, c.size_k),
        input_size_per_partition: c.size_k,
        output_size_per_partition: c.size_n,
        options: deployment(),
    };
    chosen(&select_linear(&scheme(&c.quant), &desc, &DEVICE))
}

fn moe(c: &MoeConfig) -> Result<()> {
    let name = c.activation.name();
    let activation = MoeActivation::from_name(name).ok_or_else(|| CaseError::ConfigValue {
        key: "activation".to_owned(),
        found: name.to_owned(),
        expected: "an activation that backends know".to_owned(),
    })?;
    let desc = MoeDesc {
        activation,
        apply_router_weight_on_input: c.apply_router_weight_on_input,
        options: deployment(),
        ..MoeDesc::new(c.hidden_size, c.intermediate_size)
    };
    chosen(&select_moe(&scheme(&c.quant), &desc, &DEVICE))
}
