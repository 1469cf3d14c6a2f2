//! `marlinspike check`: every output of every case recomputed and compared.

pub(crate) mod declared;
#[cfg(feature = "cuda")]
mod device;
#[cfg(not(feature = "cuda"))]
#[path = "no_device.rs"]
mod device;
mod error_map;
mod flow;
mod html;
mod input;
mod json;
mod mismatch_map;
mod paragraph;
mod shown;
mod summary;
mod svg;
mod table;
mod text;
mod totals;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use indicatif::{ProgressBar, ProgressStyle};
use marlinspike::case::{Case, Limits};
use marlinspike::check::{CaseReport, OutputReport, Verdict};
use rayon::prelude::*;

use crate::error::Explained;
use crate::style::{ColorChoice, printable};
use crate::{Outcome, output};

use device::Counts;
use input::{InputError, Source};
use paragraph::View;
use summary::Summary;

pub(crate) const ABOUT: &str = "\
Recomputes the outputs of case files from their inputs, and compares.

Example: marlinspike check mine.safetensors

A case is a safetensors file with the inputs of one operation, its configuration, and the outputs \
of some implementation. Packed weights, permuted scales, zero points, biases and sorted indices must \
be equal in every bit; so must a product whose case declares its schedule. Other products are \
compared with the exact result: the error over its bound must be at most 1. The bound follows from \
the operations that the kernel may use (--convention, --class); above 1 no such kernel can be right. \
Unless a convention is named, all known ones are tried, and the verdict says which fit.

By default only cases that do not pass are printed, then a summary; -v prints every output with what \
its verdict excludes: zeros, -y, y/2, permuted columns, half of k, and the smallest uniform error. An \
output whose bound would accept one of these, or that is not computed here, is not checked, and its \
case does not pass.

A failed output is printed with the number of wrong values; the first one, as an index into the \
tensor, as (k, n), and as the tile, lane and register that loads it; its bits; and, where the values \
give it away, the known mistake that explains them.";

const EXAMPLES: &str = "\
Examples:
  marlinspike check
      the repository's golden cases, their hashes verified first
  marlinspike check mine.safetensors more/
      a file, and every *.safetensors below a folder
  marlinspike check --only '*marlin*' more/
      packed weights and scales only
  marlinspike check --class marlin-hopper mine.safetensors
      the narrower bound of a kernel that adds in Marlin's order on Hopper
  marlinspike check --json more/ | jq 'select(.verdict == \"fail\")'
      for programs: one JSON object per case, then {\"summary\": ...}
  marlinspike check --report report.html mine.safetensors
      a page that shows where the wrong values are
  marlinspike check --backend cuda mine.safetensors
      this project's CUDA kernels compute the outputs

Exit codes:
  0  every output was checked and passed
  1  an output failed, or was left unchecked
  2  a file could not be read as a case, a case exceeds its limit of time or memory, the program
     panicked on one (the other cases are still judged), the command line is wrong, or the backend's
     device or compiler is missing";

/// Arguments of `check`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// Case files, or folders whose *.safetensors files are cases [default: the golden cases]
    #[arg(value_name = "PATH")]
    paths: Vec<PathBuf>,

    /// Judge only the outputs whose name matches; may be repeated
    ///
    /// The pattern is a glob over output names without `out.`: `marlin_qweight`, `*marlin*`,
    /// `w[12]*_scales`. Other outputs are neither printed nor counted. A case without a matching
    /// output is skipped. It is an error if no output of any case matches.
    #[arg(long, value_name = "PATTERN")]
    only: Vec<glob::Pattern>,

    #[command(flatten)]
    declared: declared::Args,

    /// Judge what a backend's kernels compute from the inputs, not the recorded outputs
    ///
    /// The checks are those of a recorded output. In addition every operation on the way must equal
    /// the reference in every bit, and a product must have the bits of the canonical schedule and lie
    /// within the bound of the `canonical` convention. Outputs that no kernel computes are not checked;
    /// the reason is printed.
    #[arg(long, value_enum, value_name = "NAME")]
    backend: Option<device::Backend>,

    /// Limit of the multiply-adds of a case's products [default: 10^12]
    ///
    /// A small file can ask for a lot of time, since its configuration states the sizes. A case that
    /// needs more than this, or more memory than 64 MiB and 256 times its own size, is an error that
    /// names the sizes. With --backend the limit is always 10^12.
    #[arg(long, value_name = "N", default_value_t = Limits::default().work, hide_default_value = true)]
    max_work: u64,

    /// Print one JSON object per case and line, then one with the summary, and nothing else
    ///
    /// docs/src/check.schema.json describes the objects. A run that fails as a whole ends with
    /// `{"error": ..., "help": ...}`.
    #[arg(long)]
    pub(crate) json: bool,

    /// Write a self-contained page with a picture of every failed output
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,

    /// Print every output, also those that pass, with what its verdict excludes
    #[arg(short, long)]
    verbose: bool,
}

