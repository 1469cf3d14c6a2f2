//! `marlinspike fuzz merge`: the runs of several machines as one.

use std::path::PathBuf;

use anyhow::Result;
use marlinspike_proptests::campaign::{MergedCampaign, merge};
use serde_json::json;

use super::{explained, text};
use crate::style::{ColorChoice, Paint, printable};
use crate::{Outcome, output};

pub(super) const ABOUT: &str = "\
Merges summaries of `marlinspike fuzz --summary`: adds up counts and coverage, names shards without a \
summary, and copies the failing cases to one folder, without duplicates.

Example: marlinspike fuzz merge machine*/summary.json --regressions regressions

Failing cases are looked up next to their summary, then at their path relative to the summary's folder. \
Runs of different operations and seeds may be merged.

Exit codes:
  0  every campaign is complete, cases were judged, and all judged cases passed
  1  a finding, an unchecked case, a kept case that fails, or a missing shard
  2  bad input or usage";

/// Arguments of `fuzz merge`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Summary files
    #[arg(required = true, value_name = "SUMMARY")]
    summaries: Vec<PathBuf>,

    /// Copy the failing cases into this folder
    #[arg(long, value_name = "DIR")]
    regressions: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
}

pub(super) fn run(args: &Args, color: ColorChoice) -> Result<Outcome> {
    let merged = merge(&args.summaries, args.regressions.as_deref()).map_err(explained)?;
    if args.json {
        output::print(&format!("{}\n", json!(merged)))?;
    } else {
        let paint = color.for_stdout();
        for each in &merged.campaigns {
            output::print(&campaign(each, paint))?;
        }
        if let Some(folder) = &args.regressions {
            let (copied, again) = (merged.copied.len(), merged.duplicates);
            let folder = folder.display().to_string();
            output::print(&format!(
                "{copied} failing cases copied to {}, {again} duplicates left out\n",
                printable(&folder)
            ))?;
        }
    }
    Ok(if merged.success { Outcome::Pass } else { Outcome::Mismatch })
}

fn campaign(merged: &MergedCampaign, paint: Paint) -> String {
    let counts = text::Counts {
        passed: merged.passed,
        failed: merged.failed,
        findings: merged.findings.len(),
        skipped: merged.skipped,
        skipped_reason: merged.skipped_reason.as_deref(),
        unchecked: merged.unchecked,
        unchecked_reason: merged.unchecked_reason.as_deref(),
        kept_that_fail: merged.kept_that_fail.len(),
        seconds: merged.seconds,
    };
    let op = printable(&merged.op).into_owned();
    let mut lines = format!("{op}: {} runs, {}\n", merged.runs.len(), counts.line(paint));
    for lost in &merged.missing {
        let seed = lost.seed;
        lines += &format!("{} shard {} of seed {seed:#018x}\n", paint.bad("missing:"), lost.shard);
    }
    for finding in &merged.findings {
        let title = printable(&finding.signature).into_owned();
        lines += &format!("\n{} {title} ({} runs)\n", paint.bad("finding:"), finding.runs);
        if let Some(cause) = &finding.cause {
            lines += &format!("  cause        {}\n", printable(&cause.text));
        }
        lines += &format!("  minimal      {}\n", printable(&finding.minimal.join(" ")));
        lines += &format!("  first seen   seed {:#x}, case {}\n", finding.seed, finding.index);
    }
    lines + &text::coverage(&merged.coverage)
}
