//! Merges the summaries and the failing cases of campaigns that ran on several machines.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::regressions::{case_files, content, io, read_case, write};
use super::{CampaignError, Coverage, KeptResult, RecordedCause, RecordedFinding, Run, Shard};

/// Several runs as one campaign for each operation.
#[derive(Debug, Serialize)]
pub struct Merged {
    /// Whether every campaign passed and is complete.
    pub success: bool,
    /// One campaign for each operation.
    pub campaigns: Vec<MergedCampaign>,
    /// Failing cases that were copied, in the folder of regressions.
    pub copied: Vec<String>,
    /// Failing cases that the folder held already, or that several runs found.
    pub duplicates: usize,
}

/// The runs of one operation.
#[derive(Debug, Default, Serialize)]
pub struct MergedCampaign {
    /// Operation.
    pub op: String,
    /// Whether cases were judged, none failed or was left unchecked, and no shard is missing.
    pub success: bool,
    /// The runs.
    pub runs: Vec<MergedRun>,
    /// Shards of the runs' divisions for which there is no summary.
    pub missing: Vec<MissingShard>,
    /// Cases that passed.
    pub passed: u64,
    /// Cases that were not checked.
    pub unchecked: u64,
    /// The reason for the first of them.
    pub unchecked_reason: Option<String>,
    /// Cases that the kernel does not support.
    pub skipped: u64,
    /// The reason for the first of them.
    pub skipped_reason: Option<String>,
    /// Cases with a wrong output or a fault.
    pub failed: u64,
    /// Kept cases that still fail.
    pub kept_that_fail: Vec<String>,
    /// Findings with distinct signatures, the first of each.
    pub findings: Vec<MergedFinding>,
    /// Values of config keys that were judged.
    pub coverage: Coverage,
    /// Seconds of all runs together.
    pub seconds: f64,
}

/// One run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct MergedRun {
    /// Seed.
    pub seed: u64,
    /// The filter's text.
    pub filter: String,
    /// The part of the campaign.
    pub shard: Shard,
    /// Number of cases of the whole campaign.
    pub cases: u64,
    /// Number of the first case that was not tried.
    pub next: u64,
}

/// A shard without a summary.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MissingShard {
    /// Seed.
    pub seed: u64,
    /// The filter's text.
    pub filter: String,
    /// The shard.
    pub shard: Shard,
}

/// A finding of one run or of several.
#[derive(Debug, Serialize)]
pub struct MergedFinding {
    /// The failing output and its cause, or the kind of fault.
    pub signature: String,
    /// The cause.
    pub cause: Option<RecordedCause>,
    /// The config of the minimal case, one `key=value` per key.
    pub minimal: Vec<String>,
    /// Seed of the first run that found it.
    pub seed: u64,
    /// Number of the first failing case in that run.
    pub index: u64,
    /// Number of runs that found it.
    pub runs: usize,
}

/// Merges summary files and copies the cases that they name into `regressions`, without duplicates.
/// A case is looked for next to its summary by its name, then at its path from the summary's
/// folder, then at its path as it is.
///
/// # Errors
/// [`CampaignError::Summary`] for a file that is not a summary, for a run that is given twice and for a
/// case that is not found; [`CampaignError::Io`]; [`CampaignError::Case`] for a file that is not a
/// case. Nothing is copied unless every file can be read.
pub fn merge(summaries: &[PathBuf], regressions: Option<&Path>) -> Result<Merged, CampaignError> {
    let mut by_op: BTreeMap<String, MergedCampaign> = BTreeMap::new();
    let mut found = Vec::new();
    for path in summaries {
        let run = Run::<RecordedFinding>::read(path)?;
        if regressions.is_some() {
            let kept = run.kept.iter().map(|case| &case.path);
            for case in kept.chain(&run.files).collect::<BTreeSet<_>>() {
                found.push(located(path, case)?);
            }
        }
        let campaign = by_op.entry(run.summary.op.clone()).or_default();
        campaign.op.clone_from(&run.summary.op);
        campaign.add(run).map_err(|problem| wrong(path, problem))?;
    }
    let (copied, duplicates) = match regressions {
        Some(folder) => copy(&found, folder)?,
        None => (Vec::new(), 0),
    };
    let mut campaigns: Vec<_> = by_op.into_values().collect();
    campaigns.iter_mut().for_each(MergedCampaign::finish);
    let success = !campaigns.is_empty() && campaigns.iter().all(|campaign| campaign.success);
    Ok(Merged { success, campaigns, copied, duplicates })
}

