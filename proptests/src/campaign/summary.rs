//! The result of a campaign, in memory and as a file.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::regressions::{io, read_file};
use super::{Campaign, CampaignError, Coverage, Finding, Judgement, Shard};

/// Largest summary file that is read.
const LIMIT: u64 = 64 << 20;

/// The result of a campaign. `F` is [`Finding`], or [`RecordedFinding`] in a file.
#[derive(Debug, Serialize, Deserialize)]
pub struct Summary<F = Finding> {
    /// Operation.
    pub op: String,
    /// Seed.
    pub seed: u64,
    /// The filter's text.
    pub filter: String,
    /// The part of the campaign that ran.
    pub shard: Shard,
    /// Number of cases of the whole campaign.
    pub cases: u64,
    /// Cases that passed.
    pub passed: u64,
    /// Cases that were not checked.
    pub unchecked: u64,
    /// The reason for the first of them.
    pub unchecked_reason: Option<String>,
    /// Cases that the kernel does not support.
    pub skipped: u64,
    /// The reason for the first of them.
    #[serde(default)]
    pub skipped_reason: Option<String>,
    /// Cases with a wrong output or a fault, including those of findings.
    pub failed: u64,
    /// Distinct findings, each shrunk.
    pub findings: Vec<F>,
    /// Values of config keys that were judged.
    pub coverage: Coverage,
    /// Number of the first case that was not tried.
    pub next: u64,
    /// Seconds.
    pub seconds: f64,
}

impl Campaign {
    /// The summary before the first case.
    pub(super) fn empty(&self, cases: u64) -> Summary {
        Summary {
            op: self.op.to_string(),
            seed: self.generator.seed(),
            filter: self.filter.to_string(),
            shard: self.shard,
            cases,
            passed: 0,
            unchecked: 0,
            unchecked_reason: None,
            skipped: 0,
            skipped_reason: None,
            failed: 0,
            findings: Vec::new(),
            coverage: Coverage::of(self.generator.lattice()),
            next: 0,
            seconds: 0.0,
        }
    }
}

/// A [`Finding`] as a summary file holds it, without its case.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RecordedFinding {
    /// [`Finding::signature`].
    pub signature: String,
    /// Number of the first failing case.
    pub index: u64,
    /// Short description of the first failing case.
    pub first: String,
    /// The cause.
    pub cause: Option<RecordedCause>,
    /// The config of the minimal case, one `key=value` per key.
    pub minimal: Vec<String>,
}

/// The cause of a [`RecordedFinding`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RecordedCause {
    /// Short name of the known mistake.
    pub id: String,
    /// The cause in a sentence.
    pub text: String,
}

/// The judgement of a kept case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptCase {
    /// The case's file.
    pub path: String,
    /// What the kernel did with it.
    pub result: KeptResult,
    /// The failure's signature, or the reason for a case that was skipped or not checked.
    pub detail: Option<String>,
}

/// What a kernel did with a kept case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeptResult {
    /// The case passes now.
    Pass,
    /// The case still fails.
    Fail,
    /// The outputs could not be judged.
    Unchecked,
    /// The kernel does not support the configuration.
    Skipped,
}

impl KeptCase {
    pub(super) fn new(path: &Path, judgement: &Judgement) -> Self {
        let (result, detail) = match judgement {
            Judgement::Pass => (KeptResult::Pass, None),
            Judgement::Unchecked(reason) => (KeptResult::Unchecked, Some(reason.clone())),
            Judgement::Skipped(reason) => (KeptResult::Skipped, Some(reason.clone())),
            Judgement::Wrong(failure) => (KeptResult::Fail, Some(failure.signature())),
        };
        Self { path: path.display().to_string(), result, detail }
    }
}

/// The version of [`Run`]'s JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Format {
    #[serde(rename = "marlinspike-campaign-1")]
    V1,
}

/// A campaign with its folder of failing cases; as JSON, the summary file of `marlinspike fuzz`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Run<F = Finding> {
    format: Format,
    /// Whether cases were judged and none failed or was left unchecked, kept cases included.
    pub success: bool,
    /// The drawn cases.
    pub summary: Summary<F>,
    /// The minimal case's file of each finding; empty without a folder.
    pub files: Vec<String>,
    /// The cases of the folder, which ran first.
    pub kept: Vec<KeptCase>,
}

impl Run {
    pub(super) fn new(summary: Summary, files: Vec<String>, kept: Vec<KeptCase>) -> Self {
        let failing = kept.iter().any(|case| case.result == KeptResult::Fail);
        let success = summary.passed > 0 && summary.failed + summary.unchecked == 0 && !failing;
        Self { format: Format::V1, success, summary, files, kept }
    }

    /// The run as JSON.
    ///
    /// # Errors
    /// [`CampaignError::Write`] for a value that JSON cannot hold.
    pub fn to_json(&self) -> Result<serde_json::Value, CampaignError> {
        let wrong = |error: serde_json::Error| CampaignError::Write { problem: error.to_string() };
        serde_json::to_value(self).map_err(wrong)
    }
}

impl Run<RecordedFinding> {
    /// Reads a summary file.
    ///
    /// # Errors
    /// [`CampaignError::Io`] for a file that cannot be read; [`CampaignError::Summary`] for one that
    /// is no summary.
    pub fn read(path: &Path) -> Result<Self, CampaignError> {
        let wrong = |problem| CampaignError::Summary { path: path.to_owned(), problem };
        let bytes = read_file(path, LIMIT).map_err(io(path))?;
        let run: Self = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
        let (findings, files) = (run.summary.findings.len(), run.files.len());
        if files != 0 && files != findings {
            return Err(wrong(format!(
                "found {files} files, expected one for each of {findings} findings"
            )));
        }
        Ok(run)
    }
}
