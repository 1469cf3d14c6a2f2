//! The findings of a campaign.

use marlinspike::case::Case;
use marlinspike::check::{CaseReport, Diagnosis, OutputReport, Strength, Verdict, mistaken};
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

    /// Whether a smaller case's cause explains this case: a wrong output's diagnosis names it too, or
    /// the operation with this known mistake gives every bit of the outputs.
    fn is_explained_by(&self, cause: &Diagnosis) -> bool {
        let mut own = self.failed().filter_map(|output| output.diagnosis.as_ref());
        if own.any(|d| d.id == cause.id && d.strength != Strength::Place) {
            return true;
        }
        let bytes = |case: &Case<'_>, name: &str| case.output(name).map(|t| t.bytes().to_vec());
        match mistaken(&self.case, &cause.id) {
            Ok(Some(wrong)) => {
                self.failed().all(|o| bytes(&wrong, &o.name) == bytes(&self.case, &o.name))
            }
            _ => false,
        }
    }

    /// Whether this may be the same bug as `first`: the same kind of fault; or an output that failed in
    /// `first` too, with a cause that explains `first`, or none where `first` has none.
    pub(super) fn is_like(&self, first: &Self) -> bool {
        match (&self.fault, &first.fault) {
            (Some(a), Some(b)) => a.kind() == b.kind(),
            (None, None) => {
                let is_same = match (first.cause(), self.cause()) {
                    (Some(first), own) => own.is_some_and(|own| own.id == first.id),
                    (None, Some(own)) => first.is_explained_by(own),
                    (None, None) => true,
                };
                is_same && self.failed().any(|output| first.failed().any(|o| o.name == output.name))
            }
            _ => false,
        }
    }
}

/// A distinct failure, shrunk.
#[derive(Debug, Serialize)]
pub struct Finding {
    /// [`Failure::signature`] of the first failing case, or of the minimal one if its cause explains
    /// the first one too.
    pub signature: String,
    /// Number of the first failing case.
    pub index: u64,
    /// Short description of the first failing case.
    pub first: String,
    /// The cause of the first case, as its diagnosis names it; or that of the minimal case, if it
    /// explains the first one too.
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
        // A minimal case has few values, so what fits them may not fit the first case.
        let confirmed = || minimal.cause().filter(|cause| first.is_explained_by(cause));
        let (cause, signature) = match first.cause() {
            Some(cause) => (Some(cause.clone()), first.signature()),
            None => match confirmed() {
                Some(cause) => (Some(cause.clone()), minimal.signature()),
                None => (None, first.signature()),
            },
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
