//! The text report: a block per case with a row per output, then the summary.

use comfy_table::{CellAlignment, ContentArrangement, Table};
use marlinspike::check::{OutputReport, Verdict};
use marlinspike_report::text;
use textwrap::core::display_width;

use super::paragraph::{Detail, Details, View, hanging, labelled};
use super::shown::{self, Block, CaseBlock, Recorded};
use super::{Run, totals};
use crate::style::printable;

const HEADER: [&str; 6] = ["output", "values", "bit-equal", "wrong", "error/bound", "verdict"];
/// Spaces before a row and between its cells.
const INDENT: usize = 2;
const GAP: usize = 2;
/// Least width of an output's name.
const LEAST_NAME: usize = 12;

const LEGEND: &str = "bit-equal: share of values with the reference's bits. wrong: values outside \
    their bound (error/bound above 1) or, if no error is shown, values that differ in any bit.";

/// The blocks and the summary below them.
pub(super) fn render(run: &Run, view: &View) -> String {
    let blocks = shown::blocks(run, view.verbose);
    let rows: Vec<&OutputReport> = outputs(&blocks).collect();
    let mut page = Page {
        view: *view,
        details: Details::new(details(&blocks)),
        rows: table_lines(&rows, view).into_iter(),
        lines: Vec::new(),
    };
    if !rows.is_empty() {
        let legend = hanging("", LEGEND, 0, view.width);
        page.lines.extend(legend.iter().map(|line| view.paint.dim(line)));
        page.lines.push(String::new());
        page.row();
    }
    for block in &blocks {
        page.block(block);
        page.lines.push(String::new());
    }
    page.lines.extend(totals::lines(run, view));
    let mut out = page.lines.join("\n");
    out.push('\n');
    out
}

fn cases<'b, 'r>(blocks: &'b [Block<'r>]) -> impl Iterator<Item = &'b CaseBlock<'r>> {
    blocks.iter().filter_map(|b| if let Block::Case(case) = b { Some(case) } else { None })
}

