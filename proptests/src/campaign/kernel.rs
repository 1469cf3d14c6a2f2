//! The kernel under test and its inputs.

use std::collections::BTreeMap;
use std::time::Duration;

use marlinspike::case::{Case, Dim, TensorRule};
use marlinspike::container::write_container;
use marlinspike::num::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::CampaignError;

/// Outputs by bare name (`y`).
pub type Outputs = BTreeMap<String, Tensor<'static>>;

/// A kernel under test: computes the outputs of a case from its inputs.
pub trait Kernel {
    /// Runs the kernel once.
    ///
    /// # Errors
    /// [`Fault`] if there are no outputs. [`Fault::Unsupported`] skips the case,
    /// [`Fault::NotStarted`] and [`Fault::Exchange`] end the campaign with an error; every other fault is
    /// a finding.
    fn run(&mut self, trial: &Trial) -> Result<Outputs, Fault>;
}

impl<F: FnMut(&Trial) -> Result<Outputs, Fault>> Kernel for F {
    fn run(&mut self, trial: &Trial) -> Result<Outputs, Fault> {
        self(trial)
    }
}

/// The inputs of a kernel.
#[derive(Debug, Clone)]
pub struct Trial {
    /// The config and the inputs; no outputs.
    pub case: Case<'static>,
    /// Outputs of the reference that the kernel need not compute: packed weights, permuted scales,
    /// sorted indices.
    pub reference: Outputs,
    /// The outputs that the kernel must compute.
    pub wanted: Vec<OutputSpec>,
}

/// Name, type and shape of an output that a kernel must compute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputSpec {
    /// Bare name.
    pub name: String,
    /// safetensors name of the element type.
    pub dtype: String,
    /// Shape; `None` if it depends on values.
    pub shape: Option<Vec<usize>>,
}

/// A fault of a kernel that gave no valid outputs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "fault", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Fault {
    /// The kernel does not support this configuration. The case is skipped and counted.
    #[error("not supported by the kernel: {reason}")]
    Unsupported {
        /// The kernel's message.
        reason: String,
    },
    /// The kernel's program cannot be started. This ends the campaign and is no finding.
    #[error("{program}: {problem}")]
    NotStarted {
        /// The program.
        program: String,
        /// The system's reason.
        problem: String,
    },
    /// Inputs or outputs could not be exchanged with the kernel, through no fault of its own. This ends
    /// the campaign and is no finding.
    #[error("{folder}: {problem}")]
    Exchange {
        /// The folder of the exchanged files.
        folder: String,
        /// What was found and what was expected.
        problem: String,
    },
    /// The kernel reported an error or its process ended.
    #[error("crashed: {detail}")]
    Crashed {
        /// Exit status or signal, and the end of what was printed.
        detail: String,
    },
    /// The kernel did not answer in time.
    #[error("no answer within {limit:?}")]
    TimedOut {
        /// The time limit.
        limit: Duration,
    },
    /// The outputs could not be read.
    #[error("unreadable outputs: {detail}")]
    Unreadable {
        /// What is wrong with them.
        detail: String,
    },
    /// The kernel wrote outside of a tensor.
    #[error("wrote outside of {tensor}: {detail}")]
    OutOfBounds {
        /// Name of the tensor.
        tensor: String,
        /// Where.
        detail: String,
    },
    /// The kernel left bytes of an output unwritten.
    #[error("left {bytes} of {of} bytes of {tensor} unwritten, the first at byte {first}")]
    Unwritten {
        /// Name of the tensor.
        tensor: String,
        /// Unwritten bytes.
        bytes: usize,
        /// Bytes of the tensor.
        of: usize,
        /// Offset of the first.
        first: usize,
    },
    /// Two runs on the same inputs gave different bits.
    #[error("two runs on the same inputs differ: {tensor}, first at byte {first}")]
    Nondeterministic {
        /// Name of the tensor.
        tensor: String,
        /// Offset of the first byte that differs.
        first: usize,
    },
    /// A row alone gave other bits than in its batch.
    #[error("row {row} of {tensor} differs alone and in a batch of {rows}, first at byte {first}")]
    BatchDependent {
        /// Name of the tensor.
        tensor: String,
        /// The row.
        row: usize,
        /// Rows of the batch.
        rows: usize,
        /// Offset of the first byte that differs, within the row.
        first: usize,
    },
}

impl Fault {
    /// The fault that a process reports in JSON.
    pub(super) fn from_json(json: &str) -> Self {
        serde_json::from_str(json).unwrap_or_else(|_| Self::Crashed { detail: json.to_owned() })
    }

