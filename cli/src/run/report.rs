//! The output of `run`.

use marlinspike_model::model::routing::summary as routing_summary;
use marlinspike_model::run::origin::{Partial, PartialOutput, Rank};
use marlinspike_model::run::output::{Check, LayerKind, LogitsReport, Run, WrongLogit};
use marlinspike_model::run::routing::RoutingReport;
use serde_json::{Value, json};

use crate::style::printable;

/// One JSON object on one line.
pub(super) fn json(run: &Run) -> String {
    let y = run.y();
    let check = run.check.map(|c| {
        let first = c.first.map(|(at, found, expected)| {
            json!({"index": at, "found": format!("{found:#x}"), "expected": format!("{expected:#x}")})
        });
        let mut check = json!({"mismatches": c.mismatches, "first": first});
        if c.unbounded > 0 {
            check["unbounded"] = json!(c.unbounded);
        }
        if let Some(stage) = c.stage {
            check["stage"] = json!(stage);
        }
        check
    });
    let mut value = json!({
        "layer": run.module,
        "source": if run.packed { "packed" } else { "checkpoint" },
        "sizes": sizes(run),
        "dtype": y.ty.name(),
        "shape": y.shape(),
        "sha256": y.digest(),
        "kernel": run.timing.kernel,
        "threads": run.timing.threads,
        "seconds": run.timing.seconds,
        "check": check,
        "arithmetic": run.arithmetic,
        "routing": run.routing.as_ref().map(routing_json),
        "partial": run.partial.as_ref().map(partial_json),
    });
    if let Some(logits) = &run.logits {
        value["router_logits"] = logits_json(logits);
    }
    if let Some(sum) = run.y_experts() {
        value["y_experts"] = json!({"shape": sum.shape(), "sha256": sum.digest()});
    }
    if !run.notes.is_empty() {
        value["notes"] = json!(run.notes);
    }
    format!("{value}\n")
}

/// The text output.
pub(super) fn text(run: &Run) -> String {
    let y = run.y();
    let [tokens, size_n] = y.shape();
    let threads = match run.timing.threads {
        None => String::new(),
        Some(1) => " on 1 thread".to_owned(),
        Some(count) => format!(" on {count} threads"),
    };
    let mut text =
        format!("{}: {}{}\n", printable(&run.module), printable(&summary(run)), source(run));
    if let Some(partial) = &run.partial {
        text.push_str(&format!("{}\n", partial_line(partial)));
    }
    if let Some(routing) = &run.routing {
        text.push_str(&format!(
            "{}\n",
            printable(&routing_summary(&routing.source, &routing.rule))
        ));
    }
    if run.logits.is_some() {
        text.push_str("router_logits: computed by the layer's router\n");
    }
    text.push_str(&format!("arithmetic: {}\n", printable(&run.arithmetic)));
    for note in &run.notes {
        text.push_str(&format!("{}\n", printable(note)));
    }
    if let Some(sum) = run.y_experts() {
        text.push_str(&format!("y_experts (routed experts only), sha256 {}\n", sum.digest()));
    }
    text.push_str(&format!(
        "y [{tokens}, {size_n}] {}, sha256 {}\n{:.3} ms with {}{threads}\n",
        y.ty,
        y.digest(),
        run.timing.seconds * 1e3,
        run.timing.kernel,
    ));
    if let Some(line) = run.routing.as_ref().and_then(routing_line) {
        text.push_str(&format!("{}\n", printable(&line)));
    }
    if let Some(line) = run.logits.as_ref().and_then(logits_line) {
        text.push_str(&format!("{line}\n"));
    }
    let is_bounded = run.method.as_ref().is_some_and(|m| m.is_bounded);
    match run.check {
        None => {}
        Some(Check { mismatches: 0, unbounded: count @ 1.., .. }) => {
            text.push_str(&format!(
                "NOT CHECKED: {count} values have no bound, because their sums may overflow or are not finite\n"
            ));
        }
        Some(Check { mismatches: 0, .. }) if is_bounded => {
            text.push_str("within the bound of products and sums in f32, at every value\n");
        }
        Some(Check { first: Some(([m, n], found, expected)), mismatches, stage, .. }) => {
            let of = stage.map_or(String::new(), |s| format!(" of {s}"));
            text.push_str(&format!(
                "DIFFERENT: {mismatches} values{of}; first at [{m}, {n}]: found {found:#x}, expected {expected:#x}\n"
            ));
        }
        Some(Check { mismatches: 0, .. }) => {
            text.push_str(&format!("equal to {} in every bit\n", checked_by(run)));
        }
        Some(Check { mismatches, .. }) => {
            text.push_str(&format!("DIFFERENT: the number of values differs by {mismatches}\n"));
        }
    }
    text
}

/// The origin of a layer that was packed from the checkpoint.
fn source(run: &Run) -> &'static str {
    if run.packed || run.method.is_some() { "" } else { ", packed from the checkpoint" }
}

