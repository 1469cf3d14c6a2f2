//! The table for people: a line per output, the details of a mismatch below its line.

use std::fmt::Write as _;

use comfy_table::{Attribute, Cell, CellAlignment, Color, ContentArrangement, Row, Table};
use marlinspike::check::{OutputReport, Verdict};

use super::{Checked, Run, text};
use crate::style::{Paint, printable};

/// Longest list of unchecked outputs' names that is shown in full.
const MAX_NAMES: usize = 36;

/// A table whose rows may have lines of text below them.
struct Lines {
    table: Table,
    below: Vec<Vec<String>>,
    paint: Paint,
    /// Whether any output has floating-point errors, which need columns of their own.
    errors: bool,
}

impl Lines {
    fn new(run: &Run, paint: Paint) -> Self {
        let errors = run
            .checked
            .iter()
            .filter_map(|c| c.result.as_ref().ok())
            .flat_map(|r| &r.outputs)
            .any(|o| o.max_ulp.is_some() || o.max_error_over_bound.is_some());
        let mut table = Table::new();
        // One line per row, so that details can stand between: no borders, no wrapping.
        table.load_preset(comfy_table::presets::NOTHING);
        table.set_content_arrangement(ContentArrangement::Disabled);
        if paint.on {
            table.enforce_styling()
        } else {
            table.force_no_tty()
        };
        let mut header = vec!["case", "output", "values", "equal bits", "mismatches"];
        if errors {
            header.extend(["max ulp", "error/bound"]);
        }
        header.push("verdict");
        let bold = |s: &str| Cell::new(s).add_attribute(Attribute::Bold);
        table.set_header(header.iter().map(|s| bold(s)));
        if let Some(column) = table.column_mut(0) {
            column.set_padding((0, 1));
        }
        for column in 2..header.len() - 1 {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        Self { table, below: Vec::new(), paint, errors }
    }

    /// Adds a row: first cells, right-aligned middle ones (short of some: dashes), the verdict.
    fn row(&mut self, case: &str, output: &str, middle: &[String], verdict: Verdict) {
        let mut cells = vec![printable(case).into_owned(), printable(output).into_owned()];
        cells.extend_from_slice(middle);
        cells.resize(if self.errors { 7 } else { 5 }, "-".to_owned());
        let dim = verdict == Verdict::Unchecked;
        let style = |c: Cell| if dim { c.add_attribute(Attribute::Dim) } else { c };
        let mut row: Vec<Cell> = cells.into_iter().map(|s| style(Cell::new(s))).collect();
        let word = Cell::new(text::verdict(verdict));
        row.push(match verdict {
            Verdict::Pass => word.fg(Color::Green),
            Verdict::Fail => word.fg(Color::Red).add_attribute(Attribute::Bold),
            Verdict::Unchecked => style(word.fg(Color::Yellow)),
        });
        self.add(Row::from(row));
    }

    fn error_row(&mut self, case: &str) {
        let mut row = vec![Cell::new(printable(case))];
        row.extend((0..if self.errors { 6 } else { 4 }).map(|_| Cell::new("-")));
        row.push(Cell::new("ERROR").fg(Color::Red).add_attribute(Attribute::Bold));
        self.add(Row::from(row));
    }

    fn add(&mut self, row: Row) {
        self.table.add_row(row);
        self.below.push(Vec::new());
    }

    /// A line below the last row: a label of ours, and text that may hold anything.
    fn note(&mut self, label: &str, text: &str) {
        let label = format!("{label:<15}");
        let label = if label.starts_with("error") { self.paint.bad(&label) } else { label };
        let line = format!("    {label} {}", printable(text));
        if let Some(lines) = self.below.last_mut() {
            lines.push(line);
        }
    }

    fn render(self) -> String {
        let mut out = String::new();
        // The header is the first line.
        let below = std::iter::once(Vec::new()).chain(self.below);
        for (line, below) in self.table.lines().zip(below) {
            out.push_str(line.trim_end());
            out.push('\n');
            for line in below {
                out.push_str(line.trim_end());
                out.push('\n');
            }
        }
        out
    }
}

/// The table and the summary below it.
pub(super) fn render(run: &Run, paint: Paint, verbose: bool) -> String {
    let mut lines = Lines::new(run, paint);
    for checked in run.checked.iter().filter(|c| !c.skipped()) {
        case(&mut lines, checked, verbose);
    }
    let mut out = if lines.below.is_empty() { String::new() } else { lines.render() + "\n" };
    summary(&mut out, run, paint, verbose);
    out
}

fn case(lines: &mut Lines, checked: &Checked, verbose: bool) {
    let report = match &checked.result {
        Ok(report) => report,
        Err(error) => {
            lines.error_row(&checked.label);
            lines.note("error:", &error.to_string());
            return;
        }
    };
    if report.outputs.is_empty() {
        lines.row(&checked.label, "(no outputs)", &[], Verdict::Unchecked);
    }
    // An output that was compared has something to say, checked or not.
    let one_by_one = |o: &&OutputReport| verbose || o.is_compared();
    for output in report.outputs.iter().filter(one_by_one) {
        one(lines, &checked.label, output, verbose);
        if let (Verdict::Fail, Some(fault)) = (output.verdict, checked.fails_as_recorded()) {
            lines.note("", &format!("fails as recorded: {fault}"));
        }
    }
    let rest: Vec<_> = report.outputs.iter().filter(|o| !one_by_one(o)).collect();
    if !rest.is_empty() {
        let values: usize = rest.iter().map(|o| o.elements).sum();
        let names = names(&rest.iter().map(|o| o.name.as_str()).collect::<Vec<_>>());
        lines.row(&checked.label, &names, &[values.to_string()], Verdict::Unchecked);
    }
}

fn one(lines: &mut Lines, case: &str, o: &OutputReport, verbose: bool) {
    let mut cells = vec![o.elements.to_string()];
    let compared = o.is_compared();
    if compared {
        cells.extend([text::share(o), o.mismatches.to_string()]);
        if lines.errors {
            cells.extend([text::error(o.max_ulp), text::error(o.max_error_over_bound)]);
        }
    }
    lines.row(case, &o.name, &cells, o.verdict);
    if let Some(m) = &o.first_mismatch {
        for (i, line) in text::place(&o.name, m).iter().enumerate() {
            lines.note(if i == 0 { "first mismatch:" } else { "" }, line);
        }
        lines.note("", &format!("expected {}, found {}", m.expected, m.found));
    }
    if let Some(d) = &o.diagnosis {
        lines.note("diagnosis:", &text::diagnosis(d, o.mismatches));
    } else if o.verdict == Verdict::Fail {
        lines.note("diagnosis:", "no known variant explains it");
    }
    if let Some(note) = o.note.as_deref().filter(|_| verbose || compared) {
        lines.note("note:", note);
    }
    // Most outputs are compared for every bit: that is said only when asked for.
    if let Some(power) = o.power.filter(|power| compared && (verbose || !power.every_bit)) {
        lines.note("power:", &power.text());
    }
}

/// The names, or the first of them and how many there are.
fn names(names: &[&str]) -> String {
    let all = names.join(", ");
    if all.len() <= MAX_NAMES || names.len() == 1 {
        return all;
    }
    let mut shown = String::new();
    for name in names {
        if shown.len() + name.len() + 2 > MAX_NAMES - 12 && !shown.is_empty() {
            break;
        }
        // Writing to a string cannot fail.
        let _ = write!(shown, "{name}, ");
    }
    format!("{shown}... ({} outputs)", names.len())
}

fn summary(out: &mut String, run: &Run, paint: Paint, verbose: bool) {
    let s = &run.summary;
    let count = |n: usize, what: &str, style: fn(Paint, &str) -> String| {
        let text = format!("{n} {what}");
        if n == 0 { paint.dim(&text) } else { style(paint, &text) }
    };
    let cases = [
        count(s.pass, "passed", Paint::good),
        count(s.fail, "failed", Paint::bad),
        count(s.error, if s.error == 1 { "error" } else { "errors" }, Paint::bad),
        count(s.unchecked, "not wholly checked", Paint::odd),
    ];
    let outputs = [
        count(s.outputs_pass, "passed", Paint::good),
        count(s.outputs_fail, "failed", Paint::bad),
        count(s.outputs_unchecked, "not checked", Paint::odd),
    ];
    let mut skipped = String::new();
    if s.fail_as_recorded > 0 {
        skipped += &format!(", {} fail as recorded", s.fail_as_recorded);
    }
    if s.skipped > 0 {
        skipped += &format!("; {} skipped", s.skipped);
    }
    let lines = [
        ("cases", format!("{}: {}{skipped}", s.cases, cases.join(", "))),
        ("outputs", format!("{}: {}", s.outputs(), outputs.join(", "))),
        ("elapsed", format!("{:.2} s", run.elapsed.as_secs_f64())),
    ];
    for (label, text) in lines {
        out.push_str(&format!("{} {text}\n", paint.strong(&format!("{label:<8}"))));
    }
    if let Some(device) = &run.device {
        for (label, text) in device.lines() {
            out.push_str(&format!("{} {text}\n", paint.strong(&format!("{label:<8}"))));
        }
    }
    if s.outputs_unchecked > 0 && !verbose {
        let hint = "outputs that are not checked keep their case from passing; -v says why each is";
        out.push_str(&format!("{}\n", paint.dim(hint)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_of_names_are_cut() {
        assert_eq!(names(&["y"]), "y");
        assert_eq!(names(&["topk_ids", "y"]), "topk_ids, y");
        let many = ["activated", "down", "expert_ids", "gate_up", "sorted_token_ids", "y"];
        assert_eq!(names(&many), "activated, down, ... (6 outputs)");
    }
}
