//! The JSON of `inspect`.

use marlinspike_model::inspect::experts::Kernels;
use marlinspike_model::inspect::releases::UpstreamChange;
use marlinspike_model::inspect::routing::LayerRouting;
use marlinspike_model::inspect::verdicts::Verdict;
use marlinspike_model::inspect::{Converted, Inspection, Layer};
use marlinspike_model::model::layers::Role;
use serde_json::{Value, json};

use super::Args;

/// One JSON object on one line.
pub(super) fn json(found: &Inspection, args: &Args) -> String {
    let value = json!({
        "model": args.model_dir.display().to_string(),
        "quant_method": found.quant_method,
        "capability": args.capability.to_string(),
        "tp_size": args.tp_size,
        "converted": found.converted.as_ref().map(converted_json),
        "layers": found.layers.iter().map(layer_json).collect::<Vec<_>>(),
        "targets": found.verdicts.iter().map(|v| verdict_json(v, &found.layers)).collect::<Vec<_>>(),
        "moe_kernels": found.kernels.iter().map(kernels_json).collect::<Vec<_>>(),
        "upstream_changes": found.upstream_changes.iter().map(change_json).collect::<Vec<_>>(),
        "routing": found.routing.iter().map(routing_json).collect::<Vec<_>>(),
        "fused_experts": found.fused.iter().map(|f| json!({
            "module": f.module, "reasons_against": [f.reason],
        })).collect::<Vec<_>>(),
        "plain_experts": found.plain,
        "refused": found.refused,
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

/// The producer and the layout of a converted folder.
fn converted_json(c: &Converted) -> Value {
    json!({
        "layout": c.layout,
        "producer": c.producer,
        "tp_size": c.tp.size,
        "tp_rank": c.tp.rank,
        "ep_size": c.ep.size,
        "ep_rank": c.ep.rank,
    })
}

/// The layers that a kernel format supports and, for the others, the reasons.
fn verdict_json(verdict: &Verdict, layers: &[Layer]) -> Value {
    let refused = layers.iter().zip(&verdict.reasons).filter(|(_, reasons)| !reasons.is_empty());
    let refused = refused.map(|(l, reasons)| json!({"module": l.module, "reasons": reasons}));
    json!({
        "target": verdict.target,
        "takes": verdict.taken(),
        "refused": refused.collect::<Vec<_>>(),
    })
}

fn layer_json(l: &Layer) -> Value {
    json!({
        "module": l.module,
        "format": l.format,
        "weight_type": l.weight_type,
        "bits": l.bits,
        "group_size": l.group_size.to_config(),
        "act_order": l.act_order,
        "size_k": l.shape.size_k,
        "size_n": l.shape.size_n,
        "experts": (l.role != Role::Dense).then_some(l.experts),
        "bytes": l.bytes,
        "backend": l.chosen,
        "reasons_against": l.reasons,
    })
}

/// The selected kernel and every refusal.
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

/// What a newer release of vLLM decides differently.
fn change_json(change: &UpstreamChange) -> Value {
    json!({
        "vllm": change.release.name(),
        "question": change.question.name(),
        "before": change.before,
        "after": change.after,
        "modules": change.modules,
    })
}

/// The routing rule, or the reason why there is none.
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
