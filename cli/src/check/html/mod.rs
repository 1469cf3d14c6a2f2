//! The page that `--report` writes: one file that needs no other, with a picture of every failed
//! output. Everything that comes from files goes through [`escape`].

use std::fmt::{self, Write as _};

use marlinspike::check::{CaseReport, ErrorMap, Mismatch, OutputReport, Picture, Verdict};

use super::svg::{Drawing, LEVELS};
use super::{Checked, Run, errors, text};
use crate::style::printable;

/// Failed outputs that get a card; a page of thousands helps nobody.
const MAX_CARDS: usize = 200;

/// Text as HTML content or a quoted attribute's value, control characters written out.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in printable(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// The whole page.
pub(super) fn render(run: &Run) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = page(&mut out, run);
    out
}

fn page(out: &mut String, run: &Run) -> fmt::Result {
    let s = &run.summary;
    let (class, word) = match s {
        _ if s.error > 0 => ("error", "unreadable cases"),
        _ if s.fail > 0 => ("fail", "failed"),
        _ if s.unchecked > 0 => ("unchecked", "not wholly checked"),
        _ => ("pass", "passed"),
    };
    let css = include_str!("page.css");
    let version = env!("CARGO_PKG_VERSION");
    write!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>marlinspike check: {word}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n\
         <h1>marlinspike check <span class=\"badge {class}\">{word}</span></h1>\n\
         <p class=\"soft\">version {version}, {:.2} s</p>\n",
        run.elapsed.as_secs_f64()
    )?;
    let tiles = [
        (s.cases, "cases", ""),
        (s.pass, "passed", "is-good"),
        (s.fail, "failed", "is-bad"),
        (s.error, "unreadable", "is-bad"),
        (s.unchecked, "not wholly checked", "is-odd"),
    ];
    write_tiles(out, &tiles)?;
    let tiles = [
        (s.outputs(), "outputs", ""),
        (s.outputs_pass, "passed", "is-good"),
        (s.outputs_fail, "failed", "is-bad"),
        (s.outputs_unchecked, "not checked", "is-odd"),
    ];
    write_tiles(out, &tiles)?;
    if s.skipped > 0 {
        let n = s.skipped;
        writeln!(out, "<p class=\"soft\">{n} cases without a selected output were skipped.</p>")?;
    }
    unreadable(out, run)?;
    failures(out, run)?;
    outputs(out, run)?;
    out.push_str("</main>\n</body>\n</html>\n");
    Ok(())
}

fn write_tiles(out: &mut String, tiles: &[(usize, &str, &str)]) -> fmt::Result {
    out.push_str("<div class=\"tiles\">");
    for (count, what, class) in tiles {
        let class = if *count == 0 { "zero" } else { class };
        write!(out, "<div class=\"tile {class}\"><b>{count}</b><span>{what}</span></div>")?;
    }
    out.push_str("</div>\n");
    Ok(())
}

fn unreadable(out: &mut String, run: &Run) -> fmt::Result {
    if run.summary.error == 0 {
        return Ok(());
    }
    out.push_str("<h2>Files that could not be read as a case</h2>\n");
    for checked in &run.checked {
        if let Err(error) = &checked.result {
            let (label, error) = (escape(&checked.label), escape(&error.to_string()));
            writeln!(
                out,
                "<div class=\"card\"><h3>{label}</h3><p class=\"mono\">{error}</p></div>"
            )?;
        }
    }
    Ok(())
}

/// Failed outputs in the order of the cases; the position is the card's number.
fn failed(run: &Run) -> impl Iterator<Item = (&Checked, &CaseReport, &OutputReport)> {
    run.checked.iter().flat_map(|c| {
        let report = c.result.as_ref().ok();
        report.into_iter().flat_map(move |r| {
            r.outputs.iter().filter(|o| o.verdict == Verdict::Fail).map(move |o| (c, r, o))
        })
    })
}

