//! The table and lines of `inspect`.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use marlinspike::select::Capability;
use marlinspike_model::convert::config::weight_type;
use marlinspike_model::inspect::experts::Kernels;
use marlinspike_model::inspect::routing::LayerRouting;
use marlinspike_model::inspect::{Inspection, Layer};
use marlinspike_model::model::bind;
use marlinspike_model::model::layers::Role;

use crate::style::{Paint, printable, size};

/// Everything for people.
pub(super) fn text(found: &Inspection, device: &Capability, paint: Paint) -> String {
    let method = &found.quant_method;
    let mut text = format!("{}\n\n", paint.strong(&format!("quantization: {method}")));
    if !found.layers.is_empty() {
        text.push_str(&table(&found.layers).to_string());
        text.push_str("\n\n");
    }
    for l in found.layers.iter().filter(|l| l.chosen.is_none()) {
        let reasons = l.reasons.join("; ");
        text.push_str(&format!("{} {}\n", paint.odd(&printable(&l.module)), printable(&reasons)));
    }
    for f in &found.fused {
        text.push_str(&format!("{} {}\n", paint.odd(&printable(&f.module)), printable(&f.reason)));
    }
    for routing in &found.routing {
        text.push_str(&printable(&routing_line(routing)));
        text.push('\n');
    }
    for kernels in &found.kernels {
        text.push_str(&printable(&kernels_line(kernels, device)));
        text.push('\n');
    }
    for (reason, modules) in &found.unquantized {
        let example = modules.first().map_or("", String::as_str);
        let count = modules.len();
        let line = format!("not quantized: {count} modules such as `{example}`: {reason}");
        text.push_str(&paint.dim(&printable(&line)));
        text.push('\n');
    }
    text.push_str(&format!(
        "\n{} layers, {} of them for Marlin; {} quantized of {} in {} files\n",
        found.layers.len(),
        found.layers.iter().filter(|l| l.chosen.is_some()).count(),
        size(found.layers.iter().map(|l| l.bytes).sum()),
        size(found.bytes),
        found.files,
    ));
    text
}

/// One line for people.
fn kernels_line(kernels: &Kernels, device: &Capability) -> String {
    let answer = match &kernels.selection.chosen {
        Ok(Some(choice)) => format!("{} ({})", choice.backend.name(), choice.experts),
        Ok(None) => "none of its kernels".to_owned(),
        Err(error) => error.to_string(),
    };
    format!("experts in {}: upstream's kernel on {device}: {answer}", kernels.format)
}

/// One line for people.
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

fn table(lines: &[Layer]) -> Table {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header([
        "layer",
        "format",
        "type",
        "bits",
        "group",
        "act-order",
        "K x N",
        "size",
        "backend",
    ]);
    for l in lines {
        let experts =
            if l.role != Role::Dense { format!(" x {}", l.experts) } else { String::new() };
        let group = bind::group_size(&l.scheme, l.shape.size_k).to_config();
        table.add_row([
            printable(&l.module).into_owned(),
            l.scheme.label(),
            weight_type(&l.scheme).to_owned(),
            l.scheme.bits().map_or_else(String::new, |b| b.to_string()),
            group.to_string(),
            if bind::act_order(&l.scheme) { "yes" } else { "no" }.to_owned(),
            format!("{} x {}{experts}", l.shape.size_k, l.shape.size_n),
            size(l.bytes),
            l.chosen.unwrap_or("none, see below").to_owned(),
        ]);
    }
    for column in [3, 4, 7] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}
