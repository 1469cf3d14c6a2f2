//! The table and lines of `inspect`.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use marlinspike::select::Capability;
use marlinspike_model::inspect::experts::Kernels;
use marlinspike_model::inspect::releases::UpstreamChange;
use marlinspike_model::inspect::routing::LayerRouting;
use marlinspike_model::inspect::verdicts::Verdict;
use marlinspike_model::inspect::{Converted, Inspection, Layer};
use marlinspike_model::model::layers::Role;

use crate::style::{Paint, printable, size};

/// The complete text output.
pub(super) fn text(found: &Inspection, device: &Capability, paint: Paint) -> String {
    let method = &found.quant_method;
    let converted = found.converted.as_ref().map_or_else(String::new, converted_line);
    let head = format!("quantization: {method}{converted}");
    let mut text = format!("{}\n\n", paint.strong(&printable(&head)));
    if !found.layers.is_empty() {
        text.push_str(&table(found).to_string());
        text.push_str("\n\n");
    }
    for verdict in &found.verdicts {
        text.push_str(&refusals(verdict, &found.layers, paint));
    }
    for f in &found.fused {
        text.push_str(&format!("{} {}\n", paint.odd(&printable(&f.module)), printable(&f.reason)));
    }
    for module in &found.plain {
        let line = format!("{module}: 16- or 32-bit experts; `run` computes the block");
        text.push_str(&format!("{}\n", printable(&line)));
    }
    for routing in &found.routing {
        text.push_str(&printable(&routing_line(routing)));
        text.push('\n');
    }
    for kernels in &found.kernels {
        text.push_str(&printable(&kernels_line(kernels, device)));
        text.push('\n');
    }
    for change in &found.upstream_changes {
        text.push_str(&printable(&change_line(change)));
        text.push('\n');
    }
    for (reason, modules) in &found.unquantized {
        let example = modules.first().map_or("", String::as_str);
        let count = modules.len();
        let line = format!("not quantized: {count} modules such as `{example}`: {reason}");
        text.push_str(&paint.dim(&printable(&line)));
        text.push('\n');
    }
    let taken = found.verdicts.iter().map(|v| format!("{} {}", v.column, v.taken()));
    text.push_str(&format!(
        "\n{} layers (taken by: {}); {} quantized of {} in {} files\n",
        found.layers.len(),
        taken.collect::<Vec<_>>().join(", "),
        size(found.layers.iter().map(|l| l.bytes).sum()),
        size(found.bytes),
        found.files,
    ));
    text
}

/// The selected kernel of a format's experts, on one line.
fn kernels_line(kernels: &Kernels, device: &Capability) -> String {
    let answer = match &kernels.selection.chosen {
        Ok(Some(choice)) => format!("{} ({})", choice.backend.name(), choice.experts),
        Ok(None) => "none of its kernels".to_owned(),
        Err(error) => error.to_string(),
    };
    format!("experts in {}: upstream's kernel on {device}: {answer}", kernels.format)
}

/// What a newer release of vLLM decides differently, on one line.
fn change_line(change: &UpstreamChange) -> String {
    let UpstreamChange { release, question, before, after, modules } = change;
    let more = match modules.len() {
        1 => String::new(),
        n => format!(" and {} more", n - 1),
    };
    let question = question.name();
    format!("in {release}: {}{more}: {question}: {after} (0.21.0: {before})", modules[0])
}

/// The routing rule, on one line.
fn routing_line(routing: &LayerRouting) -> String {
    let more = match routing.modules.len() {
        1 => String::new(),
        n => format!(" and {} more", n - 1),
    };
    let answer = match &routing.found {
        Ok(found) => {
            let notes = found.notes.iter().map(|n| format!("; {n}")).collect::<String>();
            format!("{}{notes}", found.summary())
        }
        Err(reason) => format!("does not run: {reason}"),
    };
    format!("{}{more}: {answer}", routing.modules[0])
}

/// Whether a format supports layer `i`; for Marlin, with upstream's kernel.
fn verdict_cell(verdict: &Verdict, i: usize, layer: &Layer) -> String {
    match (verdict.reasons[i].is_empty(), verdict.target, layer.chosen) {
        (true, "marlin", Some(kernel)) => kernel,
        (true, _, _) => "yes",
        (false, _, _) => "no",
    }
    .to_owned()
}

/// The layout, producer and ranks of a converted folder.
fn converted_line(c: &Converted) -> String {
    let mut line = format!(", converted for {} by {}", c.layout, c.producer);
    for (what, ranks) in [("tensor", c.tp), ("expert", c.ep)] {
        if ranks.size > 1 {
            line.push_str(&format!(", {what}-parallel rank {} of {}", ranks.rank, ranks.size));
        }
    }
    line
}

/// The layers that a format does not support; layers with the same reasons share a line.
fn refusals(verdict: &Verdict, layers: &[Layer], paint: Paint) -> String {
    let mut groups: Vec<(&[String], Vec<&str>)> = Vec::new();
    for (layer, reasons) in layers.iter().zip(&verdict.reasons).filter(|(_, r)| !r.is_empty()) {
        match groups.iter_mut().find(|(known, _)| *known == reasons.as_slice()) {
            Some((_, modules)) => modules.push(&layer.module),
            None => groups.push((reasons, vec![&layer.module])),
        }
    }
    let mut text = String::new();
    for (reasons, modules) in groups {
        let more = match modules.len() {
            1 => String::new(),
            n => format!(" and {} more", n - 1),
        };
        let head = paint.odd(&printable(&format!("not for {}:", verdict.column)));
        let line = format!("{}{more}: {}", modules[0], reasons.join("; "));
        text.push_str(&format!("{head} {}\n", printable(&line)));
    }
    text
}

fn table(found: &Inspection) -> Table {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    let mut header = vec!["layer", "format", "type", "bits", "group", "act-order", "K x N", "size"];
    header.extend(found.verdicts.iter().map(|v| v.column));
    table.set_header(header);
    for (i, l) in found.layers.iter().enumerate() {
        let experts =
            if l.role != Role::Dense { format!(" x {}", l.experts) } else { String::new() };
        let mut row = vec![
            printable(&l.module).into_owned(),
            printable(&l.format).into_owned(),
            printable(&l.weight_type).into_owned(),
            l.bits.map_or_else(String::new, |b| b.to_string()),
            l.group_size.to_config().to_string(),
            if l.act_order { "yes" } else { "no" }.to_owned(),
            format!("{} x {}{experts}", l.shape.size_k, l.shape.size_n),
            size(l.bytes),
        ];
        row.extend(found.verdicts.iter().map(|v| verdict_cell(v, i, l)));
        table.add_row(row);
    }
    for column in [3, 4, 7] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}