fn failures(out: &mut String, run: &Run) -> fmt::Result {
    let count = run.summary.outputs_fail;
    if count == 0 {
        return Ok(());
    }
    out.push_str(
        "<h2>Failed outputs</h2>\n<div class=\"legend\">mismatches among a cell's values:",
    );
    for (level, words) in LEVELS.iter().enumerate() {
        write!(
            out,
            "<span><svg width=\"16\" height=\"16\"><rect class=\"l{level}\" width=\"16\" \
             height=\"16\" rx=\"3\"/></svg>{words}</span>"
        )?;
    }
    out.push_str(
        "<span><svg width=\"16\" height=\"16\"><circle class=\"mark\" cx=\"8\" cy=\"8\" r=\"6\"/>\
         </svg>first mismatch in the buffer</span></div>\n",
    );
    for (number, (checked, report, output)) in failed(run).take(MAX_CARDS).enumerate() {
        card(out, number, checked, report, output)?;
    }
    if count > MAX_CARDS {
        let more = count - MAX_CARDS;
        writeln!(out, "<p class=\"soft\">{more} more failed outputs are in the table only.</p>")?;
    }
    Ok(())
}

fn card(
    out: &mut String,
    number: usize,
    checked: &Checked,
    report: &CaseReport,
    o: &OutputReport,
) -> fmt::Result {
    let (label, name) = (escape(&checked.label), escape(&o.name));
    let diagnosis = match &o.diagnosis {
        Some(d) => escape(&text::diagnosis(d, o.mismatches)),
        None => text::NO_CAUSE.to_owned(),
    };
    write!(
        out,
        "<section class=\"card\" id=\"f{number}\">\n<h3><span class=\"case\">{label} /</span> \
         {name}</h3>\n<div class=\"diagnosis\">{diagnosis}</div>\n<dl><dt>file</dt>\
         <dd><code>{}</code></dd><dt>operation</dt><dd>{}, {}</dd>\
         <dt>wrong values</dt><dd>{} of {} ({} equal)</dd>",
        escape(&checked.path.display().to_string()),
        escape(&report.op),
        if report.name.is_empty() { "unnamed".to_owned() } else { escape(&report.name) },
        o.mismatches,
        o.elements,
        text::share(o),
    )?;
    if let Some(m) = &o.first_mismatch {
        for (i, line) in text::first_wrong(&o.name, m).iter().enumerate() {
            let term = if i == 0 { "first wrong" } else { "" };
            write!(out, "<dt>{term}</dt><dd><code>{}</code></dd>", escape(line))?;
        }
    }
    if o.max_ulp.is_some() || o.max_error_over_bound.is_some() {
        let (ulp, ratio) = (text::error(o.max_ulp), text::error(o.max_error_over_bound));
        write!(out, "<dt>largest error</dt><dd>{ratio} of its bound, {ulp} ulp</dd>")?;
    }
    if let Some(note) = &o.note {
        write!(out, "<dt>note</dt><dd>{}</dd>", escape(note))?;
    }
    if let Some(power) = &o.power {
        write!(out, "<dt>power</dt><dd>{}</dd>", escape(&power.text()))?;
    }
    out.push_str("</dl>\n");
    if let Some(picture) = &o.picture {
        figures(out, picture, o)?;
    }
    out.push_str("</section>\n");
    Ok(())
}

/// Rows of a Marlin tile.
const TILE_K: usize = 16;
/// Columns of a Marlin tile.
const TILE_N: usize = 64;

