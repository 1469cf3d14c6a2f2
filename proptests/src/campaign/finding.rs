//! The findings of a campaign.

use marlinspike::case::Case;
use marlinspike::check::{CaseReport, Diagnosis, OutputReport, Verdict};
use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};

use super::{Campaign, Fault, Trial, axes};

/// One case on which the kernel is wrong.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The case: its inputs and, if there are any, the kernel's outputs.
    pub case: Case<'static>,
    /// The verdict on the outputs.
    pub report: Option<CaseReport>,
    /// The kernel's fault, if it gave no outputs.
    pub fault: Option<Fault>,
}

impl Failure {
    pub(super) fn wrong(case: Case<'static>, report: CaseReport) -> Self {
        Self { case, report: Some(report), fault: None }
    }

    pub(super) fn fault(trial: &Trial, fault: Fault) -> Self {
        Self { case: trial.case.clone(), report: None, fault: Some(fault) }
    }

    /// The outputs that failed.
    pub fn failed(&self) -> impl Iterator<Item = &OutputReport> {
        let outputs = self.report.iter().flat_map(|report| &report.outputs);
        outputs.filter(|output| output.verdict == Verdict::Fail)
    }

    /// The first output whose diagnosis names a cause.
    pub fn cause(&self) -> Option<&Diagnosis> {
        let causes = self.failed().filter_map(|output| output.diagnosis.as_ref());
        causes.filter(|diagnosis| diagnosis.unexplained == 0).min_by_key(|d| d.strength as u8)
    }

    /// A key that failures with the same cause share: the failing output and the diagnosis, or the
    /// kind of fault.
    pub fn signature(&self) -> String {
        if let Some(fault) = &self.fault {
            return fault.kind().to_owned();
        }
        let output = self.failed().next().map_or("", |output| output.name.as_str());
        match self.cause() {
            Some(cause) => format!("{output}: {}", cause.id),
            None => format!("{output}: wrong values"),
        }
    }

    /// Whether this may be the same bug as `first`: the same kind of fault; or an output that failed in
    /// `first` too, with the cause that `first` names, if it names one.
    pub(super) fn is_like(&self, first: &Self) -> bool {
        match (&self.fault, &first.fault) {
            (Some(a), Some(b)) => a.kind() == b.kind(),
            (None, None) => {
                let id = |failure: &Self| failure.cause().map(|cause| cause.id.clone());
                let named = id(first);
                (named.is_none() || id(self) == named)
                    && self.failed().any(|output| first.failed().any(|o| o.name == output.name))
            }
            _ => false,
        }
    }
}

/// A distinct failure, shrunk.
#[derive(Debug, Serialize)]
pub struct Finding {
    /// [`Failure::signature`] of the first failing case, or of the minimal one if only that has a
    /// cause.
    pub signature: String,
    /// Number of the first failing case.
    pub index: u64,
    /// Short description of the first failing case.
    pub first: String,
    /// The cause, as the diagnosis of the minimal or of the first case names it.
    pub cause: Option<Diagnosis>,
    /// The config of the minimal case, one `key=value` per key.
    pub minimal: Vec<String>,
    /// Kernel runs that shrinking took.
    pub runs: u32,
    /// The minimal case's verdict; as JSON, an object of `report` and `fault`.
    #[serde(serialize_with = "reported")]
    pub failure: Failure,
}

fn reported<S: Serializer>(failure: &Failure, serializer: S) -> Result<S::Ok, S::Error> {
    let mut object = serializer.serialize_struct("Failure", 2)?;
    object.serialize_field("report", &failure.report)?;
    object.serialize_field("fault", &failure.fault)?;
    object.end()
}

impl Finding {
    pub(super) fn new(
        campaign: &Campaign,
        index: u64,
        first: Failure,
        mut minimal: Failure,
        runs: u32,
    ) -> Self {
        // A minimal case often has too few values for a diagnosis, unlike the first one.
        let (cause, signature) = match (first.cause(), minimal.cause()) {
            (None, Some(cause)) => (Some(cause.clone()), minimal.signature()),
            (cause, _) => (cause.cloned(), first.signature()),
        };
        let name = format!("{signature}, shrunk from case {index}");
        minimal.case.name = name;
        minimal.case.provenance = format!(
            "kernel under test; marlinspike {} fuzz, seed {:#018x}, case {index}, {}",
            env!("CARGO_PKG_VERSION"),
            campaign.generator.seed(),
            campaign.filter
        );
        let config = axes(&minimal.case.config);
        Self {
            signature,
            index,
            first: first.case.name.clone(),
            cause,
            minimal: config.into_iter().map(|(key, value)| format!("{key}={value}")).collect(),
            runs,
            failure: minimal,
        }
    }
}
