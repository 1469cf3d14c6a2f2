//! A self-contained page, and its parts.

use std::fmt::{self, Write as _};

use crate::mismatch_map::LEVELS;
use crate::numbered::{Numbered, numbered, output_id};
use crate::{Entry, Severity, card, escape, outputs};

/// Largest number of cards, so that the page stays readable and loads quickly.
const MAX_CARDS: usize = 200;

/// The style of the page and of [`cards`].
pub const CSS: &str = include_str!("page.css");

/// The text at the top of a page.
#[derive(Debug, Clone, Default)]
pub struct Head<'t> {
    lines: Vec<&'t str>,
}

impl<'t> Head<'t> {
    /// A summary in one line.
    pub fn new(summary: &'t str) -> Self {
        Self { lines: vec![summary] }
    }

    /// With another line.
    pub fn line(mut self, line: &'t str) -> Self {
        self.lines.push(line);
        self
    }
}

/// Cases of one severity, in their order.
struct Group<'r> {
    severity: Severity,
    entries: Vec<Numbered<'r>>,
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
            Severity::Recorded => "Cases with the fault that golden/manifest.json records",
            Severity::Remark => "Cases that pass with a remark",
            Severity::Pass => "Cases that pass",
        }
    }
}

/// The cases that need attention, failures first.
fn groups<'r>(entries: &[Numbered<'r>]) -> Vec<Group<'r>> {
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
        let own = entries.iter().filter(|e| e.entry.severity() == severity);
        let entries: Vec<_> = own.copied().collect();
        let fits = entries.iter().take_while(|entry| {
            let report = entry.entry.result.as_ref().ok();
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

/// The whole page, with an index, a card for each output that does not pass and a table of all.
pub fn page(head: &Head<'_>, entries: &[Entry<'_>]) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_page(&mut out, head, entries);
    out
}

/// The cards and the table of one case, for a page that exists already and has [`CSS`].
pub fn cards(entry: &Entry<'_>) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_cards(&mut out, entry);
    out
}

fn write_cards(out: &mut String, entry: &Entry<'_>) -> fmt::Result {
    if entry.severity() == Severity::Fail {
        legend(out)?;
    }
    let entries = numbered(std::slice::from_ref(entry));
    for entry in &entries {
        card::case(out, entry)?;
    }
    outputs::table(out, &entries, &[0])
}

fn write_page(out: &mut String, text: &Head<'_>, entries: &[Entry<'_>]) -> fmt::Result {
    head(out, text, entries)?;
    let entries = numbered(entries);
    let groups = groups(&entries);
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

fn head(out: &mut String, head: &Head<'_>, entries: &[Entry<'_>]) -> fmt::Result {
    let any = |severity| entries.iter().any(|e| e.severity() == severity);
    let (class, word) = if any(Severity::Fail) {
        ("fail", "failed")
    } else if any(Severity::Error) {
        ("error", "unreadable cases")
    } else if any(Severity::Unchecked) {
        ("unchecked", "with unchecked outputs")
    } else {
        ("pass", "passed")
    };
    let version = env!("CARGO_PKG_VERSION");
    let lines: Vec<_> = head.lines.iter().map(|line| format!("{}.", escape(line))).collect();
    write!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>marlinspike check: {word}</title>\n<style>\n{CSS}</style>\n</head>\n<body>\n<main>\n\
         <h1>marlinspike check <span class=\"badge {class}\">{word}</span></h1>\n\
         <p>{}</p>\n<p class=\"soft\">marlinspike {version}</p>\n",
        lines.join("<br>")
    )
}

/// Links to every case that does not pass, and to its outputs.
fn index(out: &mut String, groups: &[Group<'_>]) -> fmt::Result {
    out.push_str("<nav class=\"card\">\n");
    for group in groups {
        let (id, title, count) = (group.id(), group.title(), group.entries.len());
        writeln!(out, "<p><a href=\"#{id}\">{title}</a> <span class=\"soft\">{count}</span></p>")?;
        out.push_str("<ul>\n");
        for Numbered { index, entry } in &group.entries[..group.carded] {
            write!(out, "<li><a href=\"#c{index}\">{}</a>", escape(entry.label))?;
            if let Ok(report) = &entry.result {
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
