//! `inspect -v`: a line for each layer and each refusal, with the verdicts in columns.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use marlinspike_model::inspect::verdicts::Verdict;
use marlinspike_model::inspect::{Inspection, Layer};
use marlinspike_model::model::layers::Role;

use crate::style::{Paint, printable, size};

/// The table, and the refusals.
pub(super) fn layers(found: &Inspection, paint: Paint) -> String {
    let mut text = format!("{}\n\n", table(found));
    for verdict in &found.verdicts {
        text.push_str(&refusals(verdict, &found.layers, paint));
    }
    text
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
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
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
