//! `marlinspike check`: recomputes and compares every output of every case.

pub(crate) mod declared;
#[cfg(feature = "cuda")]
mod device;
#[cfg(not(feature = "cuda"))]
#[path = "no_device.rs"]
mod device;
mod input;
mod json;
mod labels;
mod only;
mod paragraph;
mod shown;
mod summary;
mod table;
mod totals;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use indicatif::{ProgressBar, ProgressStyle};
use marlinspike::case::{Case, Limits};
use marlinspike::check::{CaseReport, OutputReport, Verdict};
use marlinspike_report::{Entry, Head};
use rayon::prelude::*;

use crate::backend::{self, Backend};
use crate::error::Explained;
use crate::style::{ColorChoice, printable};
use crate::{Outcome, output};

use device::Counts;
use input::{InputError, Source};
use paragraph::View;
use summary::Summary;

pub(crate) const ABOUT: &str = "\
Recomputes the outputs of case files from their inputs and compares them with the recorded ones.

Example: marlinspike check mine.safetensors

A case is a safetensors file that holds the inputs of one operation, its configuration and a \
kernel's outputs. Packed weights, permuted scales, zero points, biases and sorted indices must be \
equal in every bit to the reference; so must a product whose case declares its schedule. Every other \
product is judged by its error over a derived bound, which must be at most 1. The bound follows from the \
arithmetic that the kernel may use (--convention, --class): above 1, no kernel of that class can have \
produced the output. Without --convention every known convention is tried, and the verdict names \
those that fit.

Only cases that do not pass are printed, then a summary. -v prints every output with the mistakes \
that its verdict excludes: zeros, -y, y/2, permuted columns, half of k, and the smallest uniform \
error. An output is reported as not checked if its bound would accept one of these mistakes or if \
marlinspike does not compute it; such a case does not pass.

A failed output is printed with its number of wrong values and with the first of them: its index in \
the tensor, its (k, n), the tile, lane and register that load it, and both bit patterns. If a known \
mistake explains the wrong values, it is named.";

const EXAMPLES: &str = "\
Examples:
  marlinspike check
      the repository's golden cases, their hashes verified first
  marlinspike check mine.safetensors more/
      a file, and every *.safetensors below a folder
  python3 make_case.py | marlinspike check -
      one case from standard input
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
    ///
    /// `-` reads one case from standard input.
    #[arg(value_name = "PATH")]
    paths: Vec<PathBuf>,

    /// Judge only outputs whose name matches; may be repeated
    ///
    /// The pattern is a glob over output names without `out.`: `marlin_qweight`, `*marlin*`,
    /// `w[12]*_scales`. Other outputs are neither printed nor counted. A case without a matching
    /// output is skipped. It is an error if no output of any case matches.
    #[arg(long, value_name = "PATTERN")]
    only: Vec<glob::Pattern>,

    #[command(flatten)]
    declared: declared::Args,

    /// Judge a backend's outputs instead of the recorded ones
    ///
    /// The backend computes the outputs from the case's inputs, and they are judged like recorded
    /// outputs. In addition, every operation must equal the reference in every bit, and a product
    /// must equal the canonical schedule in every bit and meet the bound of the `canonical`
    /// convention. Outputs that no kernel computes are reported as not checked, each with the
    /// reason.
    #[arg(long, value_enum, value_name = "NAME")]
    backend: Option<Backend>,

    /// Largest number of multiply-adds that a case may need [default: 10^12]
    ///
    /// The configuration of a case states its sizes, so even a small file can take a long time. A
    /// case that needs more than this, or more memory than 64 MiB plus 256 times its file size, is
    /// an error that names the sizes. With --backend the limit is always 10^12.
    #[arg(long, value_name = "N", default_value_t = Limits::default().work, hide_default_value = true)]
    max_work: u64,

    /// Print one JSON object per line for each case, then one with the summary, and nothing else
    ///
    /// docs/src/check.schema.json describes the objects. A run that fails as a whole ends with
    /// `{"error": ..., "help": ...}`.
    #[arg(long)]
    pub(crate) json: bool,

    /// Write a self-contained HTML page with a plot of every failed output
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,

    /// Address of the layout explorer (`scripts/web build`), to which the report links wrong values
    ///
    /// An http(s) address, or a path from the report's folder: --explorer explorer/index.html
    #[arg(long, value_name = "URL", requires = "report", value_parser = address)]
    explorer: Option<String>,

    /// Print every output, including those that pass, with the mistakes that its verdict excludes
    #[arg(short, long)]
    verbose: bool,
}