fn figures(out: &mut String, picture: &Picture, o: &OutputReport) -> fmt::Result {
    out.push_str("<div class=\"figures\">\n");
    let first = o.first_mismatch.as_ref();
    if let Some(map) = &picture.errors {
        product(out, map, first)?;
        out.push_str("</div>\n");
        return Ok(());
    }
    let tiled = first.is_some_and(|m| m.fragment.is_some());
    let stacked = first.is_some_and(|m| m.expert.is_some());
    // A list's plane is its buffer.
    let planes = if picture.row_label == "row" { &[][..] } else { &picture.planes[..] };
    for (expert, grid) in planes {
        let of = if stacked { format!("expert {expert}, ") } else { String::new() };
        let here = first.filter(|m| m.expert.is_none_or(|e| e == *expert));
        let what = format!("{of}({}, n) plane", picture.row_label);
        let drawing = Drawing {
            grid,
            density: 1.0,
            rows: picture.row_label,
            cols: "n",
            lines: if tiled { [Some(TILE_K), Some(TILE_N)] } else { [None, Some(TILE_N)] },
            mark: here.and_then(|m| Some((m.k.or(m.group)?, m.n?))),
            label: format!("mismatches in the {what}"),
        };
        let lines = match drawing.line_steps() {
            [Some(k), Some(n)] => format!("; lines every {k} k and {n} n (tiles are 16 by 64)"),
            [None, Some(n)] => format!("; lines every {n} n"),
            [Some(k), None] => format!("; lines every {k} k (tiles are 16 by 64)"),
            [None, None] => String::new(),
        };
        figure(out, &drawing, &what, &format!("{} by {} values{lines}", grid.rows, grid.cols))?;
    }
    let grid = &picture.buffer;
    let experts = planes.first().map_or(1, |(_, p)| {
        let rows = p.rows / if tiled { TILE_K } else { 1 };
        if stacked && rows > 0 { (grid.rows / rows).max(1) } else { 1 }
    });
    let size = (grid.rows * grid.cols).max(1);
    let per_expert = (grid.rows / experts).max(1);
    let drawing = Drawing {
        grid,
        density: o.elements as f64 / size as f64,
        rows: "row",
        cols: "element of the row",
        lines: [(experts > 1).then_some(per_expert), None],
        mark: first.map(|m| buffer_place(m, per_expert)),
        label: "mismatches in the packed buffer".to_owned(),
    };
    let lines = match drawing.line_steps()[0] {
        Some(step) if step == per_expert => "; a line before every expert".to_owned(),
        Some(step) => format!("; a line before every {} experts", step / per_expert),
        None => String::new(),
    };
    let about = format!("{} rows of {} elements{lines}", grid.rows, grid.cols);
    figure(out, &drawing, "packed buffer", &about)?;
    out.push_str("</div>\n");
    if picture.planes_left_out > 0 {
        let n = picture.planes_left_out;
        writeln!(out, "<p class=\"soft\">{n} more experts with mismatches are not drawn.</p>")?;
    }
    Ok(())
}

/// The figures of a product: its errors, and the part of k that explains them.
fn product(out: &mut String, map: &ErrorMap, first: Option<&Mismatch>) -> fmt::Result {
    let mark = first.and_then(|m| Some((*m.index.first()?, *m.index.last()?)));
    let (width, height) = (map.cols.div_ceil(map.cell_cols), map.rows.div_ceil(map.cell_rows));
    let cell = if width * height > 1 {
        format!("; a cell is {height} by {width} and shows its largest")
    } else {
        String::new()
    };
    out.push_str("<figure>");
    out.push_str(&errors::map(map, mark));
    write!(
        out,
        "<figcaption><b>error over bound</b>: {} rows by {} columns{cell}. Above 1 no kernel of the \
         declared class can be.<span class=\"scale\">",
        map.rows, map.cols
    )?;
    for (level, words) in errors::LEVELS.iter().enumerate() {
        write!(
            out,
            "<span><svg width=\"16\" height=\"16\"><rect class=\"e{level}\" width=\"16\" \
             height=\"16\" rx=\"3\"/></svg>{words}</span>"
        )?;
    }
    out.push_str("</span></figcaption></figure>\n");
    if let Some(cause) = &map.cause {
        let ranges: Vec<String> = cause
            .ranges
            .iter()
            .take(6)
            .map(|r| {
                if r.len() == 1 {
                    r.start.to_string()
                } else {
                    format!("{} to {}", r.start, r.end - 1)
                }
            })
            .collect();
        let more = if cause.ranges.len() > 6 { ", ..." } else { "" };
        writeln!(
            out,
            "<figure>{}<figcaption><b>what explains it</b>: k {}{more} of {}; a line before every \
             group of {}</figcaption></figure>",
            errors::strip(cause),
            ranges.join(", "),
            cause.size_k,
            cause.group_size
        )?;
    }
    Ok(())
}