/// What became of one file.
struct Checked {
    path: PathBuf,
    /// Short name for people: the path without what all have in common.
    label: String,
    result: Result<CaseReport, InputError>,
    /// Outputs that `--only` left out; the case is skipped when none remains.
    left_out: usize,
    /// The diagnosis with which the golden manifest says that the recorded outputs fail.
    known_fault: Option<String>,
}

impl Checked {
    fn skipped(&self) -> bool {
        self.left_out > 0 && self.result.as_ref().is_ok_and(|r| r.outputs.is_empty())
    }

    /// The known fault, where it wholly explains each failed output and nothing is unchecked.
    fn fails_as_recorded(&self) -> Option<&str> {
        let (fault, report) = (self.known_fault.as_deref()?, self.result.as_ref().ok()?);
        let explained = |o: &OutputReport| {
            o.diagnosis.as_ref().is_some_and(|d| d.id == fault && d.unexplained == 0)
        };
        let expected = |o: &OutputReport| match o.verdict {
            Verdict::Pass => true,
            Verdict::Fail => explained(o),
            Verdict::Unchecked => false,
        };
        let fails = report.verdict == Verdict::Fail && report.outputs.iter().all(expected);
        fails.then_some(fault)
    }
}

/// Everything that a run found, as table, JSON and page show it.
struct Run {
    checked: Vec<Checked>,
    summary: Summary,
    /// What was checked in place of the recorded outputs.
    device: Option<device::Tally>,
    elapsed: Duration,
}

/// Checks, prints, and writes the report.
///
/// # Errors
/// When there is nothing to check, or the report cannot be written. A case that cannot be read is
/// an [`Outcome`], not an error: the others are still checked.
pub fn run(args: &Args, color: ColorChoice) -> Result<Outcome> {
    let start = Instant::now();
    // Without a device, nothing is read.
    let device = args.backend.map(device::open).transpose()?;
    let sources = if args.paths.is_empty() {
        input::golden().map_err(|e| {
            Explained::new(e, "name the case files or folders: `marlinspike check PATH...`")
        })?
    } else {
        input::find(&args.paths)
    };
    let declared = args.declared.read()?;
    let limits = Limits { work: args.max_work };
    let judge = |case: &Case<'_>| input::judge(case, &declared, &limits, device.as_ref());
    let (mut checked, counts) = check_all(sources, &args.only, judge);
    if device.is_some() {
        // A device's own outputs have no recorded faults.
        checked.iter_mut().for_each(|c| c.known_fault = None);
    }
    device::without_compiler(&checked)?;
    if !args.only.is_empty() && !checked.is_empty() && checked.iter().all(Checked::skipped) {
        let patterns: Vec<_> = args.only.iter().map(|p| format!("`{p}`")).collect();
        let cases = if checked.len() == 1 { "case" } else { "cases" };
        let message =
            format!("no output of {} {cases} matches {}", checked.len(), patterns.join(", "));
        let help =
            "patterns match whole names without `out.`, as `marlinspike check -v` shows them";
        return Err(Explained::new(message, help).into());
    }
    let summary = Summary::of(&checked);
    let device = device.map(|device| device::Tally::new(&device, counts, &checked));
    let run = Run { checked, summary, device, elapsed: start.elapsed() };
    let text = if args.json {
        json::render(&run)
    } else {
        let view = View {
            paint: color.for_stdout(),
            width: output::columns(),
            verbose: args.verbose,
            has_report: args.report.is_some(),
        };
        table::render(&run, &view)
    };
    output::print(&text).context("standard output")?;
    if let Some(path) = &args.report {
        output::write_whole(path, html::render(&run).as_bytes()).map_err(|e| {
            Explained::new(e, "name a file in a folder that exists and can be written to")
        })?;
        if !args.json {
            eprintln!("report written to {}", printable(&path.display().to_string()));
        }
    }
    Ok(run.summary.outcome())
}

