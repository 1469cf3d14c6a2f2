//! The table of laws, axis values and devices.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use marlinspike::Result;
use marlinspike::case::{CaseConfig, Op};
use marlinspike::vectors;

use super::{axes_on_cuda, cuda_objection, laws, rows};
use crate::campaign::axes as keys_of;

/// The tests of one law with one value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cell {
    /// On the CPU.
    pub cpu: usize,
    /// On a GPU.
    pub cuda: usize,
}

/// The tests with one value of an axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// The axis.
    pub axis: String,
    /// The value.
    pub value: String,
    /// A cell for each law.
    pub cells: Vec<Cell>,
    /// Why a cell is empty, for the CPU and for CUDA.
    pub reasons: [Option<&'static str>; 2],
}

/// The tests of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// The operation.
    pub op: Op,
    /// Its laws.
    pub laws: Vec<&'static str>,
    /// Whether the axes are declared, and the cells count rows of a covering array; else each law is
    /// tried with random configurations of the lattice, and the cells count those that have the value.
    pub is_declared: bool,
    /// The values of each axis.
    pub lines: Vec<Line>,
}

/// Configurations that the tests of a plain `cargo test` try, each with its law and its values.
#[derive(Clone)]
struct Tried {
    law: Option<usize>,
    values: BTreeMap<String, String>,
    config: CaseConfig,
}

/// The table of an operation.
///
/// # Errors
/// Currently none.
pub fn table(op: Op) -> Result<Table> {
    let laws = laws(op);
    let Some(axes) = super::axes(op)? else { return listed(op, laws) };
    let tried = |axes: &vectors::Axes| -> Vec<Tried> {
        let of_row = |row: super::Row| Tried {
            law: Some(row.law),
            values: owned(axes.labels(&row.values)),
            config: axes.config(&row.values),
        };
        rows(axes, &laws, 2).into_iter().map(of_row).collect()
    };
    let tried = [tried(&axes), tried(&axes_on_cuda(op, axes.clone()))];
    let mut lines = Vec::new();
    for (at, axis) in axes.axes().iter().enumerate() {
        for (value, label) in axis.values.iter().enumerate() {
            let mut only = vec![None; axes.axes().len()];
            only[at] = Some(value);
            // No row has the value: the first rule that every row with it breaks.
            let why = match axes.complete(&only) {
                Some(_) => None,
                None => axes.rules().iter().find(|rule| rule.axes.contains(&at)).map(|r| r.why),
            };
            lines.push(line(axis.name, label, &laws, &tried, why));
        }
    }
    Ok(Table { op, laws, is_declared: true, lines })
}

/// The table of an operation whose lattice is a list.
fn listed(op: Op, laws: Vec<&'static str>) -> Result<Table> {
    let tried: Vec<Tried> = vectors::lattice(op)?
        .into_iter()
        .map(|config| Tried { law: None, values: keys_of(&config), config })
        .collect();
    let tried = [tried.clone(), tried];
    let mut values: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (axis, value) in tried[0].iter().flat_map(|tried| &tried.values) {
        let all = values.entry(axis.clone()).or_default();
        if !all.contains(value) {
            all.push(value.clone());
        }
    }
    // A size or an object of many values is no axis.
    values.retain(|_, all| (2..=16).contains(&all.len()) && all.iter().all(|v| v.len() < 40));
    let mut lines = Vec::new();
    for (axis, all) in &values {
        lines.extend(all.iter().map(|value| line(axis, value, &laws, &tried, None)));
    }
    Ok(Table { op, laws, is_declared: false, lines })
}

fn owned(labels: BTreeMap<&'static str, &str>) -> BTreeMap<String, String> {
    labels.into_iter().map(|(axis, value)| (axis.to_owned(), value.to_owned())).collect()
}