fn outputs<'b>(blocks: &'b [Block<'_>]) -> impl Iterator<Item = &'b OutputReport> {
    cases(blocks).flat_map(|c| &c.rows).map(|row| row.output)
}

fn details<'b>(blocks: &'b [Block<'_>]) -> impl Iterator<Item = &'b Detail> {
    cases(blocks).flat_map(|c| {
        let reasons = c.unchecked.iter().filter_map(|u| u.reason.as_ref());
        c.rows.iter().flat_map(|row| &row.details).chain(reasons)
    })
}

/// The lines of the report under construction.
struct Page {
    view: View,
    details: Details,
    /// The remaining lines of the table: header and rows, one line each.
    rows: std::vec::IntoIter<String>,
    lines: Vec<String>,
}

impl Page {
    /// Appends the table's next line.
    fn row(&mut self) {
        self.lines.extend(self.rows.next());
    }

    fn details(&mut self, details: &[Detail]) {
        let lines = self.details.lines(details, self.view.paint, self.view.width);
        self.lines.extend(lines);
    }

    fn block(&mut self, block: &Block<'_>) {
        let View { paint, width, .. } = self.view;
        match block {
            Block::Error { text, help } => {
                let first = format!("{} ", paint.bad("ERROR"));
                self.lines.extend(hanging(&first, text, "ERROR ".len(), width));
                let first = format!("{} ", paint.strong(" help"));
                self.lines.extend(hanging(&first, help, "ERROR ".len(), width));
            }
            Block::Recorded(Recorded { fault, labels, cause }) => {
                let heading = format!("as expected, a known fault of upstream: {fault}");
                let heading = hanging("", &heading, INDENT, width);
                self.lines.extend(heading.iter().map(|line| paint.strong(line)));
                self.lines.extend(labelled("cases", &labels.join(", "), paint, width));
                self.lines.extend(labelled("diagnosis", cause, paint, width));
            }
            Block::Case(case) => self.case(case),
        }
    }

    fn case(&mut self, case: &CaseBlock<'_>) {
        let View { paint, width, .. } = self.view;
        let heading = hanging("", case.label, INDENT, width);
        self.lines.extend(heading.iter().map(|line| paint.strong(line)));
        if let Some(line) = self.lines.last_mut() {
            line.push_str(&paint.dim(&format!(" ({})", printable(case.op))));
        }
        for row in &case.rows {
            self.row();
            self.details(&row.details);
        }
        for unchecked in &case.unchecked {
            let first = format!("  {} ", paint.odd("not checked"));
            self.lines.extend(hanging(&first, &unchecked.names.join(", "), 14, width));
            self.details(unchecked.reason.as_slice());
        }
        if !case.passing.is_empty() {
            let first = format!("  {} ", paint.good("pass"));
            self.lines.extend(hanging(&first, &case.passing.join(", "), 7, width));
        }
    }
}

/// Header and rows, one line each.
fn table_lines(outputs: &[&OutputReport], view: &View) -> Vec<String> {
    if outputs.is_empty() {
        return Vec::new();
    }
    let mut table = Table::new();
    // No borders and no wrapping: each row is one line, so that details fit between rows.
    table.load_style(comfy_table::presets::NOTHING);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(HEADER);
    let cells: Vec<[String; 5]> = outputs.iter().map(|o| numbers(o)).collect();
    let name = name_width(outputs, &cells, view.width);
    for (o, cells) in outputs.iter().zip(cells) {
        table.add_row([cut(&printable(&o.name), name)].into_iter().chain(cells));
    }
    for (i, column) in table.column_iter_mut().enumerate() {
        let gap = if i + 1 < HEADER.len() { GAP } else { 0 };
        column.set_padding((if i == 0 { INDENT as u16 } else { 0 }, gap as u16));
        if (1..5).contains(&i) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut lines = table.lines();
    let header = lines.next().map(|line| view.paint.strong(line.trim_end()));
    let rows = outputs.iter().zip(lines).map(|(o, line)| painted(o, line.trim_end(), view));
    header.into_iter().chain(rows).collect()
}

/// A row whose last cell, the verdict, has its colour.
fn painted(o: &OutputReport, row: &str, view: &View) -> String {
    let paint = view.paint;
    let verdict = text::verdict(o.verdict);
    let Some(before) = row.strip_suffix(verdict) else { return row.to_owned() };
    let verdict = match o.verdict {
        Verdict::Pass => paint.good(verdict),
        Verdict::Fail => paint.bad(verdict),
        Verdict::Unchecked => paint.odd(verdict),
    };
    format!("{before}{verdict}")
}

/// The cells after the name.
fn numbers(o: &OutputReport) -> [String; 5] {
    [
        o.elements.to_string(),
        text::share(o),
        o.mismatches.to_string(),
        text::error(o.max_error_over_bound),
        text::verdict(o.verdict).to_owned(),
    ]
}

/// The width of the name column that makes every row fit, but at least [`LEAST_NAME`].
fn name_width(outputs: &[&OutputReport], cells: &[[String; 5]], width: usize) -> usize {
    let longest = outputs.iter().map(|o| display_width(&printable(&o.name))).max().unwrap_or(0);
    let column = |i: usize| {
        let widths = cells.iter().map(|row| display_width(&row[i]));
        GAP + widths.max().unwrap_or(0).max(HEADER[i + 1].len())
    };
    let others: usize = (0..5).map(column).sum();
    longest.min(width.saturating_sub(INDENT + others).max(LEAST_NAME))
}

/// `name`, truncated to `width`.
fn cut(name: &str, width: usize) -> String {
    if display_width(name) <= width {
        return name.to_owned();
    }
    let mut shown = String::new();
    for c in name.chars() {
        if display_width(&shown) + display_width(c.encode_utf8(&mut [0; 4])) + 1 > width {
            break;
        }
        shown.push(c);
    }
    shown + "…"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::style::Paint;

    #[test]
    fn long_names_are_cut() {
        assert_eq!(cut("marlin_qweight", 14), "marlin_qweight");
        assert_eq!(cut("marlin_qweight", 8), "marlin_…");
    }

    #[test]
    fn a_verdict_alone_has_its_colour() {
        let output = OutputReport::unchecked("y", 8, "");
        let mut view =
            View { paint: Paint { on: false }, width: 80, verbose: false, has_report: false };
        let plain = table_lines(&[&output], &view);
        assert!(plain[1].ends_with("not checked"), "{plain:?}");
        view.paint.on = true;
        let coloured = table_lines(&[&output], &view);
        assert_eq!(coloured[0], view.paint.strong(&plain[0]));
        let before = plain[1].strip_suffix("not checked").unwrap();
        assert_eq!(coloured[1], format!("{before}{}", view.paint.odd("not checked")));
    }

    #[test]
    fn rows_fit_eighty_columns() {
        let mut output = OutputReport::unchecked(&"g_idx".repeat(20), 1_000_000, "");
        output.mismatches = 999_999;
        output.equal_bits = Some(1e-12);
        output.max_error_over_bound = Some(1.5e9);
        let view =
            View { paint: Paint { on: false }, width: 80, verbose: false, has_report: false };
        let lines = table_lines(&[&output], &view);
        assert_eq!(lines.len(), 2);
        for line in lines {
            assert!(display_width(&line) <= 80, "{line}");
        }
    }
}
