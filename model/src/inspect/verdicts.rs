//! The layers that each kernel format takes and that this project's CUDA kernels multiply.

use std::collections::BTreeMap;

use marlinspike::num::dims::GroupSize;
use marlinspike::select::Capability;

use super::{Layer, Options};
use crate::convert::parallel::Ranks;
use crate::convert::plan::{Plan, refused_name};
use crate::convert::settings::{Format, Settings};
use crate::model::Model;
use crate::model::layers::Layers;

/// Least compute capability of this project's CUDA kernels.
pub const CUDA_CAPABILITY: (u32, u32) = (8, 0);

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
            column: format.column(),
            reasons: match format {
                // The kernel selection already considers the device.
                Format::Marlin => layers.iter().map(|l| l.reasons.clone()).collect(),
                _ => planned(model, groups, format, options),
            },
        })
        .collect();
    let reasons =
        layers.iter().map(|l| cuda(l, options.device).err().into_iter().collect()).collect();
    all.push(Verdict { target: "cuda", column: "CUDA here", reasons });
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
    let plan = match Plan::new(model, groups, &settings) {
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
    let multiple_of_64 = |g: usize| g.is_multiple_of(64);
    let (fits, expected) = match (layer.weight_type.as_str(), layer.group_size) {
        ("uint4b8" | "uint8b128", _) if layer.act_order => (true, ""),
        ("uint4b8" | "uint8b128" | "uint4", GroupSize::Of(g)) => {
            (g == 32 || multiple_of_64(g), "groups of 32, of a multiple of 64, or of all k")
        }
        ("float8_e4m3fn", GroupSize::Of(g)) => {
            (g == 32 || multiple_of_64(g), "groups of a multiple of 64, or of all k")
        }
        ("uint4b8" | "uint8b128" | "uint4" | "float8_e4m3fn" | "float4_e2m1f", _) => (true, ""),
        _ => (false, "uint4b8, uint8b128, uint4, float8_e4m3fn or float4_e2m1f"),
    };
    match fits {
        true => Ok(()),
        false => {
            let (ty, group_size) = (&layer.weight_type, layer.group_size);
            Err(format!("found {ty} in groups of {group_size}, expected {expected}"))
        }
    }
}
