//! The self-contained page that `--report` writes, with a plot of every failed output. All text
//! from files goes through [`escape`].

mod card;
mod figures;
mod outputs;

use std::fmt::{self, Write as _};

use super::mismatch_map::LEVELS;
use super::shown::{self, Severity};
use super::{Checked, Run, totals};
use crate::style::printable;

/// Largest number of cards, so that the page stays readable and loads quickly.
const MAX_CARDS: usize = 200;

/// Escapes text for HTML content and quoted attributes; control characters become escape sequences.
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

/// A case with its index in the run.
#[derive(Clone, Copy)]
struct Entry<'r> {
    index: usize,
    checked: &'r Checked,
}

/// The id of an output's card.
fn output_id(case: usize, output: usize) -> String {
    format!("c{case}o{output}")
}

/// Cases of one severity, in their order.
struct Group<'r> {
    severity: Severity,
    entries: Vec<Entry<'r>>,
    /// Number of leading cases that have cards.
    carded: usize,
}

impl Group<'_> {
    fn id(&self) -> &'static str {
        match self.severity {
            Severity::Fail => "failed",
            Severity::Error => "unreadable",
            Severity::Unchecked => "unchecked",
            Severity::Recorded => "recorded",
            Severity::Remark => "remarks",
            Severity::Pass => "passed",
        }
    }

    fn title(&self) -> &'static str {
        match self.severity {
            Severity::Fail => "Failed cases",
            Severity::Error => "Files that could not be read as a case",
            Severity::Unchecked => "Cases with unchecked outputs",
            Severity::Recorded => "Cases that fail as recorded in golden/manifest.json",
            Severity::Remark => "Cases that pass with a remark",
            Severity::Pass => "Cases that pass",
        }
    }
}

/// The cases that need attention, failures first.
fn groups<'r>(entries: &[Entry<'r>]) -> Vec<Group<'r>> {
    let order = [
        Severity::Fail,
        Severity::Error,
        Severity::Unchecked,
        Severity::Remark,
        Severity::Recorded,
    ];
    let mut cards = MAX_CARDS;
    let mut groups = Vec::new();
    for severity in order {
        let own = entries.iter().filter(|e| shown::severity(e.checked) == severity);
        let entries: Vec<_> = own.copied().collect();
        let fits = entries.iter().take_while(|entry| {
            let report = entry.checked.result.as_ref().ok();
            let needed = report.map_or(1, |r| card::outputs(r).len().max(1));
            let fits = needed <= cards;
            cards = if fits { cards - needed } else { 0 };
            fits
        });
        let carded = fits.count();
        if !entries.is_empty() {
            groups.push(Group { severity, entries, carded });
        }
    }
    groups
}

/// The whole page.
pub(super) fn render(run: &Run) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = page(&mut out, run);
    out
}

fn page(out: &mut String, run: &Run) -> fmt::Result {
    let entries = run.checked.iter().enumerate().filter(|(_, c)| !c.skipped());
    let entries: Vec<_> = entries.map(|(index, checked)| Entry { index, checked }).collect();
    let groups = groups(&entries);
    head(out, run)?;
    index(out, &groups)?;
    if groups.iter().any(|g| matches!(g.severity, Severity::Fail | Severity::Recorded)) {
        legend(out)?;
    }
    for group in &groups {
        writeln!(out, "<h2 id=\"{}\">{}</h2>", group.id(), group.title())?;
        for entry in &group.entries[..group.carded] {
            card::case(out, entry)?;
        }
        let more = group.entries.len() - group.carded;
        if more > 0 {
            writeln!(out, "<p class=\"soft\">{more} more are listed in the table below.</p>")?;
        }
    }
    let carded = groups.iter().flat_map(|g| &g.entries[..g.carded]).map(|e| e.index);
    outputs::table(out, &entries, &carded.collect::<Vec<_>>())?;
    out.push_str("</main>\n</body>\n</html>\n");
    Ok(())
}

fn head(out: &mut String, run: &Run) -> fmt::Result {
    let s = &run.summary;
    let (class, word) = match s {
        _ if s.fail > 0 => ("fail", "failed"),
        _ if s.error > 0 => ("error", "unreadable cases"),
        _ if s.unchecked > 0 => ("unchecked", "with unchecked outputs"),
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
         <p>{}.<br>{}.</p>\n<p class=\"soft\">marlinspike {version}</p>\n",
        escape(&totals::cases(s, run.elapsed)),
        escape(&totals::outputs(run)),
    )
}

/// Links to every case that does not pass, and to its outputs.
fn index(out: &mut String, groups: &[Group<'_>]) -> fmt::Result {
    out.push_str("<nav class=\"card\">\n");
    for group in groups {
        let (id, title, count) = (group.id(), group.title(), group.entries.len());
        writeln!(out, "<p><a href=\"#{id}\">{title}</a> <span class=\"soft\">{count}</span></p>")?;
        out.push_str("<ul>\n");
        for Entry { index, checked } in &group.entries[..group.carded] {
            write!(out, "<li><a href=\"#c{index}\">{}</a>", escape(&checked.label))?;
            if let Ok(report) = &checked.result {
                let links = card::outputs(report).into_iter().map(|(number, o)| {
                    let id = output_id(*index, number);
                    format!("<a href=\"#{id}\">{}</a>", escape(&o.name))
                });
                let links: Vec<_> = links.collect();
                if !links.is_empty() {
                    write!(out, ": {}", links.join(", "))?;
                }
            }
            out.push_str("</li>\n");
        }
        out.push_str("</ul>\n");
    }
    out.push_str("<p><a href=\"#all\">All outputs</a></p>\n</nav>\n");
    Ok(())
}

/// The colour scale of the plots of wrong values.
fn legend(out: &mut String) -> fmt::Result {
    out.push_str("<div class=\"legend\">wrong values in a cell:");
    for (level, words) in LEVELS.iter().enumerate() {
        write!(
            out,
            "<span><svg width=\"16\" height=\"16\"><rect class=\"l{level}\" width=\"16\" \
             height=\"16\" rx=\"3\"/></svg>{words}</span>"
        )?;
    }
    out.push_str(
        "<span><svg width=\"16\" height=\"16\"><circle class=\"mark\" cx=\"8\" cy=\"8\" r=\"6\"/>\
         </svg>first wrong value</span></div>\n",
    );
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
