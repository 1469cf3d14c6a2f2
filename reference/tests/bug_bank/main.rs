//! The bug bank as cases: plain loops over decoded numbers compute each bug, and the case with its
//! output is checked. Each must be rejected, with its own diagnosis if it has one.
//!
//! `cargo test -p marlinspike --test bug_bank -- --nocapture` prints the table of
//! docs/src/reference/diagnoses.md.

#[path = "../check/product_model/mod.rs"]
mod product_model;

mod bank;
mod layers;
mod layouts;
mod near;
mod own;
mod products;
mod tools;

use marlinspike::check::{OutputReport, Strength, Verdict};

/// One bug and the output that it changes.
pub(crate) struct Run {
    /// Number in the bank, or a letter.
    pub(crate) bug: &'static str,
    /// What is wrong.
    pub(crate) what: &'static str,
    /// Correct diagnoses; empty if the bug has none.
    pub(crate) names: &'static [&'static str],
    pub(crate) report: OutputReport,
}

/// A row of the table.
pub(crate) fn run(
    bug: &'static str,
    what: &'static str,
    names: &'static [&'static str],
    report: OutputReport,
) -> Run {
    Run { bug, what, names, report }
}

/// Prints the runs, and counts the bugs whose outputs are all rejected, and all diagnosed
/// correctly.
fn table(runs: &[Run]) -> (usize, usize, Vec<String>) {
    let mut faults = Vec::new();
    let mut bugs: Vec<(&str, bool)> = Vec::new();
    println!("| bug | what | output | rejected | named | strength |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for run in runs {
        let rejected = run.report.verdict == Verdict::Fail;
        let diagnosis = run.report.diagnosis.as_ref();
        let id = diagnosis.map_or("-", |d| d.id.as_str());
        let strength = match diagnosis.map(|d| d.strength) {
            Some(Strength::Explains) => "explains",
            Some(Strength::Consistent) => "consistent",
            Some(Strength::Place) => "place",
            None => "-",
        };
        let named = run.names.contains(&id) && strength != "place";
        let (mark, output) = (if rejected { "yes" } else { "NO" }, &run.report.name);
        println!("| {} | {} | `{output}` | {mark} | `{id}` | {strength} |", run.bug, run.what);
        if !rejected {
            let (verdict, note) = (run.report.verdict, &run.report.note);
            faults.push(format!("{} ({}): {verdict:?}, {note:?}", run.bug, run.what));
        }
        // Any other diagnosis is wrong, unless it only states the place.
        if !named && strength != "place" && strength != "-" {
            faults.push(format!("{} ({}): named {diagnosis:?}", run.bug, run.what));
        }
        match bugs.iter_mut().find(|b| b.0 == run.bug) {
            Some(bug) => bug.1 |= named,
            None => bugs.push((run.bug, named)),
        }
    }
    let named = bugs.iter().filter(|b| b.1).count();
    (bugs.len(), named, faults)
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn the_bank() {
    let runs = bank::runs();
    let (bugs, named, faults) = table(&runs);
    println!("\n{named} of {bugs} bugs are named");
    assert!(faults.is_empty(), "{faults:#?}");
    assert_eq!(bugs, 31);
    assert!(named >= 28, "{named}");
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "long under emulation")]
fn the_projects_own() {
    let runs = own::runs();
    let (bugs, named, faults) = table(&runs);
    println!("\n{named} of {bugs} bugs are named");
    assert!(faults.is_empty(), "{faults:#?}");
    assert!(bugs >= 20, "{bugs}");
    assert_eq!(named, bugs);
}