fn wrong(path: &Path, problem: String) -> CampaignError {
    CampaignError::Summary { path: path.to_owned(), problem }
}

impl MergedCampaign {
    fn add(&mut self, run: Run<RecordedFinding>) -> Result<(), String> {
        let summary = run.summary;
        let (seed, filter, shard) = (summary.seed, summary.filter, summary.shard);
        let mut same = self.runs.iter().filter(|r| r.seed == seed && r.filter == filter);
        if let Some(other) = same.find(|r| r.shard == shard || r.shard.of() != shard.of()) {
            return Err(format!(
                "found shard {shard} of seed {seed:#x} next to shard {}, expected each shard of one \
                 division once",
                other.shard
            ));
        }
        self.passed += summary.passed;
        self.unchecked += summary.unchecked;
        self.unchecked_reason = self.unchecked_reason.take().or(summary.unchecked_reason);
        self.skipped += summary.skipped;
        self.skipped_reason = self.skipped_reason.take().or(summary.skipped_reason);
        self.failed += summary.failed;
        self.seconds += summary.seconds;
        self.coverage.merge(&summary.coverage);
        let failing = run.kept.into_iter().filter(|case| case.result == KeptResult::Fail);
        self.kept_that_fail.extend(failing.map(|case| case.path));
        for finding in summary.findings {
            match self.findings.iter_mut().find(|f| f.signature == finding.signature) {
                Some(known) => known.runs += 1,
                None => self.findings.push(MergedFinding {
                    signature: finding.signature,
                    cause: finding.cause,
                    minimal: finding.minimal,
                    seed,
                    index: finding.index,
                    runs: 1,
                }),
            }
        }
        let (cases, next) = (summary.cases, summary.next);
        self.runs.push(MergedRun { seed, filter, shard, cases, next });
        Ok(())
    }

    /// Finds the missing shards and the verdict, after the last run.
    fn finish(&mut self) {
        self.runs.sort();
        let mut missing = Vec::new();
        for run in &self.runs {
            for shard in run.shard.all() {
                let is_there =
                    |r: &MergedRun| (r.seed, &r.filter, r.shard) == (run.seed, &run.filter, shard);
                let lost = MissingShard { seed: run.seed, filter: run.filter.clone(), shard };
                if !self.runs.iter().any(is_there) && !missing.contains(&lost) {
                    missing.push(lost);
                }
            }
        }
        self.missing = missing;
        let judged = self.passed > 0 && self.failed + self.unchecked == 0;
        self.success = judged && self.kept_that_fail.is_empty() && self.missing.is_empty();
    }
}

/// The file of a case that a summary names.
fn located(summary: &Path, case: &str) -> Result<PathBuf, CampaignError> {
    let folder = summary.parent().unwrap_or(Path::new(""));
    let case = Path::new(case);
    let beside = folder.join(case.file_name().unwrap_or_default());
    let places = [beside, folder.join(case), case.to_owned()];
    places.iter().find(|path| path.is_file()).cloned().ok_or_else(|| {
        let places: BTreeSet<_> = places.iter().map(|path| path.display().to_string()).collect();
        let places: Vec<_> = places.into_iter().collect();
        wrong(summary, format!("a kept case is absent, expected it at {}", places.join(" or ")))
    })
}

/// Copies cases into a folder, without duplicates. Returns the new files and the number of cases that
/// were there already.
fn copy(files: &[PathBuf], folder: &Path) -> Result<(Vec<String>, usize), CampaignError> {
    let mut known = BTreeSet::new();
    for path in case_files(folder)? {
        known.insert(content(&read_case(&path)?.1));
    }
    let mut new = Vec::new();
    let mut duplicates = 0;
    for path in files {
        let (bytes, case) = read_case(path)?;
        let content = content(&case);
        if known.insert(content.clone()) {
            new.push((path.file_stem().unwrap_or_default(), content, bytes));
        } else {
            duplicates += 1;
        }
    }
    fs::create_dir_all(folder).map_err(io(folder))?;
    let mut copied = Vec::new();
    for (stem, content, bytes) in new {
        let stem = stem.to_string_lossy();
        let plain = folder.join(format!("{stem}.safetensors"));
        // Another content has the name: the same finding with other values.
        let path = match plain.exists() {
            true => folder.join(format!("{stem}-{}.safetensors", &content[..16])),
            false => plain,
        };
        write(&path, &bytes)?;
        copied.push(path.display().to_string());
    }
    Ok((copied, duplicates))
}