/// `tried`: on the CPU, and on CUDA.
fn line(
    axis: &str,
    value: &str,
    laws: &[&'static str],
    tried: &[Vec<Tried>; 2],
    why: Option<&'static str>,
) -> Line {
    let with = tried.each_ref().map(|tried| -> Vec<&Tried> {
        tried.iter().filter(|t| t.values.get(axis).is_some_and(|v| v == value)).collect()
    });
    let objection = |tried: &&Tried| cuda_objection(&tried.config);
    let cell = |law| {
        let is_of = |tried: &&&Tried| tried.law.is_none_or(|of| of == law);
        let [cpu, cuda] = with.each_ref().map(|with| with.iter().filter(is_of));
        Cell { cpu: cpu.count(), cuda: cuda.filter(|t| objection(t).is_none()).count() }
    };
    let cells: Vec<Cell> = (0..laws.len()).map(cell).collect();
    // Of a value that no kernel takes with any other.
    let is_refused = with[0].iter().all(|tried| objection(tried).is_some());
    let refused = with[0].iter().find_map(objection).filter(|_| is_refused);
    Line { axis: axis.to_owned(), value: value.to_owned(), cells, reasons: [why, why.or(refused)] }
}

impl Table {
    /// Cells that are empty without a reason: the axis, its value, the law and the device.
    pub fn holes(&self) -> Vec<String> {
        let mut all = Vec::new();
        for line in &self.lines {
            for (cell, law) in line.cells.iter().zip(&self.laws) {
                let empty = [(cell.cpu, "cpu"), (cell.cuda, "cuda")];
                for ((count, device), reason) in empty.into_iter().zip(line.reasons) {
                    if count == 0 && reason.is_none() {
                        all.push(format!("{} {}: {law}: {device}", line.axis, line.value));
                    }
                }
            }
        }
        all
    }

    /// The table in Markdown: a row for each value, a column for each law, numbers of tests on the CPU and
    /// on CUDA.
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        let what = match self.is_declared {
            true => "Rows of the covering array",
            false => "Configurations of the lattice, from which each law draws",
        };
        let _ = writeln!(text, "## `{}`\n\n{what}, on the CPU / on CUDA. Laws:\n", self.op);
        for (i, law) in self.laws.iter().enumerate() {
            let _ = writeln!(text, "{}. {law}", i + 1);
        }
        let mut reasons: Vec<&str> = Vec::new();
        let mut note = |reason: Option<&'static str>| {
            let reason = reason.unwrap_or("no test");
            let at = reasons.iter().position(|r| *r == reason).unwrap_or_else(|| {
                reasons.push(reason);
                reasons.len() - 1
            });
            char::from(b'a' + at as u8).to_string()
        };
        let mut body = String::new();
        for line in &self.lines {
            let _ = write!(body, "| `{}` | {} |", line.axis, line.value);
            for cell in &line.cells {
                let shown = |count: usize, mark: String| match count {
                    0 => mark,
                    count => count.to_string(),
                };
                let cpu = if cell.cpu == 0 { note(line.reasons[0]) } else { String::new() };
                let cuda = if cell.cuda == 0 { note(line.reasons[1]) } else { String::new() };
                let _ = write!(body, " {} / {} |", shown(cell.cpu, cpu), shown(cell.cuda, cuda));
            }
            body.push('\n');
        }
        let numbers: String = (1..=self.laws.len()).map(|i| format!(" {i} |")).collect();
        let rule = " --- |".repeat(self.laws.len());
        let _ = write!(text, "\n| axis | value |{numbers}\n| --- | --- |{rule}\n{body}");
        if !reasons.is_empty() {
            text.push_str("\nA letter instead of a number:\n\n");
            for (i, reason) in reasons.iter().enumerate() {
                let _ = writeln!(text, "- {}: {reason}.", char::from(b'a' + i as u8));
            }
        }
        text
    }
}

/// Operations whose kit has laws over the axes of their configs.
pub const OPERATIONS: [Op; 8] = [
    Op::Moe,
    Op::Linear,
    Op::Fp8Moe,
    Op::Int8Moe,
    Op::ScaledMm,
    Op::Router,
    Op::Align,
    Op::Preprocess,
];

/// The page of the book: every table, what is illegal, and the layouts.
///
/// # Errors
/// Currently none.
pub fn markdown() -> Result<String> {
    let mut text = String::from(PAGE);
    for op in OPERATIONS {
        text.push('\n');
        text.push_str(&table(op)?.markdown());
        let axes = vectors::axes(op)?;
        let rules = axes.iter().flat_map(vectors::Axes::rules);
        let mut whys: Vec<&str> = rules.map(|rule| rule.why).collect();
        whys.dedup();
        if !whys.is_empty() {
            text.push_str("\nIllegal combinations, which no row has:\n\n");
            whys.iter().for_each(|why| text.push_str(&format!("- {why}\n")));
        }
    }
    text.push_str("\n## Layouts\n\n| property | on CUDA |\n| --- | --- |\n");
    for (property, subject) in super::LAYOUTS {
        let _ = writeln!(text, "| {property} | {subject} |");
    }
    Ok(text)
}

const PAGE: &str = "\
# Coverage: laws, axes, devices

`marlinspike vectors --coverage` prints this page; a test compares the two.

Each axis of an operation's configs is declared with its values, and each illegal combination with its
reason (`marlinspike::vectors::axes`). A covering array of strength 2, with the laws as one more axis, has
every law with every value and every legal pair of values. A plain `cargo test` tries each of its rows.
`MARLINSPIKE_TESTS=full` also tries the lattice of `moe`, which has every legal combination of three values;
`nightly` tries the array of strength 3, with another seed each day. The seed is printed;
`MARLINSPIKE_TESTS_SEED` repeats it.

A cell counts rows on the CPU / on CUDA. An empty cell has a letter, whose reason is below the table.
A law that does not apply to a row (act-order without groups, two ranks that would cut a group, twice the
router weights in float16) passes there without a comparison, and the row counts.
";