/// An address that a link may have: of the web, or a path.
fn address(text: &str) -> Result<String, String> {
    let scheme = text.split_once(':').map(|(scheme, _)| scheme);
    match scheme {
        None | Some("http" | "https" | "file") if !text.is_empty() => Ok(text.to_owned()),
        _ => Err(format!("found `{text}`, expected an http, https or file address, or a path")),
    }
}

/// The result of one file.
struct Checked {
    path: PathBuf,
    /// Short name: the path without the folders and extension that all paths share.
    label: String,
    result: Result<CaseReport, InputError>,
    /// Names of the outputs that `--only` excludes; the case is skipped if it excludes all.
    left_out: Vec<String>,
    /// The fault that the golden manifest records for this case.
    known_fault: Option<String>,
}

impl Checked {
    fn skipped(&self) -> bool {
        !self.left_out.is_empty() && self.result.as_ref().is_ok_and(|r| r.outputs.is_empty())
    }

    /// The case as the report shows it.
    fn entry(&self) -> Entry<'_> {
        let result = self.result.as_ref().map_err(InputError::to_string);
        Entry::new(&self.label, self.path.display().to_string(), result)
            .with_recorded(self.fails_as_recorded())
    }

    /// The known fault, if it explains every failed output completely and no output is unchecked.
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

/// The results of a run, which the table, the JSON and the page show.
struct Run {
    checked: Vec<Checked>,
    summary: Summary,
    /// The device whose outputs replaced the recorded ones.
    device: Option<device::Tally>,
    elapsed: Duration,
}

impl Run {
    /// The page that `--report` writes.
    fn page(&self, explorer: Option<&str>) -> String {
        let cases = totals::cases(&self.summary, self.elapsed);
        let outputs = totals::outputs(self);
        let entries = self.checked.iter().filter(|c| !c.skipped()).map(Checked::entry);
        let entries: Vec<_> = entries.map(|entry| entry.with_explorer(explorer)).collect();
        marlinspike_report::page(&Head::new(&cases).line(&outputs), &entries)
    }
}

/// Checks, prints, and writes the report.
///
/// # Errors
/// Returns an error if there is nothing to check or the report cannot be written. An unreadable
/// case sets the [`Outcome`] instead, and the other cases are still checked.
pub fn run(args: &Args, color: ColorChoice) -> Result<Outcome> {
    let start = Instant::now();
    // A missing device is reported before any file is read.
    let device = args.backend.map(backend::open).transpose()?;
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
        // The manifest's faults belong to recorded outputs, not to those of a device.
        checked.iter_mut().for_each(|c| c.known_fault = None);
    }
    device::without_compiler(&checked)?;
    if !args.only.is_empty() && !checked.is_empty() && checked.iter().all(Checked::skipped) {
        return Err(only::no_match(&args.only, &checked).into());
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
        output::write_whole(path, run.page(args.explorer.as_deref()).as_bytes()).map_err(|e| {
            Explained::new(e, "name a file in a folder that exists and can be written to")
        })?;
        if !args.json {
            eprintln!("report written to {}", printable(&path.display().to_string()));
        }
    }
    Ok(run.summary.outcome())
}

/// Checks all files in parallel and keeps their order. With a device, also returns the comparisons
/// made for each operation.
fn check_all(
    sources: Vec<Source>,
    only: &[glob::Pattern],
    judge: impl Fn(&Case<'_>) -> input::Judged + Sync,
) -> (Vec<Checked>, Vec<Counts>) {
    let paths: Vec<&Path> = sources.iter().map(|s| s.path.as_path()).collect();
    let labels = labels::labels(&paths);
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
            let mut checked = Checked { path, label, result, left_out: Vec::new(), known_fault };
            if !only.is_empty()
                && let Ok(report) = &mut checked.result
            {
                checked.left_out = only::select(report, only);
            }
            (checked, counts)
        })
        .collect();
    bar.finish_and_clear();
    checked
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
