//! A layer of a folder that `convert` has written for Marlin or FlashInfer, brought back to the hub: what
//! runs is what the kernel's bytes stand for.

use marlinspike::config::{QuantConfig, Scheme};
use marlinspike::formats;
use marlinspike::layouts::flashinfer::PackedExperts;
use marlinspike::layouts::marlin::{ScalePermutation, Stored};
use marlinspike::method::Quantizer;
use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use marlinspike::num::tensor::Tensor;
use marlinspike::prepare::gate_up::GateUp;
use marlinspike::prepare::pad::{unpad, unpad_w13};
use marlinspike::weight::{Groups, Table, Weight};
use marlinspike::{Error, Result};
use rayon::prelude::*;
use serde_json::Value;

use super::load::{Loaded, dynamic};
use super::parts::{Kind, Moe};
use crate::convert::target::flashinfer::FlashinferLayout;
use crate::model::layers::Role;
use crate::model::routing::MoeRouting;
use crate::model::{Model, ModelError};
use crate::run::error::RunError;
use crate::run::options::Activations;

/// The `marlinspike` section of a converted folder's config, if it is for Marlin or FlashInfer.
pub fn section<'m>(model: &'m Model<'_>) -> Option<&'m Value> {
    let section = model.config.get("marlinspike")?;
    matches!(section["layout"].as_str(), Some("marlin" | "flashinfer")).then_some(section)
}

/// The modules of a section: those of experts once.
pub fn modules(section: &Value) -> Vec<String> {
    let names = section["layers"].as_object().into_iter().flat_map(|layers| layers.keys());
    let module = |name: &String| match name.rsplit_once('.') {
        // A linear layer may be called w2 too.
        Some((module, "w13" | "w2")) if is_moe(section, module) => module.to_owned(),
        _ => name.clone(),
    };
    let mut names: Vec<String> = names.map(module).collect();
    names.sort();
    names.dedup();
    names
}

/// Fails where the wanted module was copied unconverted, or without a wanted one experts were and none
/// were converted.
///
/// # Errors
/// [`ModelError::Module`] with the reasons that `convert` gave.
pub fn refuse_copied(section: &Value, wanted: Option<&str>) -> Result<(), ModelError> {
    let Some(copied) = section["unsupported"].as_object() else { return Ok(()) };
    let name = |key: &str| key.split(' ').next().unwrap_or(key).to_owned();
    let has_moe = modules(section).iter().any(|m| is_moe(section, m));
    let found = copied.iter().find(|(key, _)| match wanted {
        Some(wanted) => name(key) == wanted,
        None => !has_moe && name(key).split('.').any(|p| p == "experts"),
    });
    match found {
        None => Ok(()),
        Some((key, reasons)) => {
            let reasons = reasons.as_array().into_iter().flatten().filter_map(Value::as_str);
            let reasons = reasons.collect::<Vec<_>>().join("; ");
            let reason = format!("copied unconverted: {reasons}");
            Err(ModelError::module(name(key), reason))
        }
    }
}

/// Whether a module of a section is a layer of experts.
pub fn is_moe(section: &Value, module: &str) -> bool {
    section["layers"].get(format!("{module}.w13")).is_some()
}

/// One stack's entry in the section.
struct Entry<'m> {
    model: &'m Model<'m>,
    section: &'m Value,
    module: &'m str,
    layer: &'m Value,
    role: Role,
}

impl<'m> Entry<'m> {
    fn find(
        model: &'m Model<'m>,
        section: &'m Value,
        module: &'m str,
        role: Role,
    ) -> Result<Self, ModelError> {
        let name = format!("{module}.{}", role.prefix());
        let name = name.trim_end_matches(['.', '_']);
        match section["layers"].get(name) {
            Some(layer) => Ok(Self { model, section, module, layer, role }),
            None => Err(ModelError::module(module, "the converted model has no such layer")),
        }
    }

    fn bad(&self, key: &str, expected: &str) -> Error {
        let what = format!("config.json: marlinspike: {}: {key}", self.module);
        Error::size(what, &self.layer[key], expected)
    }

    fn size(&self, key: &str) -> Result<usize> {
        let size = self.layer[key].as_u64().and_then(|n| usize::try_from(n).ok());
        size.filter(|&n| n > 0).ok_or_else(|| self.bad(key, "1 or more"))
    }

    fn shape(&self) -> Result<Shape> {
        Ok(Shape::new(self.size("size_k")?, self.size("size_n")?))
    }

    fn group_size(&self) -> Result<GroupSize> {
        match self.layer["group_size"].as_i64() {
            Some(-1) => Ok(GroupSize::Channel),
            _ => Ok(GroupSize::Of(self.size("group_size")?)),
        }
    }

    fn ty(&self) -> Result<ScalarType> {
        let ty = self.layer["weight_type"].as_str().and_then(ScalarType::from_name);
        ty.ok_or_else(|| self.bad("weight_type", "a type of codes"))
    }