    /// The name of the kind of fault.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Unsupported { .. } => "unsupported",
            Self::NotStarted { .. } => "not started",
            Self::Exchange { .. } => "exchange",
            Self::Crashed { .. } => "crash",
            Self::TimedOut { .. } => "timeout",
            Self::Unreadable { .. } => "unreadable outputs",
            Self::OutOfBounds { .. } => "out-of-bounds write",
            Self::Unwritten { .. } => "unwritten output",
            Self::Nondeterministic { .. } => "nondeterminism",
            Self::BatchDependent { .. } => "batch dependence",
        }
    }
}

impl Trial {
    /// Splits a case into inputs and wanted `outputs`. If `outputs` is empty, `y` is wanted, or
    /// every output of an operation without `y`.
    ///
    /// # Errors
    /// [`CampaignError::Output`] for a name that the operation does not have.
    pub fn new(case: Case<'static>, outputs: &[String]) -> Result<Self, CampaignError> {
        let rules = case.rules()?;
        let names = match outputs {
            [] => default_outputs(&case, &rules),
            names => names.to_vec(),
        };
        let mut wanted = Vec::new();
        for name in names {
            let full = format!("out.{name}");
            let Some(rule) = rules.iter().find(|rule| rule.name == full) else {
                let known = rules.iter().filter_map(|rule| rule.name.strip_prefix("out."));
                let known = known.collect::<Vec<_>>().join(", ");
                return Err(CampaignError::Output { found: name, expected: known });
            };
            let given = case.outputs.get(&name);
            let shape: Option<Vec<usize>> = rule.shape.iter().map(size).collect();
            let shape = shape.or_else(|| given.map(|tensor| tensor.shape().to_vec()));
            let dtype = given.map(Tensor::dtype).filter(|ty| rule.dtypes.contains(ty));
            let dtype = dtype.or_else(|| rule.dtypes.first().copied()).unwrap_or(DType::F32);
            wanted.push(OutputSpec { name, dtype: dtype.name().to_owned(), shape });
        }
        let mut case = case;
        let mut reference = std::mem::take(&mut case.outputs);
        reference.retain(|name, _| !wanted.iter().any(|w| w.name == *name));
        Ok(Self { case, reference, wanted })
    }

    /// A file for another process: the case with its inputs, the reference's other outputs as
    /// `ref.NAME`, and the wanted outputs as JSON in the metadata key `outputs`.
    ///
    /// # Errors
    /// None for a case of a campaign.
    pub fn to_bytes(&self) -> Result<Vec<u8>, CampaignError> {
        let text = |s: &str| s.to_owned();
        let metadata = BTreeMap::from([
            (text("format"), text(marlinspike::case::FORMAT)),
            (text("version"), text(marlinspike::case::VERSION)),
            (text("op"), text(self.case.op.name())),
            (text("name"), self.case.name.clone()),
            (text("provenance"), self.case.provenance.clone()),
            (text("config"), serde_json::Value::Object(self.case.config.to_json()).to_string()),
            (text("outputs"), serde_json::to_string(&self.wanted).unwrap_or_default()),
        ]);
        let named = |prefix: &'static str, tensors: &Outputs| {
            let rename =
                |(n, t): (&String, &Tensor<'static>)| t.clone().renamed(format!("{prefix}{n}"));
            tensors.iter().map(rename).collect::<Vec<_>>()
        };
        let mut tensors = named("in.", &self.case.inputs);
        tensors.extend(named("ref.", &self.reference));
        write_container(&tensors, &metadata, Vec::new())
            .map_err(|error| CampaignError::Write { problem: error.to_string() })
    }
}

/// The default outputs: `y` if the operation has it, otherwise all outputs of the case or, if there
/// are none, of the operation.
fn default_outputs(case: &Case<'_>, rules: &[TensorRule]) -> Vec<String> {
    let outputs = rules.iter().filter_map(|rule| rule.name.strip_prefix("out."));
    let known: Vec<String> = outputs.map(str::to_owned).collect();
    if known.iter().any(|name| name == "y") {
        return vec!["y".to_owned()];
    }
    if case.outputs.is_empty() { known } else { case.outputs.keys().cloned().collect() }
}

/// The size, if the rule fixes it.
pub(super) fn size(dim: &Dim) -> Option<usize> {
    match *dim {
        Dim::Is(size) => Some(size),
        _ => None,
    }
}

/// The element type of a [`OutputSpec`].
pub(super) fn dtype(wanted: &OutputSpec) -> DType {
    DType::from_name(&wanted.dtype).unwrap_or(DType::U8)
}

/// The bytes of a wanted output, as far as they are known.
#[cfg(unix)]
pub(super) fn bytes_of(wanted: &OutputSpec) -> u64 {
    let elements = wanted.shape.iter().flatten().fold(1u64, |all, &n| all.saturating_mul(n as u64));
    elements.saturating_mul(dtype(wanted).bytes() as u64)
}
