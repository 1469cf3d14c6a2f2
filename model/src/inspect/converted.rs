//! A folder that `convert` wrote: its layers are listed in the `marlinspike` section of the config.

use std::collections::{BTreeMap, BTreeSet};

use marlinspike::num::dims::{GroupSize, Shape};
use marlinspike::num::scalar::ScalarType;
use serde_json::Value;

use super::verdicts::Verdict;
use super::{Converted, Inspection, Layer};
use crate::convert::parallel::Ranks;
use crate::convert::settings::Format;
use crate::model::layers::Role;
use crate::model::{Model, ModelError};

/// Reads the `marlinspike` section of the config.
///
/// # Errors
/// [`ModelError::Module`] naming the invalid key or the missing tensor.
pub(super) fn inspection(model: &Model<'_>, section: &Value) -> Result<Inspection, ModelError> {
    let text = |key: &str| section[key].as_str().unwrap_or("unknown").to_owned();
    let ranks = |kind: &str| -> Result<Ranks, ModelError> {
        let of = |key: String| number(section, "marlinspike", &key);
        Ok(Ranks { size: of(format!("{kind}_size"))?, rank: of(format!("{kind}_rank"))? })
    };
    let layout = text("layout");
    let Some(entries) = section["layers"].as_object() else {
        return Err(ModelError::module("marlinspike", "config.json has no layers"));
    };
    let mut owned = BTreeSet::new();
    let layer = |(name, value): (&String, &Value)| {
        let role = match name.rsplit_once('.') {
            // A linear layer may be called w2 too.
            Some((module, "w13")) if entries.contains_key(&format!("{module}.w2")) => Role::W13,
            Some((module, "w2")) if entries.contains_key(&format!("{module}.w13")) => Role::W2,
            _ => Role::Dense,
        };
        one(model, (name, value), role, &layout, &mut owned)
    };
    let layers = entries.iter().map(layer).collect::<Result<Vec<_>, _>>()?;
    let target = Format::from_name(&layout);
    let verdict = target.map(|format| Verdict {
        target: format.name(),
        column: format.descriptor().column,
        reasons: vec![Vec::new(); layers.len()],
    });
    let source = &section["source_quantization_config"]["quant_method"];
    Ok(Inspection {
        quant_method: source.as_str().unwrap_or("none").to_owned(),
        converted: Some(Converted {
            layout,
            producer: text("producer"),
            tp: ranks("tp")?,
            ep: ranks("ep")?,
        }),
        layers,
        verdicts: verdict.into_iter().collect(),
        kernels: Vec::new(),
        upstream_changes: Vec::new(),
        routing: Vec::new(),
        fused: Vec::new(),
        plain: Vec::new(),
        refused: BTreeMap::new(),
        unquantized: copied(model, section, &owned),
        bytes: model.entries().map(|e| e.byte_len()).sum(),
        files: model.shards.len(),
    })
}

fn number(object: &Value, module: &str, key: &str) -> Result<usize, ModelError> {
    let found = object[key].as_u64().and_then(|n| usize::try_from(n).ok());
    found.ok_or_else(|| {
        let reason = format!("config.json: {key}: found {}, expected a number", object[key]);
        ModelError::module(module, reason)
    })
}

/// One layer; its tensors go into `owned`.
fn one(
    model: &Model<'_>,
    (name, value): (&str, &Value),
    role: Role,
    layout: &str,
    owned: &mut BTreeSet<String>,
) -> Result<Layer, ModelError> {
    let mut bytes = 0;
    for tensor in value["tensors"].as_object().into_iter().flat_map(|t| t.values()) {
        let tensor = tensor.as_str().unwrap_or_default();
        let Some(entry) = model.entry(tensor) else {
            return Err(ModelError::module(name, format!("tensor `{tensor}` is missing")));
        };
        bytes += entry.byte_len();
        owned.insert(tensor.to_owned());
    }
    let text = |key: &str| value[key].as_str().unwrap_or("unknown").to_owned();
    let weight_type = text("weight_type");
    // Codes of the int4 path are signed; the reference has no type of their name.
    let bits = match weight_type.as_str() {
        "int4" => Some(4),
        other => ScalarType::from_name(other).map(|ty| ty.size_bits()),
    };
    let group_size = match value["group_size"].as_i64() {
        Some(-1) => GroupSize::Channel,
        _ => GroupSize::Of(number(value, name, "group_size")?),
    };
    Ok(Layer {
        module: name.to_owned(),
        role,
        format: text("scheme"),
        weight_type,
        bits,
        group_size,
        act_order: value["act_order"].as_bool().unwrap_or(false),
        shape: Shape::new(number(value, name, "size_k")?, number(value, name, "size_n")?),
        experts: number(value, name, "experts")?,
        bytes,
        chosen: Format::from_name(layout).map(Format::name),
        reasons: Vec::new(),
    })
}

/// Copied modules, by reason.
fn copied(
    model: &Model<'_>,
    section: &Value,
    owned: &BTreeSet<String>,
) -> BTreeMap<String, Vec<String>> {
    let refused = section["unsupported"].as_object();
    let mut copied: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for entry in model.entries().filter(|e| !owned.contains(e.name())) {
        let module = entry.name().rsplit_once('.').map_or("", |(module, _)| module);
        // The manifest names refused experts by layer, followed by a space and w13 or w2.
        let is_in = |key: &str| {
            let key = key.split(' ').next().unwrap_or(key);
            module.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let found = refused.and_then(|r| r.iter().find(|(key, _)| is_in(key)));
        let reason = match found {
            None => "copied unchanged".to_owned(),
            Some((_, reasons)) => {
                let reasons = reasons.as_array().into_iter().flatten().filter_map(Value::as_str);
                format!("copied unconverted: {}", reasons.collect::<Vec<_>>().join("; "))
            }
        };
        copied.entry(reason).or_default().insert(module.to_owned());
    }
    copied.into_iter().map(|(reason, modules)| (reason, modules.into_iter().collect())).collect()
}
