//! The files next to the tensors: `config.json` with a `marlinspike` section, and the index.
//!
//! `quantization_config` moves to `marlinspike.source_quantization_config`, so that no loader takes
//! the tensors for the original ones. The section:
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
//! | `expert_maps` | by layer, where ranks share the experts: local index of each expert, or −1 |
//! | `notes` | what preparation changed in the experts' numbers, where it did |
//! | `unsupported` | modules that were copied unchanged, with the reasons |
//!
//! Each layer:
//!
//! | key | meaning |
//! | --- | --- |
//! | `scheme`, `weight_type` | how the checkpoint stores the weight, and the type of its codes |
//! | `size_k`, `size_n`, `experts` | shape and number of this rank's matrices |
//! | `group_size` | k per scale; −1: one scale per channel |
//! | `act_order`, `is_k_full` | whether rows are sorted by group, and whether groups are whole |
//! | `scale_factor` | NVFP4: factor moved from the global scale to the block scales |
//! | `padded_from` | gpt-oss: the model's own sizes, where they were rounded up |
//! | `tensors` | names of the layer's tensors, by role |
//! | `scale_permutation` | Marlin: `grouped` or `single` |
//! | `nr` | the int4 path: columns of a block |
//! | `kernel_layout` | FlashInfer: the layout's name |
//! | `scale_format` | DeepGEMM: `float32`, `float32_ceil_ue8m0` or `ue8m0` |
//! | `activations` | FP8 blocks: type, group and form of the scales of quantized activations |
//!
//! A packed file of the int4 path also describes its own layers
//! ([`marlinspike::w4a8::stored`]), and `run` reads those descriptions.

use marlinspike::config::Scheme;
use serde_json::{Map, Value, json};

use super::names::TensorKind;
use super::piece::Constants;
use super::plan::ConversionPlan;
use super::settings::Settings;
use super::stack::StackPlan;
use crate::model::Model;

/// The type of the codes.
pub fn weight_type(scheme: &Scheme) -> &'static str {
    scheme.weight_type().map_or("none", |ty| ty.name())
}

fn role_name(kind: TensorKind) -> &'static str {
    match kind {
        TensorKind::Weight => "weight",
        TensorKind::Scales => "scales",
        TensorKind::Zeros => "zeros",
        TensorKind::GIdx => "g_idx",
        TensorKind::SortIndices => "g_idx_sort_indices",
        TensorKind::Bias => "bias",
        TensorKind::GlobalScale => "global_scale",
        TensorKind::InputGlobalScale => "input_global_scale",
        TensorKind::InputScale => "input_scale",
    }
}

fn layer(plan: &StackPlan, constants: Constants, settings: &Settings) -> Value {
    let tensors: Map<String, Value> =
        plan.outputs.iter().map(|o| (role_name(o.kind).to_owned(), json!(o.spec.name))).collect();
    let mut value = json!({
        "scheme": plan.scheme.label(),
        "weight_type": weight_type(&plan.scheme),
        "size_k": plan.slice.shape.size_k,
        "size_n": plan.slice.shape.size_n,
        "experts": plan.experts.len(),
        "group_size": plan.groups.size.to_config(),
        "act_order": plan.groups.act_order,
        "is_k_full": plan.groups.is_k_full,
        "tensors": tensors,
    });
    for (key, of_format) in settings.format.target().layer(plan, settings) {
        value[key] = of_format;
    }
    if let Some(shard) = plan.slice.padding {
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
    plan: &ConversionPlan,
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
pub fn index(plan: &ConversionPlan) -> Value {
    let mut map = std::collections::BTreeMap::new();
    for shard in &plan.shards {
        map.extend(shard.items.iter().map(|i| (i.spec.name.as_str(), shard.name.as_str())));
    }
    json!({ "metadata": { "total_size": plan.output_bytes() }, "weight_map": map })
}