/// The computation that the check compared with.
fn checked_by(run: &Run) -> &'static str {
    match run.method {
        Some(_) => "the definition, product by product",
        None => "the scalar definition",
    }
}

/// Kind, sizes and method as JSON.
fn sizes(run: &Run) -> Value {
    let (kind, sizes) = match run.kind {
        LayerKind::Moe { num_experts, top_k, hidden_size, intermediate_size } => {
            let sizes = json!({
                "num_experts": num_experts,
                "top_k": top_k,
                "hidden_size": hidden_size,
                "intermediate_size": intermediate_size,
            });
            ("moe", sizes)
        }
        LayerKind::Linear(shape) => {
            ("linear", json!({"size_k": shape.size_k, "size_n": shape.size_n}))
        }
    };
    let mut value = json!({ "kind": kind });
    if let Some(method) = &run.method {
        value["format"] = json!(method.format);
    }
    for (key, size) in sizes.as_object().into_iter().flatten() {
        value[key] = size.clone();
    }
    if let Some(method) = &run.method {
        value["activations"] = json!(method.activations);
        value["arithmetic"] = json!(method.arithmetic);
    }
    value
}

/// The same as text.
fn summary(run: &Run) -> String {
    let kind = match run.kind {
        LayerKind::Moe { num_experts, top_k, hidden_size, intermediate_size } => {
            format!("{num_experts} experts, top {top_k}, H {hidden_size}, I {intermediate_size}")
        }
        LayerKind::Linear(shape) if run.method.is_some() => shape.to_string(),
        LayerKind::Linear(shape) => format!("linear, {shape}"),
    };
    match &run.method {
        Some(m) => format!("{}, {kind}, activations {}, {}", m.format, m.activations, m.arithmetic),
        None => kind,
    }
}

fn routing_json(routing: &RoutingReport) -> serde_json::Value {
    let check = routing.differences.as_ref().map(|d| {
        let first = d.ids.first().or(d.weights.first()).map(|(_, text)| text);
        json!({"ids": d.ids.len(), "weights": d.weights.len(), "first": first})
    });
    json!({"source": routing.source, "rule": routing.rule.to_json(), "check": check})
}

/// The comparison of the router's logits with their bound, as JSON.
fn logits_json(logits: &LogitsReport) -> Value {
    let check = logits.outside.map(|outside| {
        let first =
            outside.first.map(|w| json!({"index": w.at, "found": w.found, "exact": w.exact}));
        json!({"mismatches": outside.count, "first": first})
    });
    json!({"source": "router", "check": check})
}

/// The same as text.
fn logits_line(logits: &LogitsReport) -> Option<String> {
    let outside = logits.outside?;
    Some(match outside.first {
        Some(WrongLogit { at: [m, e], found, exact }) => format!(
            "ROUTER LOGITS DIFFERENT: {} values; first at [{m}, {e}]: found {found}, expected {exact}",
            outside.count
        ),
        None => "router logits within the bound of products and sums in f32".to_owned(),
    })
}

fn routing_line(routing: &RoutingReport) -> Option<String> {
    let d = routing.differences.as_ref()?;
    Some(match d.ids.first().or(d.weights.first()) {
        None => "routing equal to its definition in f64, within f32's rounding".to_owned(),
        Some((_, first)) => {
            format!("ROUTING DIFFERENT: {} ids, {} weights; {first}", d.ids.len(), d.weights.len())
        }
    })
}

const fn part_name(output: PartialOutput) -> &'static str {
    match output {
        PartialOutput::Sum => "partial sum",
        PartialOutput::Columns => "columns",
    }
}

/// The part of a layer that ran, as JSON.
fn partial_json(partial: &Partial) -> Value {
    let [local, all] = partial.experts.map_or([None, None], |e| e.map(Some));
    json!({
        "tp_rank": partial.tp.map(|r| r.rank),
        "tp_size": partial.tp.map(|r| r.size),
        "ep_rank": partial.ep.map(|r| r.rank),
        "ep_size": partial.ep.map(|r| r.size),
        "local_experts": local,
        "num_experts": all,
        "y": part_name(partial.output),
    })
}

/// The same as text.
fn partial_line(partial: &Partial) -> String {
    let mut ranks = Vec::new();
    if let Some(Rank { rank, size }) = partial.ep {
        ranks.push(format!("expert-parallel rank {rank} of {size}"));
    }
    if let Some(Rank { rank, size }) = partial.tp {
        ranks.push(format!("tensor-parallel rank {rank} of {size}"));
    }
    if let Some([local, all]) = partial.experts {
        ranks.push(format!("{local} of {all} experts"));
    }
    let part = part_name(partial.output);
    format!("PARTIAL: {}: y is this rank's {part}, not the layer's output", ranks.join(", "))
}