    /// The tensor of a role, whole; `None` where the layer has none.
    fn tensor(&self, role: &str) -> Result<Option<Tensor<'m>>> {
        let Some(name) = self.layer["tensors"][role].as_str() else { return Ok(None) };
        let found = self.model.tensor(name);
        found.map(Some).map_err(|e| Error::missing(name, e))
    }

    fn need(&self, role: &str) -> Result<Tensor<'m>> {
        self.tensor(role)?.ok_or_else(|| self.bad("tensors", role))
    }

    /// Experts, 1 of a linear layer; every tensor must have as many.
    fn experts(&self) -> Result<usize> {
        let experts = self.size("experts")?;
        for role in ["weight", "scales", "zeros", "g_idx", "g_idx_sort_indices", "bias"] {
            if self.role == Role::Dense {
                break;
            }
            if let Some(tensor) = self.tensor(role)?
                && tensor.shape().first() != Some(&experts)
            {
                return Err(Error::shape(
                    tensor.name(),
                    tensor.shape(),
                    format!("[{experts}, ...]"),
                ));
            }
        }
        Ok(experts)
    }

    /// The part of expert `e`.
    fn part(&self, role: &str, e: usize) -> Result<Option<Tensor<'static>>> {
        let Some(tensor) = self.tensor(role)? else { return Ok(None) };
        Ok(Some(match self.role {
            Role::Dense => tensor.into_owned(),
            _ => tensor.index0(e)?.into_owned(),
        }))
    }

    /// One f32 of each expert.
    fn floats(&self, role: &str, experts: usize) -> Result<Option<Vec<f32>>> {
        let Some(tensor) = self.tensor(role)? else { return Ok(None) };
        let values = crate::model::values::floats(&tensor)?;
        match values.len() == experts {
            true => Ok(Some(values)),
            false => Err(Error::shape(tensor.name(), tensor.shape(), format!("[{experts}]"))),
        }
    }

    /// Every expert's weight.
    fn weights(&self) -> Result<Vec<Weight<'static>>> {
        match self.section["layout"].as_str() {
            Some("flashinfer") => self.flashinfer(),
            _ => self.marlin(),
        }
    }

    fn marlin(&self) -> Result<Vec<Weight<'static>>> {
        if self.section["input_dtype"].as_str() != Some("model") {
            let what = format!("input_dtype {}", self.section["input_dtype"]);
            return Err(Error::unsupported(what, "layers with 16-bit activations run"));
        }
        let dtype = self.section["dtype"].as_str().and_then(ScalarType::from_name);
        let dtype = dtype.ok_or_else(|| Error::missing("dtype", "config.json: marlinspike"))?;
        let permutation = match self.layer["scale_permutation"].as_str() {
            Some("grouped") => ScalePermutation::Grouped,
            Some("single") => ScalePermutation::Single,
            _ => return Err(self.bad("scale_permutation", "grouped or single")),
        };
        let (experts, shape) = (self.experts()?, self.shape()?);
        let (ty, group_size) = (self.ty()?, self.group_size()?);
        let globals = self.floats("global_scale", experts)?;
        let factor = self.layer["scale_factor"].as_f64().unwrap_or(1.0) as f32;
        let one = |e: usize| -> Result<Weight<'static>> {
            let missing = |role| self.bad("tensors", role);
            let order = match (self.part("g_idx", e)?, self.part("g_idx_sort_indices", e)?) {
                (Some(g_idx), Some(perm)) => Some([g_idx, perm]),
                _ => None,
            };
            let stored = Stored {
                name: format!("{}{}[{e}]", self.module, self.role.prefix()),
                ty,
                dtype,
                shape,
                group_size,
                permutation,
                weight: self.part("weight", e)?.ok_or_else(|| missing("weight"))?,
                scales: self.part("scales", e)?.ok_or_else(|| missing("scales"))?,
                zeros: self.part("zeros", e)?,
                order,
                bias: self.part("bias", e)?,
                global: globals.as_ref().map(|g| [g[e], factor]),
            };
            self.unpadded(stored.restore()?)
        };
        (0..experts).into_par_iter().map(one).collect()
    }

    /// Without the padding of gpt-oss's sizes.
    fn unpadded(&self, weight: Weight<'static>) -> Result<Weight<'static>> {
        let from = &self.layer["padded_from"];
        if from.is_null() {
            return Ok(weight);
        }
        let size = |key: &str| from[key].as_u64().and_then(|n| usize::try_from(n).ok());
        let sizes = size("hidden_size").zip(size("intermediate_size"));
        let (hidden, inner) = sizes.ok_or_else(|| self.bad("padded_from", "two sizes"))?;
        match self.role {
            Role::W13 => unpad_w13(&weight, GateUp::Interleaved, [hidden, inner]),
            _ => unpad(&weight, Shape::new(inner, hidden)),
        }
    }

    fn flashinfer(&self) -> Result<Vec<Weight<'static>>> {
        let kind = self.layer["kernel_layout"].as_str().and_then(FlashinferLayout::from_name);
        let kind = kind.ok_or_else(|| self.bad("kernel_layout", "mxint4 or a backend"))?;
        let layout = kind.layout(self.role, self.shape()?)?;
        let experts = self.experts()?;
        let (weight, scales) = (self.need("weight")?, self.need("scales")?);
        let globals = self.floats("global_scale", experts)?;
        let packed = PackedExperts {
            experts,
            weights: weight.bytes().to_vec(),
            scales: Table::from_tensor(&scales, layout.scales().ty())?,
        };
        let (ty, group_size) = (self.ty()?, self.group_size()?);
        let made = layout.unpack(&packed)?.into_iter().enumerate().map(|(e, expert)| Weight {
            name: format!("{}.{}[{e}]", self.module, self.role.prefix().trim_end_matches('_')),
            ty,
            codes: expert.codes,
            scales: expert.scales,
            zeros: None,
            groups: Groups::Uniform(group_size),
            global_scale: globals.as_ref().map(|g| g[e]),
            bias: None,
        });
        Ok(made.collect())
    }

    /// Whether rows of gate and up alternate in w13, as stacks of experts have them.
    fn interleaved(&self) -> bool {
        let source = QuantConfig::from_value(&self.section["source_quantization_config"]);
        let name = format!("{}.0.gate_proj", self.module);
        let scheme = source.and_then(|source| source.scheme_for(&name));
        matches!(scheme, Ok(Scheme::Block { container, .. }) if container.stacks_experts())
    }

    /// How activations enter: in the format of the weights where the file has their multipliers.
    fn quantizer(&self) -> Result<Quantizer> {
        let scales = self.floats("input_scale", self.size("experts")?)?;
        let Some(multipliers) = scales else { return Ok(Quantizer::None) };
        let format = formats::block_format(self.ty()?, self.group_size()?);
        let format = format.ok_or_else(|| self.bad("weight_type", "a block format's"))?;
        Ok(Quantizer::Block { format, multipliers })
    }
}

