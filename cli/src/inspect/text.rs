//! The text of `inspect`: equal layers on one line, and one verdict for each kernel.

use std::collections::BTreeMap;

use marlinspike::num::dims::GroupSize;
use marlinspike::select::Capability;
use marlinspike_model::convert::settings::Format;
use marlinspike_model::inspect::experts::Kernels;
use marlinspike_model::inspect::releases::UpstreamChange;
use marlinspike_model::inspect::routing::LayerRouting;
use marlinspike_model::inspect::verdicts::Verdict;
use marlinspike_model::inspect::{Converted, Inspection, Layer};
use marlinspike_model::model::layers::Role;

use super::details;
use crate::output::{columns, hanging};
use crate::style::{Paint, counted, printable, size};

/// Width of the text where there is no terminal.
const WIDTH: usize = 80;

/// The complete text output. With `verbose`, a line for each layer instead of equal layers together.
pub(super) fn text(found: &Inspection, device: &Capability, verbose: bool, paint: Paint) -> String {
    let width = if columns() == usize::MAX { WIDTH } else { columns() };
    let method = &found.quant_method;
    let converted = found.converted.as_ref().map_or_else(String::new, converted_line);
    let head = format!("quantization: {method}{converted}");
    let mut lines: Vec<String> =
        hanging("", &head, 2, width).iter().map(|l| paint.strong(l)).collect();
    lines.push(String::new());
    if verbose && !found.layers.is_empty() {
        lines.extend(details::layers(found, paint).lines().map(str::to_owned));
        lines.push(String::new());
    } else if !found.layers.is_empty() {
        lines.extend(groups(&found.layers, paint));
        lines.push(paint.strong(&format!("kernels for {device}")));
        for verdict in &found.verdicts {
            lines.extend(verdict_lines(verdict, &found.layers, paint, width));
        }
        lines.push(String::new());
    }
    let mut notes: Vec<String> = Vec::new();
    notes.extend(found.fused.iter().map(|f| format!("{} {}", f.module, f.reason)));
    notes.extend(found.refused.iter().map(|(m, why)| format!("refused: {m}: {}", why.join("; "))));
    let plain = |module| format!("{module}: 16- or 32-bit experts; `run` computes the block");
    notes.extend(found.plain.iter().map(plain));
    notes.extend(routing_lines(&found.routing));
    notes.extend(found.kernels.iter().map(|kernels| kernels_line(kernels, device)));
    notes.extend(found.upstream_changes.iter().map(change_line));
    lines.extend(notes.iter().flat_map(|note| hanging("", note, 2, width)));
    for (reason, modules) in &found.unquantized {
        let example = modules.first().map_or("", String::as_str);
        let such = if modules.len() == 1 { "" } else { "such as " };
        let count = counted(modules.len(), "module");
        let line = format!("not quantized: {count}, {such}`{example}`: {reason}");
        lines.extend(hanging("", &line, 2, width).iter().map(|line| paint.dim(line)));
    }
    lines.push(String::new());
    lines.push(format!(
        "{}: {} quantized of {} in {}",
        counted(found.layers.len(), "layer"),
        size(found.layers.iter().map(|l| l.bytes).sum()),
        size(found.bytes),
        counted(found.files, "file"),
    ));
    if !verbose && !found.layers.is_empty() {
        lines.push(paint.dim("-v prints every layer and the reasons for each"));
    }
    lines.join("\n") + "\n"
}

/// The numbers between the dots of a module as `*`, and the first of them.
fn pattern(module: &str) -> (String, Option<u64>) {
    let mut first = None;
    let part = |part: &str| match part.parse::<u64>() {
        Ok(number) => {
            first = first.or(Some(number));
            "*".to_owned()
        }
        Err(_) => part.to_owned(),
    };
    let pattern = module.split('.').map(part).collect::<Vec<_>>().join(".");
    (pattern, first)
}

/// Numbers as ranges: `0-2, 5`.
fn ranges(numbers: &[u64]) -> String {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for &n in numbers {
        match runs.last_mut() {
            Some((_, end)) if n == *end || n == *end + 1 => *end = n,
            _ => runs.push((n, n)),
        }
    }
    let shown = |&(from, to): &(u64, u64)| {
        if from == to { from.to_string() } else { format!("{from}-{to}") }
    };
    runs.iter().map(shown).collect::<Vec<_>>().join(", ")
}

/// `gptq uint4b8, 4 bits, groups of 128, act-order`.
fn title(layer: &Layer) -> String {
    let mut title = layer.format.clone();
    if !title.contains(&layer.weight_type) {
        title.push_str(&format!(" {}", layer.weight_type));
    }
    title.push_str(&layer.bits.map_or_else(String::new, |bits| format!(", {bits} bits")));
    match layer.group_size {
        GroupSize::Of(size) => title.push_str(&format!(", groups of {size}")),
        GroupSize::Channel => title.push_str(", a scale for each column or matrix"),
    }
    if layer.act_order {
        title.push_str(", act-order");
    }
    title
}

/// `2048 x 1536 x 128`.
fn shape(layer: &Layer) -> String {
    let experts =
        if layer.role == Role::Dense { String::new() } else { format!(" x {}", layer.experts) };
    format!("{} x {}{experts}", layer.shape.size_k, layer.shape.size_n)
}

/// Equal layers.
#[derive(Default)]
struct Group {
    name: String,
    shape: String,
    numbers: Vec<u64>,
    count: usize,
    bytes: u64,
}

