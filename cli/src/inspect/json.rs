//! The JSON of `inspect`.

use marlinspike_model::convert::config::weight_type;
use marlinspike_model::inspect::experts::Kernels;
use marlinspike_model::inspect::routing::LayerRouting;
use marlinspike_model::inspect::{Inspection, Layer};
use marlinspike_model::model::bind;
use marlinspike_model::model::layers::Role;
use serde_json::{Value, json};

use super::Args;

/// One JSON object on one line.
pub(super) fn json(found: &Inspection, args: &Args) -> String {
    let value = json!({
        "model": args.model_dir,
        "quant_method": found.quant_method,
        "capability": args.capability.to_string(),
        "tp_size": args.tp_size,
        "layers": found.layers.iter().map(layer_json).collect::<Vec<_>>(),
        "moe_kernels": found.kernels.iter().map(kernels_json).collect::<Vec<_>>(),
        "routing": found.routing.iter().map(routing_json).collect::<Vec<_>>(),
        "fused_experts": found.fused.iter().map(|f| json!({
            "module": f.module, "reasons_against": [f.reason],
        })).collect::<Vec<_>>(),
        "unquantized": found.unquantized,
        "totals": {
            "layers": found.layers.len(),
            "for_marlin": found.layers.iter().filter(|l| l.chosen.is_some()).count(),
            "quantized_bytes": found.layers.iter().map(|l| l.bytes).sum::<u64>(),
            "bytes": found.bytes,
            "files": found.files,
        },
    });
    format!("{value}\n")
}

fn layer_json(l: &Layer) -> Value {
    json!({
        "module": l.module,
        "format": l.scheme.label(),
        "weight_type": weight_type(&l.scheme),
        "bits": l.scheme.bits(),
        "group_size": bind::group_size(&l.scheme, l.shape.size_k).to_config(),
        "act_order": bind::act_order(&l.scheme),
        "size_k": l.shape.size_k,
        "size_n": l.shape.size_n,
        "experts": (l.role != Role::Dense).then_some(l.experts),
        "bytes": l.bytes,
        "backend": l.chosen,
        "reasons_against": l.reasons,
    })
}

/// The choice and every refusal.
fn kernels_json(kernels: &Kernels) -> Value {
    let chosen = kernels.selection.chosen.as_ref();
    let choice = chosen.ok().and_then(Option::as_ref);
    let refusals: Vec<_> = kernels
        .selection
        .refusals
        .iter()
        .map(|r| {
            json!({
                "backend": r.class.backend.name(),
                "experts": r.class.experts,
                "reasons": r.reasons.iter().map(ToString::to_string).collect::<Vec<_>>(),
            })
        })
        .collect();
    json!({
        "format": kernels.format,
        "method": kernels.method,
        "backend": choice.map(|c| c.backend.name()),
        "experts": choice.map(|c| c.experts),
        "error": chosen.err().map(ToString::to_string),
        "refusals": refusals,
    })
}

/// The rule, or the reason against.
fn routing_json(routing: &LayerRouting) -> Value {
    let (source, rule, notes) = match &routing.found {
        Ok(r) => (Some(&r.source), Some(r.rule.to_json()), Some(&r.notes)),
        Err(_) => (None, None, None),
    };
    json!({
        "modules": routing.modules,
        "source": source,
        "rule": rule,
        "notes": notes,
        "error": routing.found.as_ref().err(),
    })
}
