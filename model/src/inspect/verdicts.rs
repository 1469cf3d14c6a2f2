//! The layers that each kernel format takes and that this project's CUDA kernels multiply.

use std::collections::BTreeMap;

use marlinspike::select::{CUDA_CAPABILITY, CUDA_WEIGHTS, Capability, CudaWeight};

use super::{Layer, Options};
use crate::convert::parallel::Ranks;
use crate::convert::plan::{ConversionPlan, refused_name};
use crate::convert::settings::{Format, Settings};
use crate::convert::target::marlin;
use crate::model::Model;
use crate::model::layers::Layers;

/// The verdict of one kernel format, or of the CUDA kernels, on every layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// The format's name, or `cuda`.
    pub target: &'static str,
    /// Its short title for tables.
    pub column: &'static str,
    /// For each layer, in order, the reasons against it; empty if the layer is taken.
    pub reasons: Vec<Vec<String>>,
}

impl Verdict {
    /// Number of layers taken.
    pub fn taken(&self) -> usize {
        self.reasons.iter().filter(|r| r.is_empty()).count()
    }
}

/// The verdicts on `layers`, which were built from `groups`.
pub(super) fn all(
    model: &Model<'_>,
    groups: &Layers,
    layers: &[Layer],
    options: &Options,
) -> Vec<Verdict> {
    let mut all: Vec<Verdict> = Format::ALL
        .iter()
        .map(|&format| Verdict {
            target: format.name(),
            column: format.descriptor().column,
            reasons: match format == marlin::FORMAT {
                // The kernel selection already considers the device.
                true => layers.iter().map(|l| l.reasons.clone()).collect(),
                false => planned(model, groups, format, options),
            },
        })
        .collect();
    let reasons =
        layers.iter().map(|l| cuda(l, options.device).err().into_iter().collect()).collect();
    all.push(Verdict { target: "cuda", column: "CUDA", reasons });
    all
}

/// The reasons with which a conversion would refuse the layers.
fn planned(
    model: &Model<'_>,
    groups: &Layers,
    format: Format,
    options: &Options,
) -> Vec<Vec<String>> {
    let tp = Ranks { size: options.tp_size, rank: 0 };
    let settings = Settings { tp, device: options.device, ..Settings::new(format) };
    let plan = match ConversionPlan::new(model, groups, &settings) {
        Ok(plan) => plan,
        Err(error) => return vec![vec![error.to_string()]; groups.stacks.len()],
    };
    let refused: BTreeMap<&str, &Vec<String>> =
        plan.refused.iter().map(|r| (r.module.as_str(), &r.reasons)).collect();
    let of = |stack| refused.get(refused_name(stack).as_str()).map_or(Vec::new(), |r| r.to_vec());
    groups.stacks.iter().map(of).collect()
}

/// Whether this project's CUDA kernels multiply a layer: they read Marlin's format.
fn cuda(layer: &Layer, device: Capability) -> Result<(), String> {
    let (major, minor) = CUDA_CAPABILITY;
    if !device.at_least(major, minor) {
        return Err(format!("found {device}, expected CUDA {major}.{minor} or newer"));
    }
    if layer.chosen.is_none() {
        return Err("Marlin's format, which these kernels read, does not take it".to_owned());
    }
    let kinds: Vec<_> = CUDA_WEIGHTS.iter().filter(|w| w.ty.name() == layer.weight_type).collect();
    let takes =
        |w: &&CudaWeight| layer.act_order && w.act_order || w.groups.contain(layer.group_size);
    if kinds.iter().any(takes) {
        return Ok(());
    }
    let expected = match kinds.first() {
        Some(kind) => kind.groups.to_string(),
        None => "uint4b8, uint8b128, uint4, float8_e4m3fn or float4_e2m1f".to_owned(),
    };
    let (ty, group_size) = (&layer.weight_type, layer.group_size);
    Err(format!("found {ty} in groups of {group_size}, expected {expected}"))
}