/// Row and column of the buffer, all experts below each other.
fn buffer_place(m: &Mismatch, rows_per_expert: usize) -> (usize, usize) {
    let own = &m.index[usize::from(m.expert.is_some() && m.index.len() > 1)..];
    let row = if own.len() > 1 { own[0] } else { 0 };
    (m.expert.unwrap_or(0) * rows_per_expert + row, own.last().copied().unwrap_or(0))
}

fn figure(out: &mut String, drawing: &Drawing<'_>, what: &str, about: &str) -> fmt::Result {
    let [rows, cols] = drawing.cell();
    let cell =
        if rows * cols > 1 { format!("; a cell is {rows} by {cols}") } else { String::new() };
    writeln!(
        out,
        "<figure>{}<figcaption><b>{}</b>: {}{cell}</figcaption></figure>",
        drawing.render(),
        escape(what),
        escape(about)
    )
}

fn outputs(out: &mut String, run: &Run) -> fmt::Result {
    out.push_str(
        "<h2>All outputs</h2>\n<div class=\"wide\"><table>\n<thead><tr><th>case</th><th>output</th>\
         <th class=\"num\">values</th><th class=\"num\">equal bits</th><th class=\"num\">mismatches</th>\
         <th class=\"num\">max ulp</th><th class=\"num\">error/bound</th><th>power</th>\
         <th>verdict</th></tr></thead>\n",
    );
    let mut number = 0;
    for checked in run.checked.iter().filter(|c| !c.skipped()) {
        out.push_str("<tbody>");
        let label = escape(&checked.label);
        let report = match &checked.result {
            Ok(report) => report,
            Err(_) => {
                writeln!(
                    out,
                    "<tr><td class=\"case\">{label}</td><td colspan=\"7\" class=\"soft\">not read\
                     </td><td><span class=\"badge error\">error</span></td></tr></tbody>"
                )?;
                continue;
            }
        };
        let (judged, rest): (Vec<_>, Vec<_>) = report.outputs.iter().partition(|o| o.is_compared());
        let span = judged.len() + usize::from(!rest.is_empty() || judged.is_empty());
        let mut case = format!("<td class=\"case\" rowspan=\"{span}\">{label}</td>");
        for o in judged {
            let name = escape(&o.name);
            let (name, badge) = if o.verdict == Verdict::Fail {
                let linked = number < MAX_CARDS;
                number += 1;
                let link = format!("<a href=\"#f{}\">{name}</a>", number - 1);
                (if linked { link } else { name }, "<span class=\"badge fail\">fail</span>")
            } else if o.verdict == Verdict::Pass {
                (name, "<span class=\"badge pass\">pass</span>")
            } else {
                (name, "<span class=\"badge unchecked\">not checked</span>")
            };
            writeln!(
                out,
                "<tr>{}<td>{name}</td><td class=\"num\">{}</td><td class=\"num\">{}</td>\
                 <td class=\"num\">{}</td><td class=\"num\">{}</td><td class=\"num\">{}</td>\
                 <td class=\"soft\">{}</td><td>{badge}</td></tr>",
                std::mem::take(&mut case),
                o.elements,
                text::share(o),
                o.mismatches,
                text::error(o.max_ulp),
                text::error(o.max_error_over_bound),
                o.power.map_or_else(String::new, |power| escape(&power.text())),
            )?;
        }
        if !case.is_empty() || !rest.is_empty() {
            let names: Vec<_> = rest.iter().map(|o| escape(&o.name)).collect();
            let names = if names.is_empty() { "no outputs".to_owned() } else { names.join(", ") };
            let values: usize = rest.iter().map(|o| o.elements).sum();
            writeln!(
                out,
                "<tr class=\"dim\">{case}<td>{names}</td><td class=\"num\">{values}</td>\
                 <td></td><td></td><td></td><td></td><td></td>\
                 <td><span class=\"badge unchecked\">not checked</span></td></tr>"
            )?;
        }
        out.push_str("</tbody>\n");
    }
    out.push_str("</table></div>\n");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_from_a_file_is_markup() {
        assert_eq!(
            escape("<script src=\"x\">&'\u{1b}"),
            "&lt;script src=&quot;x&quot;&gt;&amp;&#39;\\u{1b}"
        );
    }
}
