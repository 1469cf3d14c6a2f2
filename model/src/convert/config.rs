//! What stands beside the tensors: `config.json` with a `marlinspike` section, and the index.
//!
//! `quantization_config` is taken out (no loader may mistake the tensors for the original ones)
//! and kept under `marlinspike.source_quantization_config`. The section:
//!
//! | key | meaning |
//! | --- | --- |
//! | `layout` | the format, by its name on the command line |
//! | `version` | 1, the version of this section |
//! | `producer` | program and version |
//! | `identity` | hash of the program's version, the options and the inputs ([`super::manifest`]) |
//! | `dtype`, `input_dtype` | Marlin: the model's 16-bit type; `model`, `int8` or `fp8` activations |
//! | `tp_size`, `tp_rank`, `ep_size`, `ep_rank` | which rank this is |
//! | `layers` | by module (`<...experts>.w13` and `.w2` of experts), see below |
//! | `expert_maps` | by layer, when experts are spread: local index of each expert, or −1 |
//! | `notes` | what preparation changed in the experts' numbers, where it did |
//! | `unsupported` | modules that were copied unchanged, with the reasons |
//!
//! A layer: `scheme`, `weight_type`, `size_k`, `size_n`, `experts`, `group_size` (−1: one per
//! channel), `act_order`, `is_k_full`, the keys of the format ([`super::target`]: Marlin's
//! `scale_permutation`, `grouped` or `single`; `nr`; `kernel_layout`), of NVFP4 the `scale_factor` that went from the global scale into the block
//! scales, `padded_from` where gpt-oss's sizes were rounded up (the model's own sizes), and `tensors`, the names of its tensors by role. A packed file of the int4 path also
//! describes its own layers ([`marlinspike::w4a8::stored`]); what runs a layer reads that.

use marlinspike::config::Scheme;
use serde_json::{Map, Value, json};

use super::names::Kind;
use super::piece::Constants;
use super::plan::Plan;
use super::settings::Settings;
use super::stack::StackPlan;
use crate::model::Model;

/// The meaning of a code.
pub fn weight_type(scheme: &Scheme) -> &'static str {
    scheme.weight_type().map_or("none", |ty| ty.name())
}

fn role_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Weight => "weight",
        Kind::Scales => "scales",
        Kind::Zeros => "zeros",
        Kind::GIdx => "g_idx",
        Kind::SortIndices => "g_idx_sort_indices",
        Kind::Bias => "bias",
        Kind::GlobalScale => "global_scale",
        Kind::InputGlobalScale => "input_global_scale",
        Kind::InputScale => "input_scale",
    }
}

fn layer(plan: &StackPlan, constants: Constants, settings: &Settings) -> Value {
    let tensors: Map<String, Value> =
        plan.outputs.iter().map(|o| (role_name(o.kind).to_owned(), json!(o.spec.name))).collect();
    let mut value = json!({
        "scheme": plan.scheme.label(),
        "weight_type": weight_type(&plan.scheme),
        "size_k": plan.shape.size_k,
        "size_n": plan.shape.size_n,
        "experts": plan.experts.len(),
        "group_size": plan.group_size.to_config(),
        "act_order": plan.act_order,
        "is_k_full": plan.is_k_full,
        "tensors": tensors,
    });
    for (key, of_format) in settings.format.target().layer(plan, settings) {
        value[key] = of_format;
    }
    if let Some(shard) = plan.padding {
        value["padded_from"] = json!({
            "hidden_size": shard.hidden_size,
            "intermediate_size": shard.intermediate_size,
        });
    }
    if let Some(factor) = constants.scale_factor {
        value["scale_factor"] = json!(factor);
    }
    value
}

/// The converted model's `config.json`.
pub fn config(
    model: &Model<'_>,
    plan: &Plan,
    settings: &Settings,
    constants: &[Constants],
    identity: &str,
) -> Value {
    let mut config = model.config.clone();
    let mut source = None;
    let mut take = |object: Option<&mut Value>| {
        if let Some(Value::Object(map)) = object {
            for key in ["quantization_config", "compression_config"] {
                source = source.take().or(map.shift_remove(key));
                map.shift_remove(key);
            }
        }
    };
    take(Some(&mut config));
    take(config.get_mut("text_config"));
    let layers: Map<String, Value> = plan
        .stacks
        .iter()
        .zip(constants)
        .map(|(p, &c)| {
            let name = format!("{}.{}", p.module, p.role.prefix());
            (name.trim_end_matches(['.', '_']).to_owned(), layer(p, c, settings))
        })
        .collect();
    let maps: Map<String, Value> =
        plan.expert_maps.iter().map(|(k, m)| (k.clone(), json!(m.map))).collect();
    let unsupported: Map<String, Value> =
        plan.refused.iter().map(|r| (r.module.clone(), json!(r.reasons))).collect();
    let mut section = json!({
        "layout": settings.format.name(),
        "version": 1,
        "producer": concat!("marlinspike ", env!("CARGO_PKG_VERSION")),
        "identity": identity,
        "tp_size": settings.tp.size,
        "tp_rank": settings.tp.rank,
        "ep_size": settings.ep.size,
        "ep_rank": settings.ep.rank,
        "source_quantization_config": source,
        "layers": layers,
        "expert_maps": maps,
        "unsupported": unsupported,
    });
    if !plan.notes.is_empty() {
        section["notes"] = json!(plan.notes);
    }
    for (key, of_format) in settings.format.target().section(settings) {
        section[key] = of_format;
    }
    match &mut config {
        Value::Object(map) => {
            map.insert("marlinspike".to_owned(), section);
            config
        }
        _ => json!({ "marlinspike": section }),
    }
}

/// The index of a model of several files.
pub fn index(plan: &Plan) -> Value {
    let mut map = std::collections::BTreeMap::new();
    for shard in &plan.shards {
        map.extend(shard.items.iter().map(|i| (i.spec.name.as_str(), shard.name.as_str())));
    }
    json!({ "metadata": { "total_size": plan.output_bytes() }, "weight_map": map })
}
