//! Results as lines of JSON, and their table.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::source::Mutant;
use crate::trials::Outcome;

/// A mutant and its outcome: one line of a results file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Line {
    /// The mutant.
    #[serde(flatten)]
    pub mutant: Mutant,
    /// Its outcome.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// Counts of one module.
#[derive(Debug, Default)]
struct Row {
    constant: usize,
    unviable: usize,
    killed: usize,
    timed_out: usize,
    survived: usize,
    not_reached: usize,
}

/// The row of a file: its path below `src`, as a module of at most two names.
pub fn module(file: &str) -> String {
    let path = file.strip_prefix("src/").unwrap_or(file);
    let path = path.strip_suffix(".rs").unwrap_or(path);
    path.split('/').filter(|part| *part != "mod").take(2).collect::<Vec<_>>().join("::")
}

/// A Markdown table with a row for each module, and the list of survivors.
pub fn markdown(lines: &[Line], constant: &[(String, usize)]) -> String {
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    for (file, count) in constant {
        rows.entry(module(file)).or_default().constant += count;
    }
    let mut survivors = String::new();
    for Line { mutant, outcome } in lines {
        let row = rows.entry(module(&mutant.file)).or_default();
        let list = match outcome {
            Outcome::Killed { .. } => {
                row.killed += 1;
                continue;
            }
            Outcome::TimedOut { .. } => {
                row.timed_out += 1;
                continue;
            }
            Outcome::DoesNotCompile => {
                row.unviable += 1;
                continue;
            }
            Outcome::Survived { left_out: 0, .. } => {
                row.survived += 1;
                "survived".to_owned()
            }
            Outcome::Survived { left_out, .. } => {
                row.survived += 1;
                format!("survived, {left_out} tests left out")
            }
            Outcome::NotReached => {
                row.not_reached += 1;
                "not reached".to_owned()
            }
        };
        let Mutant { file, line, function, change, .. } = mutant;
        let _ = writeln!(survivors, "- {file}:{line} {function}: {change} ({list})");
    }
    let mut text = "| module | tested | killed | timed out | survived | not reached | constant | does not compile |\n\
                    | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        .to_owned();
    let mut all = Row::default();
    let mut line = |name: &str, row: &Row| {
        let tested = row.killed + row.timed_out + row.survived + row.not_reached;
        let Row { constant, unviable, killed, timed_out, survived, not_reached } = row;
        let _ = writeln!(
            text,
            "| {name} | {tested} | {killed} | {timed_out} | {survived} | {not_reached} | {constant} | {unviable} |"
        );
    };
    for (name, row) in &rows {
        line(&format!("`{name}`"), row);
        all.constant += row.constant;
        all.unviable += row.unviable;
        all.killed += row.killed;
        all.timed_out += row.timed_out;
        all.survived += row.survived;
        all.not_reached += row.not_reached;
    }
    line("all", &all);
    format!("{text}\n{survivors}")
}