/// What is to be said where the checkpoint's method quantizes activations and Marlin's form does not.
fn quantized_by_checkpoint(section: &Value, module: &str) -> Option<String> {
    if section["layout"].as_str() != Some("marlin") {
        return None;
    }
    let source = QuantConfig::from_value(&section["source_quantization_config"]).ok()?;
    let is_moe = is_moe(section, module);
    let names = match is_moe {
        true => ["gate_proj", "w1"].map(|p| format!("{module}.0.{p}")),
        false => [module.to_owned(), module.to_owned()],
    };
    let quantizer = |name: &String| {
        let scheme = source.scheme_for(name).ok()?;
        match dynamic(&scheme, Activations::Checkpoint, is_moe) {
            Ok(Some(Quantizer::None)) | Err(_) => None,
            Ok(Some(quantizer)) => Some(quantizer.to_string()),
            Ok(None) => Some("static scales".to_owned()),
        }
    };
    let method = names.iter().find_map(quantizer)?;
    Some(format!(
        "arithmetic differs from the checkpoint's method: activations stay in 16 bits here, the \
         method quantizes them ({method})"
    ))
}

/// Loads `module` of a converted folder.
///
/// # Errors
/// For a part of several ranks, whose output would be no layer's; [`ModelError`] and
/// [`RunError`] naming the key or tensor that does not fit.
pub fn load(model: &Model<'_>, section: &Value, module: &str) -> Result<Loaded, RunError> {
    for key in ["tp_size", "ep_size"] {
        if section[key].as_u64().is_some_and(|ranks| ranks != 1) {
            let reason =
                format!("config.json: marlinspike: {key}: found {}, expected 1", section[key]);
            return Err(ModelError::module(module, reason).into());
        }
    }
    let wrong = |e: Error| RunError::weight(module)(e);
    let find = |role| Entry::find(model, section, module, role);
    let mut notes: Vec<String> = quantized_by_checkpoint(section, module).into_iter().collect();
    let (format, kind) = match is_moe(section, module) {
        false => {
            let entry = find(Role::Dense)?;
            let mut weights = entry.weights().map_err(wrong)?;
            let weight = Box::new(weights.swap_remove(0));
            (entry, Kind::Linear { weight, quantizer: Quantizer::None })
        }
        true => {
            let entries = [find(Role::W13)?, find(Role::W2)?];
            let w13 = entries[0].weights().map_err(wrong)?;
            let w2 = entries[1].weights().map_err(wrong)?;
            let routing = MoeRouting::read(model, module, w13.len(), entries[0].interleaved())?;
            notes.extend(routing.notes.iter().cloned());
            let quantizers = [&entries[0], &entries[1]].map(|e| e.quantizer().map_err(wrong));
            let [first, second] = quantizers;
            let quantizers = [first?, second?];
            let moe = Moe { w13, w2, quantizers, multipliers: None, routing };
            let [entry, _] = entries;
            (entry, Kind::Moe(Box::new(moe)))
        }
    };
    let of = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let format = format!("{} in {}'s form", of(&format.layer["scheme"]), of(&section["layout"]));
    Ok(Loaded { module: module.to_owned(), format, notes, kind })
}