/// One line for equal layers, below the title of their format.
fn groups(layers: &[Layer], paint: Paint) -> Vec<String> {
    // Titles, and the groups of each, in the order in which they appear.
    let mut titles: Vec<String> = Vec::new();
    let mut all: BTreeMap<usize, Vec<Group>> = BTreeMap::new();
    for layer in layers {
        let title = title(layer);
        let at = titles.iter().position(|known| *known == title).unwrap_or_else(|| {
            titles.push(title);
            titles.len() - 1
        });
        let (name, first) = pattern(&layer.module);
        let (shape, rows) = (shape(layer), all.entry(at).or_default());
        let row = match rows.iter().position(|g| g.name == name && g.shape == shape) {
            Some(row) => row,
            None => {
                rows.push(Group { name, shape, ..Group::default() });
                rows.len() - 1
            }
        };
        let group = &mut rows[row];
        group.numbers.extend(first);
        group.count += 1;
        group.bytes += layer.bytes;
    }
    let names: Vec<&str> = all.values().flatten().map(|group| group.name.as_str()).collect();
    let split = |name: &str| names.iter().filter(|other| **other == name).count() > 1;
    let shown = |group: &Group| {
        // A pattern in two lines does not say which layers are which.
        let which = match split(&group.name) && !group.numbers.is_empty() {
            true => format!(" ({})", ranges(&group.numbers)),
            false => String::new(),
        };
        printable(&format!("{}{which}", group.name)).into_owned()
    };
    let mut rows: Vec<[String; 4]> = Vec::new();
    for group in all.values().flatten() {
        let (count, shape) = (group.count.to_string(), group.shape.clone());
        rows.push([shown(group), count, shape, size(group.bytes)]);
    }
    let head = ["layers", "count", "K x N x experts", "size"];
    let width = |i: usize| {
        rows.iter().map(|row| row[i].chars().count()).chain([head[i].len()]).max().unwrap_or(0)
    };
    let widths = [0, 1, 2, 3].map(width);
    let line = |cells: [&str; 4]| {
        let [name, count, shape, bytes] = cells;
        let [w0, w1, w2, w3] = widths;
        format!("  {name:<w0$}  {count:>w1$}  {shape:<w2$}  {bytes:>w3$}")
    };
    let mut lines = Vec::new();
    let mut next = rows.iter();
    for (at, groups) in &all {
        lines.push(paint.strong(&printable(&titles[*at])));
        if *at == 0 {
            lines.push(paint.dim(&line(head)));
        }
        for row in next.by_ref().take(groups.len()) {
            lines.push(line([&row[0], &row[1], &row[2], &row[3]]));
        }
        lines.push(String::new());
    }
    lines
}

/// What a kernel format is.
fn explained(verdict: &Verdict) -> String {
    match Format::from_name(verdict.target) {
        Some(format) => {
            format!("{} (`convert --to {}`)", (format.descriptor().about)(), verdict.target)
        }
        None => "this project's CUDA kernels, on any GPU of this capability (`run --backend cuda`)"
            .to_owned(),
    }
}

/// Whether a kernel takes the layers, what it is, and the reasons for those it does not take.
fn verdict_lines(verdict: &Verdict, layers: &[Layer], paint: Paint, width: usize) -> Vec<String> {
    /// Columns before the text.
    const INDENT: usize = 20;
    let (taken, all) = (verdict.taken(), layers.len());
    let (word, style): (_, fn(Paint, &str) -> String) = match taken {
        0 => ("no", Paint::odd),
        n if n == all => ("yes", Paint::good),
        _ => ("some", Paint::odd),
    };
    let first = format!("  {}{:<12}", style(paint, &format!("{word:<6}")), verdict.column);
    // Colours take no columns.
    let blank = " ".repeat(INDENT);
    let mut text = explained(verdict);
    if 0 < taken && taken < all {
        text = format!("{taken} of {}; {text}", counted(all, "layer"));
    }
    let mut lines = hanging(&blank, &text, INDENT, width);
    if let Some(line) = lines.first_mut() {
        *line = format!("{first}{}", line.trim_start());
    }
    let mut reasons: Vec<(String, usize)> = Vec::new();
    for each in verdict.reasons.iter().filter(|reasons| !reasons.is_empty()) {
        let text = each.join("; ");
        match reasons.iter_mut().find(|(known, _)| *known == text) {
            Some((_, count)) => *count += 1,
            None => reasons.push((text, 1)),
        }
    }
    for (reason, count) in reasons {
        let refused = format!("not {}: {reason}", counted(count, "layer"));
        lines.extend(hanging(&blank, &refused, INDENT + 2, width));
    }
    lines
}

/// The selected kernel of a format's experts, on one line.
fn kernels_line(kernels: &Kernels, device: &Capability) -> String {
    let answer = match &kernels.selection.chosen {
        Ok(Some(choice)) => {
            format!("backend {} (class {})", choice.backend.name(), choice.experts)
        }
        Ok(None) => "none of its kernels".to_owned(),
        Err(error) => error.to_string(),
    };
    let format = &kernels.format;
    format!("experts in {format}: vLLM 0.21.0 selects on {device}: {answer}")
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

/// The routing rules, each on one line with the modules that have it.
fn routing_lines(routing: &[LayerRouting]) -> Vec<String> {
    routing.iter().map(routing_line).collect()
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
