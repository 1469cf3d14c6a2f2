//! The table of all outputs, grouped by case.

use std::fmt::{self, Write as _};

use marlinspike::check::{OutputReport, Verdict};

use crate::numbered::{Numbered, badge, output_id};
use crate::{escape, flow, text};

const HEADER: [(&str, &str); 8] = [
    ("output", ""),
    ("verdict", ""),
    ("values", "num"),
    ("bit-equal", "num"),
    ("wrong", "num"),
    ("max ulp", "num"),
    ("error/bound", "num"),
    ("power", ""),
];

/// Writes a row for every output. Outputs of `carded` cases that do not pass link to their cards.
pub(crate) fn table(out: &mut String, entries: &[Numbered<'_>], carded: &[usize]) -> fmt::Result {
    out.push_str(
        "<h2 id=\"all\">All outputs</h2>\n<p class=\"soft\"><b>bit-equal</b>: share of values with \
         the reference's bits. <b>wrong</b>: values outside their bound (error/bound above 1) or, \
         if no error is shown, values that differ in any bit.</p>\n<div class=\"wide\"><table>\n<thead><tr>",
    );
    for (name, class) in HEADER {
        write!(out, "<th class=\"{class}\">{name}</th>")?;
    }
    out.push_str("</tr></thead>\n");
    for entry in entries {
        let label = escape(entry.entry.label);
        let columns = HEADER.len();
        writeln!(out, "<tbody><tr class=\"group\"><th colspan=\"{columns}\">{label}</th></tr>")?;
        match &entry.entry.result {
            Err(_) => writeln!(
                out,
                "<tr><td class=\"soft\">not read</td>\
                 <td colspan=\"{}\"><span class=\"badge error\">error</span></td></tr>",
                columns - 1
            )?,
            Ok(report) if report.outputs.is_empty() => {
                writeln!(out, "<tr><td colspan=\"{columns}\" class=\"soft\">no output</td></tr>")?;
            }
            Ok(report) => {
                for o in flow::ordered(report) {
                    let number = report.outputs.iter().position(|p| p.name == o.name);
                    let number = number.filter(|_| carded.contains(&entry.index));
                    row(out, o, number.map(|n| output_id(entry.index, n)))?;
                }
            }
        }
        out.push_str("</tbody>\n");
    }
    out.push_str("</table></div>\n");
    Ok(())
}

/// The row of an output, linked to its card if it has one.
fn row(out: &mut String, o: &OutputReport, card: Option<String>) -> fmt::Result {
    let name = escape(&o.name);
    let name = match card.filter(|_| o.verdict != Verdict::Pass) {
        Some(id) => format!("<a href=\"#{id}\">{name}</a>"),
        None => name,
    };
    let wrong = if o.is_compared() { o.mismatches.to_string() } else { "-".to_owned() };
    let (class, word) = badge(o.verdict);
    write!(out, "<tr><td>{name}</td><td><span class=\"badge {class}\">{word}</span></td>")?;
    let (ulp, ratio) = (text::error(o.max_ulp), text::error(o.max_error_over_bound));
    for cell in [o.elements.to_string(), text::share(o), wrong, ulp, ratio] {
        write!(out, "<td class=\"num\">{cell}</td>")?;
    }
    let power = o.power.map_or_else(String::new, |power| escape(&power.text()));
    writeln!(out, "<td class=\"soft power\">{power}</td></tr>")
}
