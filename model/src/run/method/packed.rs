//! A layer of a folder converted for GPU kernels: its packed bytes are unpacked to the hub, and the
//! result runs.

use marlinspike::config::{QuantConfig, Scheme};
use marlinspike::formats;
use marlinspike::method::Quantizer;
use marlinspike::weight::Weight;
use marlinspike::{Error, Result};
use serde_json::Value;

use super::fp8;
use super::load::{Loaded, dynamic};
use super::parts::{LayerWeights, Moe};
use crate::convert::entry::Entry;
use crate::convert::settings::Format;
use crate::convert::target::fp8_blocks;
use crate::model::layers::Role;
use crate::model::routing::MoeRouting;
use crate::model::{Model, ModelError};
use crate::run::block::Surrounding;
use crate::run::block::tail::{RankPart, Tail};
use crate::run::error::RunError;
use crate::run::options::MethodOptions;
use crate::run::origin;

/// The format of a converted folder and the `marlinspike` section of its config, where the layers are
/// unpacked before they run.
pub fn section<'m>(model: &'m Model<'_>) -> Option<(Format, &'m Value)> {
    let section = model.config.get("marlinspike")?;
    let format = Format::of_section(section)?;
    (!format.target().runs_packed()).then_some((format, section))
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

/// Returns an error if the wanted module was copied unconverted or, without a wanted module, if
/// experts were copied and none were converted.
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

/// Whether rows of gate and up alternate in w13, as stacks of experts have them.
fn interleaved(entry: &Entry<'_>) -> bool {
    let source = QuantConfig::from_value(&entry.section["source_quantization_config"]);
    let name = format!("{}.0.gate_proj", entry.module);
    let scheme = source.and_then(|source| source.scheme_for(&name));
    matches!(scheme, Ok(Scheme::Block { container, .. }) if container.stacks_experts())
}

/// How activations are quantized: as the entry says, or to the format of the weights if the file has
/// multipliers for them.
fn quantizer(entry: &Entry<'_>, options: MethodOptions) -> Result<Quantizer> {
    let groups = fp8_blocks::stored_activations(entry)?;
    if let Some(quantizer) = groups.and_then(|groups| fp8::groups(groups, options.group_rule)) {
        return Ok(quantizer);
    }
    match entry.section["input_dtype"].as_str() {
        Some("fp8") => return Ok(Quantizer::Fp8Token),
        Some("int8") => return Ok(Quantizer::Int8Factor(int8_factor(entry)?)),
        _ => {}
    }
    let scales = entry.floats("input_scale", entry.size("experts")?)?;
    let Some(multipliers) = scales else { return Ok(Quantizer::None) };
    let format = formats::block_format(entry.ty()?, entry.group_size()?);
    let format = format.ok_or_else(|| entry.bad("weight_type", "a block format's"))?;
    Ok(Quantizer::Block { format, multipliers })
}

/// Whether the kernels of the folder quantize activations, whatever the checkpoint's method says.
fn has_8_bit_input(section: &Value) -> bool {
    matches!(section["input_dtype"].as_str(), Some("fp8" | "int8"))
}

/// The factor of the scales of int8 activations; 1 if there is one group of scales.
fn int8_factor(entry: &Entry<'_>) -> Result<f32> {
    let groups = entry.need("scales")?.shape().iter().rev().nth(1).copied();
    let Some(factor) = entry.floats("input_global_scale", 1)? else {
        return match groups {
            Some(2..) => Err(entry.bad("tensors", "input_global_scale, of integer scales")),
            _ => Ok(1.0),
        };
    };
    if !(factor[0].is_normal() && factor[0] > 0.0) {
        let name = entry.need("input_global_scale")?.name().to_owned();
        return Err(Error::value(name, &[0], factor[0], "a positive normal number"));
    }
    Ok(factor[0])
}

/// The note for a checkpoint whose method quantizes activations, where the format's kernels do not.
fn quantized_by_checkpoint(format: Format, section: &Value, module: &str) -> Option<String> {
    if !format.target().keeps_activations() || has_8_bit_input(section) {
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
        match dynamic(&scheme, MethodOptions::default(), is_moe) {
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

/// The local index of each expert of all ranks, where ranks share them.
///
/// # Errors
/// [`ModelError::Module`] for a map that is not a list of such indices.
fn expert_map(section: &Value, module: &str) -> Result<Option<Vec<i32>>, ModelError> {
    let map = &section["expert_maps"][module];
    if map.is_null() {
        let ranks = &section["ep_size"];
        if is_moe(section, module) && ranks.as_u64().is_some_and(|n| n > 1) {
            let reason =
                format!("config.json: marlinspike: expert_maps: absent, ep_size is {ranks}");
            return Err(ModelError::module(module, reason));
        }
        return Ok(None);
    }
    let index = |v: &Value| v.as_i64().and_then(|i| i32::try_from(i).ok()).filter(|i| *i >= -1);
    let found = map.as_array().and_then(|all| all.iter().map(index).collect());
    found.map(Some).ok_or_else(|| {
        let reason =
            "config.json: marlinspike: expert_maps: expected a list of local indices or -1";
        ModelError::module(module, reason)
    })
}

/// Returns an error unless the map names each of `local` experts once.
fn check_map(entry: &Entry<'_>, map: Option<&[i32]>, local: usize) -> Result<()> {
    let Some(map) = map else { return Ok(()) };
    let mut named: Vec<_> = map.iter().filter(|i| **i >= 0).map(|i| *i as usize).collect();
    named.sort_unstable();
    match named.into_iter().eq(0..local) {
        true => Ok(()),
        false => Err(entry.bad("experts", "the number of experts in expert_maps")),
    }
}

/// The part of the shared expert and of the block's bias that the folder's rank adds. Upstream cuts the
/// shared expert as it cuts dense layers, by tensor parallelism. Ranks beyond those are groups with
/// tokens of their own: the first of them adds it, and their sum has it once.
///
/// # Errors
/// [`Error::Missing`] naming a key that is absent.
fn rank_part(section: &Value) -> Result<RankPart, RunError> {
    let number = |key: &str| -> Result<usize, RunError> {
        let found = section[key].as_u64().and_then(|n| usize::try_from(n).ok());
        found.ok_or_else(|| RunError::Layer(Error::missing(key, "config.json: marlinspike")))
    };
    let [tp, tp_rank] = [number("tp_size")?, number("tp_rank")?];
    let ep_rank = number("ep_rank")?;
    Ok(RankPart {
        tp: [tp_rank, tp],
        adds_shared: ep_rank < tp.max(1),
        adds_bias: ep_rank == 0 && tp_rank == 0,
    })
}

/// What a rank's part of `tail` lacks.
fn rank_notes(tail: &Tail, part: RankPart) -> Vec<String> {
    let mut notes = Vec::new();
    if tail.shared.is_some() && !part.adds_shared {
        notes.push("the shared expert is whole on each rank: rank 0 adds it".to_owned());
    }
    if !tail.stages.is_empty() {
        notes
            .push("y is a part of the sum of all ranks, which the block's norm follows".to_owned());
    }
    notes
}

/// Experts of a converted folder.
pub(super) struct Unpacked {
    /// w13 and w2 of every expert.
    pub(super) moe: [Vec<Weight<'static>>; 2],
    pub(super) quantizers: [Quantizer; 2],
    /// Whether rows of gate and up alternate in w13.
    pub(super) interleaved: bool,
    /// How the checkpoint stores them.
    pub(super) scheme: String,
    pub(super) notes: Vec<String>,
}

/// Unpacks the experts `module` of a folder of one rank.
///
/// # Errors
/// [`ModelError::Module`] for the part of one of several ranks; as [`load`].
pub(super) fn experts(
    model: &Model<'_>,
    (format, section): (Format, &Value),
    module: &str,
    options: MethodOptions,
) -> Result<Unpacked, RunError> {
    if expert_map(section, module)?.is_some()
        || origin::of_ranks(Some(section), module, Some(None)).is_some()
    {
        let reason = "a block with stages around its experts runs from a folder of all ranks alone";
        return Err(ModelError::module(module, reason).into());
    }
    let wrong = |e: Error| RunError::weight(module)(e);
    let entries = [Role::W13, Role::W2].map(|role| Entry::find(model, section, module, role));
    let [w13, w2] = entries;
    let entries = [w13?, w2?];
    let quantizer = |e: &Entry<'_>| quantizer(e, options).map_err(wrong);
    let unpack = |e: &Entry<'_>| format.target().unpack(e).map_err(wrong);
    Ok(Unpacked {
        moe: [unpack(&entries[0])?, unpack(&entries[1])?],
        quantizers: [quantizer(&entries[0])?, quantizer(&entries[1])?],
        interleaved: interleaved(&entries[0]),
        scheme: entries[0].text("scheme").unwrap_or_default().to_owned(),
        notes: quantized_by_checkpoint(format, section, module).into_iter().collect(),
    })
}

/// Loads `module` of a converted folder.
///
/// # Errors
/// [`ModelError`] and [`RunError`] naming the key or tensor that does not fit.
pub fn load(
    model: &Model<'_>,
    (format, section): (Format, &Value),
    module: &str,
    options: MethodOptions,
) -> Result<Loaded, RunError> {
    let shared = expert_map(section, module)?;
    let wrong = |e: Error| RunError::weight(module)(e);
    let find = |role| Entry::find(model, section, module, role);
    let weights = |entry: &Entry<'_>| -> Result<Vec<Weight<'static>>, RunError> {
        format.target().unpack(entry).map_err(wrong)
    };
    let mut notes: Vec<String> =
        quantized_by_checkpoint(format, section, module).into_iter().collect();
    let mut surrounding = Surrounding::default();
    let mut partial = origin::of_ranks(Some(section), module, None);
    let (entry, weights) = match is_moe(section, module) {
        false => {
            let entry = find(Role::Dense)?;
            let mut weights = weights(&entry)?;
            let weight = Box::new(weights.swap_remove(0));
            let by_kernel = has_8_bit_input(section);
            let quantizer = match entry.layer["activations"].is_null() && !by_kernel {
                true => Quantizer::None,
                false => quantizer(&entry, options).map_err(wrong)?,
            };
            (entry, LayerWeights::Linear { weight, quantizer })
        }
        true => {
            let entries = [find(Role::W13)?, find(Role::W2)?];
            let w13 = weights(&entries[0])?;
            let w2 = weights(&entries[1])?;
            let num_experts = shared.as_ref().map_or(w13.len(), Vec::len);
            check_map(&entries[0], shared.as_deref(), w13.len()).map_err(wrong)?;
            let routing = MoeRouting::read(model, module, num_experts, interleaved(&entries[0]))?;
            notes.extend(routing.notes.iter().cloned());
            let size_k = w13.first().map_or(0, |w| w.shape().size_k);
            let hidden = entries[0].unpadded("hidden_size")?.unwrap_or(size_k);
            surrounding = Surrounding::read(
                model,
                module,
                &routing.rule,
                [num_experts, hidden],
                &|name| section["layers"].get(name).is_some(),
                |name| Ok(Box::new(load(model, (format, section), name, options)?)),
            )?;
            surrounding = surrounding.padded(hidden, size_k).map_err(wrong)?;
            notes.extend(surrounding.notes.iter().cloned());
            let experts = shared.as_ref().map(|_| [w13.len(), num_experts]);
            partial = origin::of_ranks(Some(section), module, Some(experts));
            if partial.is_some() {
                let part = rank_part(section)?;
                notes.extend(rank_notes(&surrounding.tail, part));
                surrounding.tail = surrounding.tail.of_rank(part).map_err(wrong)?;
            }
            let quantizers =
                [&entries[0], &entries[1]].map(|e| quantizer(e, options).map_err(wrong));
            let [first, second] = quantizers;
            let quantizers = [first?, second?];
            let moe = Moe { w13, w2, quantizers, multipliers: None, routing, shared };
            let [entry, _] = entries;
            (entry, LayerWeights::Moe(Box::new(moe)))
        }
    };
    let scheme = entry.text("scheme").unwrap_or_default();
    let format = format!("{scheme} in {}'s form", format.name());
    Ok(Loaded { module: module.to_owned(), format, notes, weights, surrounding, partial })
}