/// Checks all files at once; the order of the results is that of the sources. On a device, also what
/// each operation was held to.
fn check_all(
    sources: Vec<Source>,
    only: &[glob::Pattern],
    judge: impl Fn(&Case<'_>) -> input::Judged + Sync,
) -> (Vec<Checked>, Vec<Counts>) {
    let paths: Vec<&Path> = sources.iter().map(|s| s.path.as_path()).collect();
    let labels = text::labels(&paths);
    let bar = ProgressBar::new(sources.len() as u64);
    if let Ok(style) = ProgressStyle::with_template("checking {bar:30} {pos}/{len} cases") {
        bar.set_style(style);
    }
    let checked = sources
        .into_par_iter()
        .zip(labels)
        .map(|(source, label)| {
            let path = source.path.clone();
            let known_fault = source.known_fault();
            let (result, counts) = match input::check(source, &judge) {
                Ok((report, counts)) => (Ok(report), counts),
                Err(error) => (Err(error), Counts::new()),
            };
            bar.inc(1);
            let mut checked = Checked { path, label, result, left_out: 0, known_fault };
            if !only.is_empty()
                && let Ok(report) = &mut checked.result
            {
                checked.left_out = select(report, only);
            }
            (checked, counts)
        })
        .collect();
    bar.finish_and_clear();
    checked
}

/// Keeps the outputs that match, judges the case by them, and returns how many were left out.
fn select(report: &mut CaseReport, only: &[glob::Pattern]) -> usize {
    let before = report.outputs.len();
    report.outputs.retain(|o| only.iter().any(|p| p.matches(&o.name)));
    let any = |v| report.outputs.iter().any(|o| o.verdict == v);
    report.verdict = if any(Verdict::Fail) {
        Verdict::Fail
    } else if report.outputs.is_empty() || any(Verdict::Unchecked) {
        Verdict::Unchecked
    } else {
        Verdict::Pass
    };
    before - report.outputs.len()
}

#[cfg(test)]
mod tests {
    use marlinspike::case::{AlignConfig, CaseConfig};
    use marlinspike::check::check_case;
    use marlinspike::num::tensor::{DType, Tensor};

    use super::*;

    fn align(name: &str) -> Vec<u8> {
        let config =
            AlignConfig { block_size: 2, num_experts: 2, top_k: 1, ep_size: 1, ep_rank: 0 };
        let mut case = Case::new(name, CaseConfig::Align(config), "");
        let list =
            |values: &[i32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let ids = Tensor::new("", DType::I32, vec![3, 1], list(&[1, 0, 1])).unwrap();
        case.add_input("topk_ids", ids);
        let sorted = Tensor::new("", DType::I32, vec![4], list(&[1, 3, 0, 2])).unwrap();
        case.add_output("sorted_token_ids", sorted);
        case.to_bytes().unwrap()
    }

    #[test]
    fn a_panic_in_one_case_leaves_the_others_their_verdicts() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            std::fs::write(folder.path().join(format!("{name}.safetensors")), align(name)).unwrap();
        }
        let judge = |case: &Case<'_>| {
            assert!(case.name != "b", "{} has no verdict", case.name);
            Ok((check_case(case)?, Counts::new()))
        };
        let sources = input::find(&[folder.path().to_owned()]);
        let (checked, _) = check_all(sources, &[], judge);
        let summary = Summary::of(&checked);
        assert_eq!((summary.pass, summary.error, summary.outputs_pass), (2, 1, 2));
        assert_eq!(summary.outcome(), Outcome::BadInput);

        let run = Run { checked, summary, device: None, elapsed: Duration::ZERO };
        let lines: Vec<serde_json::Value> =
            json::render(&run).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let verdicts: Vec<_> = lines[..3].iter().map(|line| line["verdict"].as_str()).collect();
        assert_eq!(verdicts, [Some("pass"), Some("error"), Some("pass")]);
        let error = lines[1]["error"].as_str().unwrap();
        let path = folder.path().join("b.safetensors").display().to_string();
        assert!(
            error.starts_with(&format!("{path}: internal error: b has no verdict at ")),
            "{error}"
        );
        let (place, rest) = error.split_once(file!()).expect(error);
        assert!(place.ends_with(" at ") && rest.ends_with("; please report it"), "{error}");
    }
}
